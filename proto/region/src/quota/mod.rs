//! The quota page: what a tenant may use. The plugin writes it, the tenant maps it read-only.
//!
//! A page appears whole ([`create`] links a finished file into place) and its inode never changes
//! while the allocation lives: running containers have it mounted and mapped, so a later
//! [`create`] for the same allocation updates the words in place. Identity (allocation, UUIDs) is
//! immutable once published, which is why it may be plain bytes; everything that changes is an
//! atomic word. The tenant needs no ordering among limits: each word stands for itself. Only the
//! magic orders: `Release` by the maker of the page, `Acquire` in [`QuotaReader::attach`].

#[cfg(feature = "std")]
mod writer;

#[cfg(feature = "std")]
pub use writer::{GpuQuota, QuotaSpec, QuotaWriter, abi_in, create, create_from};

use alloc::string::String;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::attach::{self, AttachError};
use crate::layout::{
    DEPARTING_NONE, DEPARTING_SOME, DEPARTURE_NS, HEARTBEAT_STALE_NS, MAX_BYTES, MAX_GPUS,
    POLICY_BURST, POLICY_NONE, POLICY_STRICT, QUOTA_BYTES, QUOTA_FILE, QUOTA_MAGIC, QuotaGpu,
    QuotaPage, UUID_LEN,
};
use crate::os::Map;

/// How a compute share is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Work-conserving: a share is a guarantee, idle time is anybody's.
    Burst,
    /// A share is also a cap.
    Strict,
    /// Compute is not limited.
    None,
}

impl Policy {
    fn to_word(self) -> u32 {
        match self {
            Self::Burst => POLICY_BURST,
            Self::Strict => POLICY_STRICT,
            Self::None => POLICY_NONE,
        }
    }

    fn from_word(word: u32) -> Option<Self> {
        [Self::Burst, Self::Strict, Self::None].into_iter().find(|policy| policy.to_word() == word)
    }
}

/// Printable, without NUL, and leaving room for one.
fn is_name(name: &str, field: usize) -> bool {
    !name.is_empty() && name.len() < field && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The name in a NUL-padded field; `None` if it is not one.
fn name_in(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|&byte| byte == 0)?;
    let (name, padding) = field.split_at(end);
    let name = core::str::from_utf8(name).ok()?;
    (is_name(name, field.len()) && padding.iter().all(|&byte| byte == 0)).then_some(name)
}

/// A read-only mapping of the quota page. It stays for the life of the process, so that pointers
/// into it (the gate words) may be kept.
///
/// Indices are below [`gpu_count`](Self::gpu_count); others panic.
#[derive(Debug)]
pub struct QuotaReader {
    page: &'static QuotaPage,
    gpus: usize,
    /// Copies: what was checked is what is read later.
    uuids: [[u8; UUID_LEN]; MAX_GPUS],
}

impl QuotaReader {
    /// Maps the quota page in `dir` and checks it.
    pub fn attach_in(dir: &CStr) -> Result<Self, AttachError> {
        attach::page(dir, QUOTA_FILE, Self::attach_at)
    }

    /// As [`attach_in`](Self::attach_in).
    #[cfg(feature = "std")]
    pub fn attach(dir: &std::path::Path) -> Result<Self, AttachError> {
        Self::attach_in(&attach::c_dir(dir)?)
    }

    fn attach_at(path: &CStr) -> Result<Self, String> {
        let (fd, _) = attach::open(path, libc::O_RDONLY, QUOTA_BYTES)?;
        // SAFETY: what the plugin changes after publishing are atomics; `QuotaPage` is integers
        // only, and page-aligned at most.
        let map =
            unsafe { Map::<QuotaPage>::new(fd.as_raw_fd(), false) }.map_err(attach::why_not)?;
        // Acquire: pairs with the publication of the magic, so that the rest is seen whole.
        let magic = map.magic.load(Ordering::Acquire);
        attach::check(magic, QUOTA_MAGIC, map.abi.load(Ordering::Relaxed))?;
        let count = map.gpu_count.load(Ordering::Relaxed);
        let gpus = match usize::try_from(count) {
            Ok(gpus) if (1..=MAX_GPUS).contains(&gpus) => gpus,
            _ => return Err(text!("impossible count {count}")),
        };
        let mut uuids = [[0; UUID_LEN]; MAX_GPUS];
        for (index, gpu) in map.gpus[..gpus].iter().enumerate() {
            if name_in(&gpu.uuid).is_none() || uuids[..index].contains(&gpu.uuid) {
                return Err(text!("impossible UUID of GPU {index}"));
            }
            uuids[index] = gpu.uuid;
        }
        Ok(Self { page: map.leak(), gpus, uuids })
    }

