//! The plugin's side of the quota page.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{Policy, is_name, name_in};
use crate::abi;
use crate::error::{PageError, PageFault};
use crate::files::{self, Spares};
use crate::layout::{
    DEPARTING_NONE, DEPARTING_SOME, DEPARTURE_NS, GATE_SOLO, MAX_BYTES, MAX_GPUS, QUOTA_BYTES,
    QUOTA_FILE, QUOTA_MAGIC, QuotaGpu, QuotaPage, UUID_LEN, gate_epoch, gate_word,
};
use crate::os::Map;

/// What one allocation may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSpec {
    /// Hash of resource and sorted replica ids, hex; 1 to 63 printable ASCII characters.
    pub allocation: String,
    /// Grows with every Allocate of this id.
    pub generation: u64,
    /// One entry per GPU, 1 to [`MAX_GPUS`], each UUID once.
    pub gpus: Vec<GpuQuota>,
}

/// What one allocation may use of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuQuota {
    /// The GPU's or MIG instance's UUID as NVML prints it; 1 to 63 printable ASCII characters.
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold, at most [`MAX_BYTES`].
    pub memory_limit_bytes: u64,
    /// Bytes charged for each context.
    pub context_overhead_bytes: u64,
    /// Share of GPU time in thousandths of a GPU.
    pub cores_millis: u32,
    /// How the share is held.
    pub policy: Policy,
}

impl QuotaSpec {
    /// Whether a page can say this of its GPUs; else what is wrong.
    fn check(&self) -> Result<(), String> {
        if self.gpus.is_empty() || self.gpus.len() > MAX_GPUS {
            return Err(format!("{} GPUs; an allocation has 1 to {MAX_GPUS}", self.gpus.len()));
        }
        let fits = |gpu: &&GpuQuota| {
            let most = gpu.memory_limit_bytes.max(gpu.context_overhead_bytes);
            is_name(&gpu.uuid, UUID_LEN) && most <= MAX_BYTES
        };
        match self.gpus.iter().find(|gpu| !fits(gpu)) {
            Some(gpu) => Err(format!("{gpu:?}")),
            None => Ok(()),
        }
    }
}

/// Publishes the quota page of an allocation in `dir`, mode 0644, of this program's own version.
///
/// Where none exists it appears whole (temporary file, magic last, link). Where the page of the
/// same allocation and GPUs exists, running containers map it: limits and generation are updated
/// in place.
pub fn create(dir: &Path, spec: &QuotaSpec) -> Result<QuotaWriter, PageError> {
    create_from(dir, spec, abi::version(), None)
}

/// [`create`] of a version that [`abi::speaks`], with files to fall back on where the file system is
/// full.
pub fn create_from(
    dir: &Path,
    spec: &QuotaSpec,
    abi: u32,
    spares: Option<&Spares>,
) -> Result<QuotaWriter, PageError> {
    let path = dir.join(QUOTA_FILE);
    spec.check().map_err(|what| PageError::new(&path, PageFault::Invalid(what)))?;
    if !files::exists(&path)
        && let Some(file) = files::publish(dir, QUOTA_FILE, &encode(spec, abi), 0o644, spares)?
    {
        return QuotaWriter::map(path, &file);
    }
    let writer = QuotaWriter::open(dir)?;
    if writer.abi != abi {
        return Err(PageError::new(&path, PageFault::Abi { found: writer.abi }));
    }
    writer.update(spec)?;
    Ok(writer)
}

/// The version of the page in `dir`, whether it can be read or not; `None` where there is no page.
pub fn abi_in(dir: &Path) -> Option<u32> {
    let (file, stat) = files::open_page(&dir.join(QUOTA_FILE)).ok()?;
    let mut head = [0; 12];
    file.read_exact_at(&mut head, 0).ok()?;
    let magic = head.first_chunk().copied().map(u64::from_le_bytes);
    let whole = stat.size == QUOTA_BYTES as u64;
    let abi = head.last_chunk().copied().map(u32::from_le_bytes);
    abi.filter(|_| whole && magic == Some(QUOTA_MAGIC))
}

/// The page's bytes.
fn encode(spec: &QuotaSpec, abi: u32) -> Vec<u8> {
    let mut page = vec![0; QUOTA_BYTES];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    let count = u32::try_from(spec.gpus.len()).unwrap_or(u32::MAX);
    put(offset_of!(QuotaPage, magic), &QUOTA_MAGIC.to_le_bytes());
    put(offset_of!(QuotaPage, abi), &abi.to_le_bytes());
    put(offset_of!(QuotaPage, gpu_count), &count.to_le_bytes());
    put(offset_of!(QuotaPage, generation), &spec.generation.to_le_bytes());
    put(offset_of!(QuotaPage, allocation), spec.allocation.as_bytes());
    for (index, gpu) in spec.gpus.iter().enumerate() {
        let at = offset_of!(QuotaPage, gpus) + index * size_of::<QuotaGpu>();
        let mut put = |field: usize, bytes: &[u8]| put(at + field, bytes);
        put(offset_of!(QuotaGpu, uuid), gpu.uuid.as_bytes());
        put(offset_of!(QuotaGpu, memory_limit_bytes), &gpu.memory_limit_bytes.to_le_bytes());
        put(
            offset_of!(QuotaGpu, context_overhead_bytes),
            &gpu.context_overhead_bytes.to_le_bytes(),
        );
        put(offset_of!(QuotaGpu, cores_millis), &gpu.cores_millis.to_le_bytes());
        put(offset_of!(QuotaGpu, policy), &gpu.policy.to_word().to_le_bytes());
        put(offset_of!(QuotaGpu, gate), &GATE_SOLO.to_le_bytes());
    }
    page
}

