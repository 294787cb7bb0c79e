//! `tessera-tenant`: a small CUDA client that behaves like a tenant of a shared GPU.
//!
//! It speaks the driver API alone (`dlopen` of `libcuda.so.1`, or every pointer through
//! `cuGetProcAddress`), so it runs on NVIDIA's driver and on the simulated one, with the shim
//! preloaded and without. The demo, the end-to-end pods and the benches are built from it.
//!
//! Everything it reports is one JSON object per line on standard output; people's text goes to
//! standard error. Exit codes are [`exit`]'s.

pub mod args;
pub mod churn;
pub mod cuda;
pub mod driver;
pub mod exec;
pub mod exit;
pub mod greedy;
pub mod histogram;
pub mod hold;
pub mod infer;
pub mod info;
pub mod nvml;
pub mod processes;
pub mod report;
pub mod rng;
pub mod stop;

use crate::driver::Resolve;

/// What every subcommand needs to reach the driver.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// How driver functions are found.
    pub resolve: Resolve,
    /// CUDA device ordinal.
    pub device: i32,
}
