//! What is made to go wrong with the machine, for tests: XIDs, GPUs that fall off the bus, ECC errors, rows that
//! cannot be remapped, what the driver says it takes to repair a GPU, a driver that is not loaded, an NVML
//! function that fails.

use crate::layout::{MAX_GPUS, MAX_XIDS};
use crate::session::Session;
use crate::{clock, lock};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

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
    /// CLOCK_MONOTONIC of the last reset, and the GPU time used by then; 0: there was none.
    reset_ns: AtomicU64,
    reset_busy_ns: AtomicU64,
    failing: [Failing; MAX_FAILING],
}

/// Functions of NVML that may fail for one GPU at one time.
const MAX_FAILING: usize = 32;

/// A function of NVML that fails for a GPU, or for one of its MIG instances.
#[repr(C)]
struct Failing {
    /// [`mark`] of its name; 0: none.
    function: AtomicU64,
    /// What it returns; 0: it works.
    code: AtomicI32,
    /// One more than the instance's number; 0: the GPU and all its instances.
    instance: AtomicU32,
}

/// Any function, for [`Session::set_failing`].
pub const ANY_FUNCTION: &str = "all";

/// Some codes of `nvmlReturn_t` and the words for them.
pub const ERRORS: [(&str, i32); 13] = [
    ("uninitialized", 1),
    ("invalid-argument", 2),
    ("not-supported", 3),
    ("no-permission", 4),
    ("not-found", 6),
    ("insufficient-power", 8),
    ("timeout", 10),
    ("irq-issue", 11),
    ("lost", 15),
    ("reset-required", 16),
    ("in-use", 19),
    ("no-data", 21),
    ("unknown", 999),
];

/// A function of NVML, whatever its version: `nvmlDeviceGetMemoryInfo_v2` is `nvmlDeviceGetMemoryInfo`.
fn mark(function: &str) -> u64 {
    let name = match function.rsplit_once("_v") {
        Some((name, version)) if version.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => function,
    };
    // FNV-1a.
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, mix).max(1)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultsOf {
    /// Uncorrectable ECC errors since the last reset.
    pub uncorrectable: u64,
    /// A row could not be remapped.
    pub remap_failed: bool,
    /// `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: u32,
}

/// How long the driver of a new machine has been loaded already: a reset in its first seconds shows by the energy that was
/// counted before, as on a node that has run for days.
const LOADED_NS: u64 = 3_600_000_000_000;

/// The words for [`FaultsOf::recovery`], by number.
pub const RECOVERY: [&str; 5] = ["none", "reset", "reboot", "drain", "drain-and-reset"];

impl Session {
    pub fn faults(&self, gpu: usize) -> FaultsOf {
        let faults = &self.shared().faults.gpus[gpu];
        FaultsOf {
            uncorrectable: faults.uncorrectable.load(Ordering::Acquire),
            remap_failed: faults.remap_failed.load(Ordering::Acquire) != 0,
            recovery: faults.recovery.load(Ordering::Acquire),
        }
    }

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
        let busy_ns = self.busy_of(gpu);
        let shared = &self.shared().faults.gpus[gpu];
        shared.reset_busy_ns.store(busy_ns, Ordering::Release);
        shared.reset_ns.store(clock::now_ns(), Ordering::Release);
    }

    /// Nanoseconds since a GPU was last reset, and of these how many its units were busy, summed.
    pub fn since_reset(&self, gpu: usize) -> (u64, u64) {
        let shared = &self.shared().faults.gpus[gpu];
        let created = self.shared().created_ns.load(Ordering::Acquire);
        let reset = shared.reset_ns.load(Ordering::Acquire);
        let from = if reset > created { reset } else { created.saturating_sub(LOADED_NS) };
        let busy = self.busy_of(gpu).saturating_sub(shared.reset_busy_ns.load(Ordering::Acquire));
        (clock::now_ns().saturating_sub(from), busy)
    }

    fn busy_of(&self, gpu: usize) -> u64 {
        self.config().units_of(gpu).map(|unit| self.gpu_busy(unit).0).sum()
    }

    /// From now on a function of NVML, or [`ANY_FUNCTION`], returns `code` for a GPU and its instances, or for one
    /// of these alone; 0: it works again. Whether there was room to note it.
    pub fn set_failing(
        &self,
        gpu: usize,
        instance: Option<u32>,
        function: &str,
        code: i32,
    ) -> bool {
        let _locked = self.lock();
        let (function, instance) = (mark(function), instance.map_or(0, |number| number + 1));
        let failing = &self.shared().faults.gpus[gpu].failing;
        let is_it = |one: &&Failing| {
            one.function.load(Ordering::Acquire) == function
                && one.instance.load(Ordering::Acquire) == instance
        };
        let is_free = |one: &&Failing| one.code.load(Ordering::Acquire) == 0;
        let Some(one) = failing.iter().find(is_it).or_else(|| failing.iter().find(is_free)) else {
            return false;
        };
        one.code.store(0, Ordering::Release);
        one.function.store(function, Ordering::Release);
        one.instance.store(instance, Ordering::Release);
        one.code.store(code, Ordering::Release);
        true
    }

    /// What a function of NVML returns for a GPU, or one of its instances, instead of an answer; `None` where it
    /// works.
    pub fn failing(&self, gpu: usize, instance: Option<u32>, function: &str) -> Option<i32> {
        let (wanted, any) = (mark(function), mark(ANY_FUNCTION));
        self.shared().faults.gpus[gpu].failing.iter().find_map(|one| {
            let code = one.code.load(Ordering::Acquire);
            if code == 0 {
                return None;
            }
            let function = one.function.load(Ordering::Acquire);
            let of = one.instance.load(Ordering::Acquire);
            let is_meant = of == 0 || Some(of - 1) == instance;
            (is_meant && (function == wanted || function == any)).then_some(code)
        })
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
    pub fn driver_epoch(&self) -> u32 {
        self.shared().faults.driver.load(Ordering::Acquire)
    }

    /// Injects an XID, attributed to a GPU instance or to none; NVML event sets registered for it wake.
    pub fn inject_xid(&self, gpu: usize, gpu_instance: Option<u32>, code: u32) {
        let _locked = self.lock();
        let n = self.shared().xids_written.load(Ordering::Relaxed);
        let record = &self.shared().xids[n as usize % MAX_XIDS];
        record.gpu.store(u32::try_from(gpu).unwrap_or(0), Ordering::Relaxed);
        record.code.store(code, Ordering::Relaxed);
        record.gpu_instance.store(gpu_instance.unwrap_or(u32::MAX), Ordering::Relaxed);
        // Release: pairs with Acquire in `xids_written`.
        self.shared().xids_written.store(n + 1, Ordering::Release);
        lock::wake_all(&self.shared().xids_written);
    }

    /// Makes a GPU fall off the bus (XID 79), or come back as after a reset.
    pub fn set_lost(&self, gpu: usize, lost: bool) {
        self.shared().lost[gpu].store(u32::from(lost), Ordering::Release);
        if lost {
            self.inject_xid(gpu, None, 79);
        } else {
            self.reset_gpu(gpu);
        }
    }
}