/// The plugin's handle on one quota page. GPUs are given by index; an index beyond the page's
/// GPUs panics.
#[derive(Debug)]
pub struct QuotaWriter {
    path: PathBuf,
    map: Map<QuotaPage>,
    abi: u32,
    gpus: usize,
}

impl QuotaWriter {
    /// Opens the page that exists in `dir`.
    pub fn open(dir: &Path) -> Result<Self, PageError> {
        let path = dir.join(QUOTA_FILE);
        let (file, stat) = files::open_page(&path)?;
        if stat.size != QUOTA_BYTES as u64 {
            return Err(PageError::new(&path, PageFault::WrongSize(stat.size)));
        }
        Self::map(path, &file)
    }

    fn map(path: PathBuf, file: &File) -> Result<Self, PageError> {
        // SAFETY: only the plugin writes this file, and after publishing it changes atomics alone;
        // `QuotaPage` is integers only, and page-aligned at most.
        let map = unsafe { Map::<QuotaPage>::new(file.as_raw_fd(), true) }
            .map_err(|errno| PageError::os(&path, "mmap", errno))?;
        let fail = |fault| Err(PageError::new(&path, fault));
        if map.magic.load(Ordering::Acquire) != QUOTA_MAGIC {
            return fail(PageFault::BadMagic);
        }
        let abi = map.abi.load(Ordering::Relaxed);
        if !abi::speaks(abi) {
            return fail(PageFault::Abi { found: abi });
        }
        let gpus = usize::try_from(map.gpu_count.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        if !(1..=MAX_GPUS).contains(&gpus) {
            return fail(PageFault::BadMagic);
        }
        Ok(Self { path, map, abi, gpus })
    }

    fn update(&self, spec: &QuotaSpec) -> Result<(), PageError> {
        let same = |(gpu, want): (&QuotaGpu, &GpuQuota)| name_in(&gpu.uuid) == Some(&want.uuid);
        let found = name_in(&self.map.allocation).unwrap_or_default();
        if found != spec.allocation
            || self.gpus != spec.gpus.len()
            || !self.map.gpus.iter().zip(&spec.gpus).all(same)
        {
            let found = found.to_owned();
            return Err(PageError::new(&self.path, PageFault::Foreign { found }));
        }
        for (gpu, want) in self.map.gpus.iter().zip(&spec.gpus) {
            gpu.context_overhead_bytes.store(want.context_overhead_bytes, Ordering::Relaxed);
            gpu.cores_millis.store(want.cores_millis, Ordering::Relaxed);
            gpu.policy.store(want.policy.to_word(), Ordering::Relaxed);
            gpu.memory_limit_bytes.store(want.memory_limit_bytes, Ordering::Relaxed);
        }
        // Release: who sees the new generation sees the limits that came with it.
        self.map.generation.store(spec.generation, Ordering::Release);
        Ok(())
    }

    /// The page's version: this program's or the one before.
    pub fn abi(&self) -> u32 {
        self.abi
    }

    /// GPUs in the page.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    fn gpu(&self, gpu: usize) -> &QuotaGpu {
        &self.map.gpus[..self.gpus][gpu]
    }

    /// Changes the memory limit of a GPU, at most [`MAX_BYTES`]. Below what is in use, it refuses
    /// new requests and takes nothing back.
    pub fn set_memory_limit(&self, gpu: usize, bytes: u64) {
        self.gpu(gpu).memory_limit_bytes.store(bytes.min(MAX_BYTES), Ordering::Relaxed);
    }

    /// Publishes the bytes that NVML shows for the tenant's processes beyond everything charged, at
    /// most [`MAX_BYTES`].
    pub fn set_observed_overhead(&self, gpu: usize, bytes: u64) {
        self.gpu(gpu).observed_overhead_bytes.store(bytes.min(MAX_BYTES), Ordering::Relaxed);
    }

    /// What [`Self::set_observed_overhead`] published last, by this plugin or the one before.
    pub fn observed_overhead(&self, gpu: usize) -> u64 {
        self.gpu(gpu).observed_overhead_bytes.load(Ordering::Relaxed)
    }

    /// Publishes whether the driver has memory of dead processes on a GPU, whosever they were.
    pub fn set_departing(&self, gpu: usize, any: bool) {
        let word = if any { DEPARTING_SOME } else { DEPARTING_NONE };
        self.gpu(gpu).departing.store(word, Ordering::Relaxed);
    }

