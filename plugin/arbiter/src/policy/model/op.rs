//! What a simulated tenant has in flight.

use super::super::types::GpuIndex;
use super::Load;

/// A host function in the middle of a stream: the GPU does nothing of it, and what is behind it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFunctions {
    /// One after so many operations.
    pub every: u64,
    /// Shortest and longest, nanoseconds.
    pub ns: (u64, u64),
}

/// One operation, or one host function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    /// Remaining nanoseconds.
    pub(super) left: f64,
    /// Runs on the host.
    pub(super) on_host: bool,
}

/// A part of a GPU that one tenant has beside others: a hardware slice for each process with work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slices {
    /// Processes of the tenant, and of all with work on the GPU.
    pub(super) own: u32,
    pub(super) all: u32,
}

impl Slices {
    /// What one nanosecond of the GPU is worth to it.
    pub(super) fn rate(self) -> f64 {
        f64::from(self.own) / f64::from(self.all.max(1))
    }
}

impl Load {
    /// Whether it has this GPU.
    pub(super) fn is_on(&self, gpu: GpuIndex) -> bool {
        self.gpus.contains(&gpu)
    }

    /// Processes, one at least.
    pub(super) fn slices(&self) -> u32 {
        self.processes.max(1)
    }
}
