//! A node with GPUs that a test can break, a fake kubelet, the plugin, and tenants.

mod admin;
mod gpus;
mod mount;
mod node;
mod process;
mod tenant;
mod wait;

pub use crate::GIB;
pub use admin::{admin, target};
pub use gpus::{FakeGpus, gpu, replica, uses};
pub use mount::Mounted;
pub use node::{HELD, SETTINGS, TestNode, id_of, pod};
pub use process::{Simulated, stderr, tessera};
pub use tenant::{Tenant, connect, generation, limit, tenant_process};
pub use wait::{bounded, until};

/// The resource of the tests.
pub const GPU: &str = "tessera.dev/gpu";