    /// Changes the compute share of a GPU.
    pub fn set_cores(&self, gpu: usize, millis: u32, policy: Policy) {
        self.gpu(gpu).cores_millis.store(millis, Ordering::Relaxed);
        self.gpu(gpu).policy.store(policy.to_word(), Ordering::Relaxed);
    }

    /// Shows that the plugin lives: `CLOCK_MONOTONIC` nanoseconds.
    pub fn set_heartbeat(&self, ns: u64) {
        self.map.heartbeat_ns.store(ns, Ordering::Relaxed);
    }

    /// Sets how long a dead process's bytes stay charged where nobody sees that the driver has given
    /// them back: from a microsecond to an hour.
    pub fn set_departure(&self, time: Duration) {
        let us = u32::try_from(time.as_micros()).unwrap_or(u32::MAX).clamp(1, 3_600_000_000);
        self.map.departure_us.store(us, Ordering::Relaxed);
    }

    /// What [`Self::set_departure`] set last.
    pub fn departure(&self) -> Duration {
        match self.map.departure_us.load(Ordering::Relaxed) {
            0 => Duration::from_nanos(DEPARTURE_NS),
            us => Duration::from_micros(us.into()),
        }
    }

    /// Sets the gate (`GATE_*`) of a GPU in a new epoch, which is returned, and wakes who waits for
    /// it. Only one thread may call it for a page.
    pub fn set_gate(&self, gpu: usize, state: u32) -> u32 {
        self.set_gate_and(gpu, state, || {})
    }

    /// The same, and does `before` before anybody is woken, who may take this thread's processor.
    pub fn set_gate_and(&self, gpu: usize, state: u32, before: impl FnOnce()) -> u32 {
        let gate = &self.gpu(gpu).gate;
        let epoch = gate_epoch(gate.load(Ordering::Relaxed)).wrapping_add(1);
        let word = gate_word(epoch, state);
        gate.store(word, Ordering::Release);
        before();
        wake(gate, i32::MAX);
        gate_epoch(word)
    }

    /// Wakes one of those who wait for a GPU's gate, which stays as it is: it is about to change.
    pub fn rouse(&self, gpu: usize) {
        wake(&self.gpu(gpu).gate, 1);
    }

    /// The gate word of a GPU as it is.
    pub fn gate(&self, gpu: usize) -> u32 {
        self.gpu(gpu).gate.load(Ordering::Relaxed)
    }

    /// Shows that the arbiter lives (`CLOCK_MONOTONIC` nanoseconds), that there is none (0) or no
    /// more ([`ARBITER_GONE`](crate::layout::ARBITER_GONE)).
    pub fn set_arbiter(&self, ns: u64) {
        self.map.arbiter_ns.store(ns, Ordering::Release);
    }

    /// Says whether this arbiter takes the descriptors of flight pages.
    pub fn set_takes_flight(&self, takes: bool) {
        self.map.takes_flight.store(u32::from(takes), Ordering::Relaxed);
    }

    /// The beginning of this tenant's part of the cycle without an arbiter, in thousandths.
    pub fn set_phase(&self, gpu: usize, millis: u32) {
        self.gpu(gpu).phase_millis.store(millis, Ordering::Relaxed);
    }

    /// What [`Self::set_phase`] published last.
    pub fn phase(&self, gpu: usize) -> u32 {
        self.gpu(gpu).phase_millis.load(Ordering::Relaxed)
    }

    /// Sets how many microseconds the tenant may be idle while YIELD before it says so.
    pub fn set_idle(&self, gpu: usize, microseconds: u32) {
        self.gpu(gpu).idle_us.store(microseconds, Ordering::Relaxed);
    }

    /// Sets how many operations, and how many microseconds of work, may be in flight while the gate
    /// is OPEN.
    pub fn set_window(&self, gpu: usize, operations: u32, microseconds: u32) {
        self.gpu(gpu).window_us.store(microseconds, Ordering::Relaxed);
        self.gpu(gpu).window.store(operations, Ordering::Relaxed);
    }

    /// What the page says now.
    pub fn spec(&self) -> QuotaSpec {
        let gpus = self.map.gpus[..self.gpus].iter().map(|gpu| GpuQuota {
            uuid: name_in(&gpu.uuid).unwrap_or_default().to_owned(),
            memory_limit_bytes: gpu.memory_limit_bytes.load(Ordering::Relaxed),
            context_overhead_bytes: gpu.context_overhead_bytes.load(Ordering::Relaxed),
            cores_millis: gpu.cores_millis.load(Ordering::Relaxed),
            policy: Policy::from_word(gpu.policy.load(Ordering::Relaxed)).unwrap_or(Policy::Burst),
        });
        QuotaSpec {
            allocation: name_in(&self.map.allocation).unwrap_or_default().to_owned(),
            generation: self.map.generation.load(Ordering::Acquire),
            gpus: gpus.collect(),
        }
    }
}

/// `FUTEX_WAKE` of so many waiters, in any process.
fn wake(word: &AtomicU32, most: i32) {
    // SAFETY: FUTEX_WAKE reads no memory of ours beyond the address, which is mapped.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, most) };
}
