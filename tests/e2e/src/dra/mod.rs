//! What cases of Dynamic Resource Allocation are written in: claims and the pods that name them, and what the
//! driver has published and the scheduler has decided.

pub mod claims;
pub mod mode;
pub mod slices;

pub const DRIVER: &str = "gpu.tessera.dev";
/// The class of shares, as the chart makes it.
pub const CLASS: &str = "gpu.tessera.dev";
/// `dra.memory_step`, and so the smallest difference between two sizes.
pub const STEP_BYTES: u64 = 64 << 20;
