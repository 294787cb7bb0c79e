//! What is wrong with the machine, for tests: ECC errors, rows that cannot be remapped, what the driver
//! says it takes to repair a GPU, a driver that is not loaded.

use crate::layout::MAX_GPUS;
use crate::session::Session;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// In the shared state. All zero: nothing is wrong.
#[repr(C)]
pub struct Faults {
    /// Counts unloads and loads of the driver: odd while it is not loaded. A process that initialised NVML at
    /// another count has to do so again.
    driver: AtomicU32,
    gpus: [GpuFaults; MAX_GPUS],
}

#[repr(C)]
struct GpuFaults {
    uncorrectable: AtomicU64,
    remap_failed: AtomicU32,
    recovery: AtomicU32,
}

/// What NVML answers of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultsOf {
    /// Uncorrectable ECC errors since the last reset.
    pub uncorrectable: u64,
    /// A row could not be remapped.
    pub remap_failed: bool,
    /// `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: u32,
}

/// The words for [`FaultsOf::recovery`], by number.
pub const RECOVERY: [&str; 5] = ["none", "reset", "reboot", "drain", "drain-and-reset"];

impl Session {
    /// What is wrong with a GPU.
    #[must_use]
    pub fn faults(&self, gpu: usize) -> FaultsOf {
        let faults = &self.shared().faults.gpus[gpu];
        FaultsOf {
            uncorrectable: faults.uncorrectable.load(Ordering::Acquire),
            remap_failed: faults.remap_failed.load(Ordering::Acquire) != 0,
            recovery: faults.recovery.load(Ordering::Acquire),
        }
    }

    /// Says what is wrong with a GPU from now on.
    pub fn set_faults(&self, gpu: usize, new: FaultsOf) {
        let faults = &self.shared().faults.gpus[gpu];
        faults.uncorrectable.store(new.uncorrectable, Ordering::Release);
        faults.remap_failed.store(u32::from(new.remap_failed), Ordering::Release);
        faults.recovery.store(new.recovery, Ordering::Release);
    }

    /// What a reset does: counters since the last reset start at zero, the driver asks for nothing more.
    /// What is broken stays so.
    pub fn reset_gpu(&self, gpu: usize) {
        let faults = FaultsOf { uncorrectable: 0, recovery: 0, ..self.faults(gpu) };
        self.set_faults(gpu, faults);
    }

    /// Unloads the driver, or loads it, as far as NVML sees. Loading resets all GPUs.
    pub fn set_driver_loaded(&self, loaded: bool) {
        let count = self.driver_epoch();
        if loaded == (count.is_multiple_of(2)) {
            return;
        }
        for gpu in 0..if loaded { self.config().gpus.len() } else { 0 } {
            self.reset_gpu(gpu);
        }
        self.shared().faults.driver.store(count + 1, Ordering::Release);
    }

    /// See [`Faults`]: odd while the driver is not loaded.
    #[must_use]
    pub fn driver_epoch(&self) -> u32 {
        self.shared().faults.driver.load(Ordering::Acquire)
    }
}
