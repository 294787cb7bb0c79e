//! The plugin on a node with a fake kubelet and GPUs that a test can break, in the test's process or in its own.

mod adversity;
mod allocate;
mod kubelet;
mod observe;
mod operate;

/// What [`tessera_harness::plugin::Tenant`] starts.
#[test]
fn tenant_process() {
    tessera_harness::plugin::tenant_process();
}