    fn gpu(&self, gpu: usize) -> &'static QuotaGpu {
        &self.page.gpus[..self.gpus][gpu]
    }

    /// GPUs in the page.
    pub fn gpu_count(&self) -> usize {
        self.gpus
    }

    /// The GPU's UUID as NVML prints it.
    pub fn uuid(&self, gpu: usize) -> &str {
        name_in(&self.uuids[..self.gpus][gpu]).unwrap_or_default()
    }

    /// Bytes that all processes of the tenant may hold on this GPU, now.
    pub fn memory_limit(&self, gpu: usize) -> u64 {
        // Relaxed: a limit stands for itself. Capped so that sums of charges cannot wrap.
        self.gpu(gpu).memory_limit_bytes.load(Ordering::Relaxed).min(MAX_BYTES)
    }

    /// Bytes that the tenant's processes hold beyond everything charged, as the plugin saw them
    /// through NVML; 0 before the first look, and where the charges cover it all.
    #[inline]
    pub fn observed_overhead(&self, gpu: usize) -> u64 {
        // Relaxed: it stands for itself, as a limit does.
        self.gpu(gpu).observed_overhead_bytes.load(Ordering::Relaxed).min(MAX_BYTES)
    }

    /// Whether the driver has memory of dead processes on this GPU, whosever they were, as the plugin says at
    /// `now_ns` (`CLOCK_MONOTONIC`); `None` where none says it.
    pub fn departing(&self, gpu: usize, now_ns: u64) -> Option<bool> {
        if now_ns.saturating_sub(self.heartbeat_ns()) > HEARTBEAT_STALE_NS {
            return None;
        }
        match self.gpu(gpu).departing.load(Ordering::Relaxed) {
            DEPARTING_NONE => Some(false),
            DEPARTING_SOME => Some(true),
            _ => None,
        }
    }

    /// Bytes that charges may reach on this GPU, now: the limit less the observed overhead. By this
    /// requests are decided, and what is free is shown. Goes down when overhead is seen; what is
    /// charged may then exceed it.
    #[inline]
    pub fn effective_limit(&self, gpu: usize) -> u64 {
        self.memory_limit(gpu).saturating_sub(self.observed_overhead(gpu))
    }

    /// Bytes to charge for a context: the GPU model's constant. What contexts really take beyond it
    /// is in [`Self::observed_overhead`].
    pub fn context_overhead(&self, gpu: usize) -> u64 {
        self.gpu(gpu).context_overhead_bytes.load(Ordering::Relaxed).min(MAX_BYTES)
    }

    /// Share of GPU time in thousandths of a GPU.
    pub fn cores_millis(&self, gpu: usize) -> u32 {
        self.gpu(gpu).cores_millis.load(Ordering::Relaxed)
    }

    /// How the share is held; an unknown word counts as [`Policy::Burst`], the default.
    pub fn policy(&self, gpu: usize) -> Policy {
        Policy::from_word(self.gpu(gpu).policy.load(Ordering::Relaxed)).unwrap_or(Policy::Burst)
    }

    /// The gate's word now, for who only looks.
    pub fn gate(&self, gpu: usize) -> u32 {
        self.gpu(gpu).gate.load(Ordering::Acquire)
    }

    /// The gate, `GATE_*`, a futex word (`FUTEX_WAIT` without `FUTEX_PRIVATE_FLAG`). Valid for the
    /// life of the process.
    pub fn gate_word(&self, gpu: usize) -> *const AtomicU32 {
        &raw const self.gpu(gpu).gate
    }

    /// Operations that may be in flight while the gate is OPEN, at least 1.
    pub fn window(&self, gpu: usize) -> u32 {
        self.gpu(gpu).window.load(Ordering::Relaxed).max(1)
    }

    /// Microseconds of predicted work that may be in flight while the gate is OPEN.
    pub fn window_us(&self, gpu: usize) -> u32 {
        self.gpu(gpu).window_us.load(Ordering::Relaxed)
    }

    /// Nanoseconds that this tenant may be idle while YIELD before it says so, at most 10 ms.
    pub fn idle_ns(&self, gpu: usize) -> u64 {
        match self.gpu(gpu).idle_us.load(Ordering::Relaxed) {
            0 => 100_000,
            us => u64::from(us.min(10_000)) * 1_000,
        }
    }

    /// The beginning of this tenant's part of the cycle without an arbiter, in thousandths of
    /// [`CYCLE_NS`](crate::layout::CYCLE_NS); below 1000.
    pub fn phase_millis(&self, gpu: usize) -> u32 {
        self.gpu(gpu).phase_millis.load(Ordering::Relaxed) % 1000
    }

    /// The arbiter's last progress, `CLOCK_MONOTONIC` nanoseconds; 0 where there never was one, and
    /// [`ARBITER_GONE`](crate::layout::ARBITER_GONE).
    pub fn arbiter_ns(&self) -> u64 {
        self.page.arbiter_ns.load(Ordering::Acquire)
    }

    /// How long a dead process's bytes stay charged where nobody sees that the driver has given them
    /// back, nanoseconds.
    pub fn departure_ns(&self) -> u64 {
        match self.page.departure_us.load(Ordering::Relaxed) {
            0 => DEPARTURE_NS,
            us => u64::from(us).saturating_mul(1_000),
        }
    }

    /// Whether the arbiter takes the descriptor of a [flight page](crate::flight) with a hello.
    pub fn takes_flight(&self) -> bool {
        self.page.takes_flight.load(Ordering::Relaxed) == 1
    }

    /// The plugin's last sign of life, `CLOCK_MONOTONIC` nanoseconds; 0 where no plugin serves.
    pub fn heartbeat_ns(&self) -> u64 {
        self.page.heartbeat_ns.load(Ordering::Relaxed)
    }

    /// The generation of the allocation.
    pub fn generation(&self) -> u64 {
        self.page.generation.load(Ordering::Relaxed)
    }

    /// The allocation's id, if it is printable.
    pub fn allocation(&self) -> Option<&str> {
        name_in(&self.page.allocation)
    }
}

#[cfg(test)]
mod tests;
