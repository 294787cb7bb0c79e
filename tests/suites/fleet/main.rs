//! Several plugins as they are shipped, each on a machine of its own, behind an API server's proxy; and what
//! `kubectl-tessera` makes of them with a kubeconfig.

mod nodes;

/// A process that holds memory, where the harness starts this program again.
#[test]
fn tenant_process() {
    tessera_harness::plugin::tenant_process();
}
