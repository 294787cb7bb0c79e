//! The bytes of both pages. All integers are little-endian, naturally aligned, and accessed as
//! atomics or with `pread`/`pwrite`; every offset below is part of the ABI.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// ABI version of both pages and of the session messages, as built; see [`crate::abi`].
pub const ABI_VERSION: u32 = 1;
/// `"TSRQUOTA"`, little-endian.
pub const QUOTA_MAGIC: u64 = u64::from_le_bytes(*b"TSRQUOTA");
/// `"TSRUSAGE"`, little-endian.
pub const USAGE_MAGIC: u64 = u64::from_le_bytes(*b"TSRUSAGE");

/// Largest memory limit or request in bytes, 256 TiB. Sums over any number of processes and threads
/// that a machine can run stay far below 2^64.
pub const MAX_BYTES: u64 = 1 << 48;
/// Most GPUs one allocation can hold.
pub const MAX_GPUS: usize = 16;
/// Most processes of one container that use CUDA at the same time.
pub const SLOTS: usize = 128;
/// Bytes of a GPU's UUID field: `GPU-…` or `MIG-…`, NUL-padded.
pub const UUID_LEN: usize = 64;
/// Bytes of the allocation id field, NUL-padded.
pub const ALLOCATION_LEN: usize = 64;

/// File names inside the pages directory.
pub const QUOTA_FILE: &str = "quota";
/// See [`QUOTA_FILE`].
pub const USAGE_FILE: &str = "usage";
/// See [`QUOTA_FILE`].
pub const SESSION_SOCKET: &str = "session.sock";
/// See [`QUOTA_FILE`]; where the arbiter hears who wants the GPU and who has drained it.
pub const GATE_SOCKET: &str = "gate.sock";

/// Where the pages directory is mounted in a container. If it exists, only it counts.
pub const CONTAINER_PAGES_DIR: &str = "/usr/local/tessera/pages";
/// Where the shim is mounted in a container.
pub const CONTAINER_SHIM: &str = "/usr/local/tessera/libtessera.so";
/// Outside containers, the pages directory of a `tessera run` command tree.
pub const PAGES_DIR_ENV: &str = "TESSERA_DIR";

/// Gate state: alone and not strictly limited; launches pass.
pub const GATE_SOLO: u32 = 1;
/// Gate state: holds the lease; what is in flight is bounded by the window.
pub const GATE_OPEN: u32 = 2;
/// Gate state: wait on the futex.
pub const GATE_CLOSED: u32 = 3;
/// Gate state: as [`GATE_OPEN`], and somebody waits (or the share is a cap): say so when idle.
pub const GATE_YIELD: u32 = 4;
/// Bits of the gate word that are the state; those above are the epoch, which changes with every
/// change of the state, so that a word seen twice is the same lease or the same closing.
pub const GATE_STATE_BITS: u32 = 3;

/// The state (`GATE_*`) in a gate word.
#[inline(always)]
pub const fn gate_state(word: u32) -> u32 {
    word & ((1 << GATE_STATE_BITS) - 1)
}
/// The epoch in a gate word.
#[inline(always)]
pub const fn gate_epoch(word: u32) -> u32 {
    word >> GATE_STATE_BITS
}
/// The gate word of a state in an epoch, which wraps.
pub const fn gate_word(epoch: u32, state: u32) -> u32 {
    epoch << GATE_STATE_BITS | state
}

/// [`QuotaPage::arbiter_ns`] of an arbiter that has ended and may come back.
pub const ARBITER_GONE: u64 = 1;
/// Nanoseconds without a sign of the arbiter after which a tenant rations itself.
pub const ARBITER_STALE_NS: u64 = 1_000_000_000;
/// Without an arbiter a tenant may use the GPU while `CLOCK_MONOTONIC` modulo this, in nanoseconds,
/// lies in its part of the cycle: from [`QuotaGpu::phase_millis`] thousandths on, for as many as its
/// share.
pub const CYCLE_NS: u64 = 50_000_000;

/// Compute policy: work-conserving.
pub const POLICY_BURST: u32 = 0;
/// Compute policy: hard cap.
pub const POLICY_STRICT: u32 = 1;
/// Compute policy: compute is not limited.
pub const POLICY_NONE: u32 = 2;

/// [`QuotaGpu::departing`]: the driver has none.
pub const DEPARTING_NONE: u32 = 1;
/// [`QuotaGpu::departing`]: it has some.
pub const DEPARTING_SOME: u32 = 2;
/// After so many nanoseconds without a heartbeat the plugin's word of what departs is an old one.
pub const HEARTBEAT_STALE_NS: u64 = 5_000_000_000;

/// A structure of the pages: its bytes, and before each field the offset that it must have.
macro_rules! laid_out {
    ($(#[$about:meta])* pub struct $name:ident: $bytes:tt {
        $($(#[$doc:meta])* $offset:literal => $visible:vis $field:ident: $type:ty,)*
    }) => {
        $(#[$about])*
        #[derive(Debug)]
        pub struct $name {
            $($(#[$doc])* $visible $field: $type,)*
        }
        const _: () = {
            assert!(size_of::<$name>() == $bytes);
            $(assert!(offset_of!($name, $field) == $offset);)*
        };
    };
}

laid_out! {
    /// One GPU's limits, 192 bytes.
    #[repr(C, align(64))]
    pub struct QuotaGpu: 192 {
        /// The GPU's or MIG instance's UUID as NVML prints it, NUL-padded.
        0 => pub uuid: [u8; UUID_LEN],
        /// Bytes that all processes of the tenant may hold on this GPU.
        64 => pub memory_limit_bytes: AtomicU64,
        /// Bytes charged for each context (model constant).
        72 => pub context_overhead_bytes: AtomicU64,
        /// Bytes that NVML shows for the tenant's processes beyond everything charged (model constants
        /// included), as the plugin observed; 0 before the first look. Charges may reach the limit less
        /// these.
        80 => pub observed_overhead_bytes: AtomicU64,
        /// Share of GPU time in thousandths of a GPU.
        88 => pub cores_millis: AtomicU32,
        /// `POLICY_*`.
        92 => pub policy: AtomicU32,
        /// `GATE_*` and an epoch, see [`gate_word`]; a futex word.
        96 => pub gate: AtomicU32,
        /// The beginning of this tenant's part of the cycle when there is no arbiter, in thousandths of
        /// [`CYCLE_NS`].
        100 => pub phase_millis: AtomicU32,
        /// Operations that may be in flight while OPEN; 0 counts as 1.
        104 => pub window: AtomicU32,
        /// Microseconds of predicted work that may be in flight while OPEN; two operations always may.
        108 => pub window_us: AtomicU32,
        /// Microseconds that a tenant may be idle while YIELD before it says so; 0 counts as 100.
        112 => pub idle_us: AtomicU32,
        /// `DEPARTING_*`: whether the driver has memory of dead processes on this GPU, whosever they were.
        116 => pub departing: AtomicU32,
        120 => reserved: [u8; 64],
    }
}

laid_out! {
    /// The quota page, 4096 bytes.
    #[repr(C, align(4096))]
    pub struct QuotaPage: QUOTA_BYTES {
        /// [`QUOTA_MAGIC`], published last.
        0 => pub magic: AtomicU64,
        /// [`ABI_VERSION`].
        8 => pub abi: AtomicU32,
        /// Entries of `gpus` in use.
        12 => pub gpu_count: AtomicU32,
        /// Grows with every Allocate of this id.
        16 => pub generation: AtomicU64,
        /// The plugin's last sign of life, `CLOCK_MONOTONIC` nanoseconds; 0 where no plugin serves.
        24 => pub heartbeat_ns: AtomicU64,
        /// Hash of resource and sorted replica ids, hex, NUL-padded.
        32 => pub allocation: [u8; ALLOCATION_LEN],
        /// The arbiter's last progress, `CLOCK_MONOTONIC` nanoseconds. 0: there was none, and gates stay
        /// SOLO; [`ARBITER_GONE`]: it has ended.
        96 => pub arbiter_ns: AtomicU64,
        /// Microseconds that a dead process's bytes stay charged where nobody sees that the driver has
        /// given them back; 0 counts as [`DEPARTURE_NS`].
        104 => pub departure_us: AtomicU32,
        /// 1: the arbiter takes the descriptor of a [flight page](crate::flight) with a hello.
        108 => pub takes_flight: AtomicU32,
        112 => reserved: [u8; 144],
        /// Limits per GPU; a tenant's ordinal in both pages is the index here.
        256 => pub gpus: [QuotaGpu; MAX_GPUS],
        3328 => tail: [u8; 768],
    }
}

/// Bytes of the quota file.
pub const QUOTA_BYTES: usize = 4096;

/// What device memory was obtained by; indexes [`Slot::kinds`]. Statistics only.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`.
    Plain = 0,
    /// `cuMemAllocPitch`.
    Pitched = 1,
    /// `cuMemAllocManaged`.
    Managed = 2,
    /// Stream-ordered allocations and pools.
    Async = 3,
    /// `cuMemCreate`.
    Vmm = 4,
    /// Arrays and mipmaps.
    Array = 5,
    /// Graph memory nodes.
    Graph = 6,
    /// Contexts and other memory that no hook sees.
    Overhead = 7,
}
/// The entry of [`Slot::kinds`] for what its owner has of other processes' memory by 64-byte handles. It is granted to
/// its maker, and the driver may show it for both.
pub const IMPORTED: usize = 8;
/// Entries of [`Slot::kinds`].
pub const KINDS: usize = 12;
/// Entries of [`Slot::imports`].
pub const IMPORTS: usize = 40;
/// Shards of the launch counter, so that threads seldom share a cache line's atomic.
pub const LAUNCH_SHARDS: usize = 8;

laid_out! {
    /// One process's entry, 1024 bytes. Only the holder of the slot's lock byte writes it, except that
    /// the process that takes a dead owner's lock zeroes it.
    #[repr(C, align(64))]
    pub struct Slot: 1024 {
        /// Per GPU: granted plus reserved bytes. This word decides.
        0 => pub charged: [AtomicU64; MAX_GPUS],
        /// Per GPU: bytes whose driver call has succeeded. A refusal is decided by these.
        128 => pub granted: [AtomicU64; MAX_GPUS],
        /// Per GPU: highest `granted` of this process.
        256 => pub peak: [AtomicU64; MAX_GPUS],
        /// Granted bytes by [`Kind`], over all GPUs.
        384 => pub kinds: [AtomicU64; KINDS],
        /// Requests refused because of the quota.
        480 => pub refusals: AtomicU64,
        /// Allocations granted.
        488 => pub allocations: AtomicU64,
        /// Allocations released.
        496 => pub frees: AtomicU64,
        /// Requests within the quota that the driver refused.
        504 => pub driver_refusals: AtomicU64,
        /// Kernel and graph launches, sharded by thread.
        512 => pub launches: [AtomicU64; LAUNCH_SHARDS],
        /// Nanoseconds waited at the gate.
        576 => pub gate_wait_ns: AtomicU64,
        /// Nanoseconds of GPU time used.
        584 => pub gpu_time_ns: AtomicU64,
        /// Bytes asked for by the last refused request.
        592 => pub last_refused_bytes: AtomicU64,
        /// When, `CLOCK_MONOTONIC` nanoseconds.
        600 => pub last_refused_ns: AtomicU64,
        /// When the slot was claimed, `CLOCK_MONOTONIC` nanoseconds.
        608 => pub claimed_ns: AtomicU64,
        /// The owner's pid in its own pid namespace: a hint for people, never trusted.
        616 => pub pid: AtomicU32,
        /// Imports that found no room in `imports`.
        620 => pub more_imports: AtomicU32,
        /// Marks of memory of other processes that the owner has imported; 0 is none. What a mark says
        /// is the tenants' affair: see [`crate::account::Account::mark_import`].
        624 => pub imports: [AtomicU64; IMPORTS],
        /// Launches that had to wait at the gate.
        944 => pub gate_waits: AtomicU64,
        /// Times that the process rationed itself because the arbiter was silent.
        952 => pub gate_timeouts: AtomicU64,
        /// Times that the window was full while the gate was open.
        960 => pub window_waits: AtomicU64,
        968 => pub(crate) reserved: [AtomicU8; 16],
    }
}

laid_out! {
    /// The usage page's header, 4096 bytes.
    #[repr(C, align(4096))]
    pub struct UsageHeader: 4096 {
        /// [`USAGE_MAGIC`], published last.
        0 => pub magic: AtomicU64,
        /// [`ABI_VERSION`].
        8 => pub abi: AtomicU32,
        /// [`SLOTS`].
        12 => pub slot_count: AtomicU32,
        /// The quota page's generation when the file was made.
        16 => pub generation: AtomicU64,
        24 => line: [AtomicU8; 40],
        /// One more than the highest slot ever claimed: how far sums must look.
        64 => pub high_water: AtomicU32,
        68 => pad: [AtomicU8; 4],
        /// When a dead owner's bytes were last taken back, `CLOCK_MONOTONIC` nanoseconds; 0 is never.
        /// The driver tears a killed process down later than that: its refusals may pass.
        72 => pub recovered_ns: AtomicU64,
        80 => gap: [AtomicU8; 48],
        /// What those had counted whose slots a process of the tenant took over.
        128 => pub past: Past,
        320 => gap2: [AtomicU8; 1728],
        /// Per slot: when its dead owner's bytes were last known to be with the driver still,
        /// `CLOCK_MONOTONIC` nanoseconds. Says nothing where it is before [`Slot::claimed_ns`]: it was an
        /// earlier owner's. See [`is_departing`].
        2048 => pub departing_ns: [AtomicU64; SLOTS],
        3072 => tail: [AtomicU8; 1024],
    }
}

/// How long a dead process's bytes stay charged where nobody sees that the driver has given them
/// back: a bound on what a driver takes to take a process down.
pub const DEPARTURE_NS: u64 = 2_000_000_000;

/// Whether a slot with these words holds what a dead process has left with the driver.
#[inline]
pub const fn is_departing(claimed_ns: u64, departing_ns: u64) -> bool {
    claimed_ns != 0 && departing_ns >= claimed_ns
}

laid_out! {
    /// What dead owners' slots said before a process of the tenant zeroed them; 192 bytes. The holder of such
    /// a slot's lock adds to these words, so they are added to atomically, and never written otherwise while
    /// the generation lasts.
    #[repr(C, align(64))]
    #[allow(missing_docs, reason = "named as the slots' words, which `Slot` explains")]
    pub struct Past: 192 {
        /// Per GPU: the highest of [`Slot::peak`].
        0 => pub peak: [AtomicU64; MAX_GPUS],
        // Sums of the slots' words of the same names, of launches those of all shards.
        128 => pub refusals: AtomicU64,
        136 => pub driver_refusals: AtomicU64,
        144 => pub launches: AtomicU64,
        152 => pub gate_wait_ns: AtomicU64,
        160 => pub gpu_time_ns: AtomicU64,
        168 => pub gate_waits: AtomicU64,
        176 => pub gate_timeouts: AtomicU64,
        184 => pub window_waits: AtomicU64,
    }
}

/// Bytes of the usage file.
pub const USAGE_BYTES: usize = 4096 + SLOTS * size_of::<Slot>();

/// The byte whose open-file-description lock owns slot `index`.
pub const fn slot_lock_offset(index: usize) -> u64 {
    (4096 + index * size_of::<Slot>()) as u64
}
/// The byte on which requests that collided queue, for GPU `gpu`.
pub const fn queue_lock_offset(gpu: usize) -> u64 {
    (1024 + gpu) as u64
}

/// The whole usage file.
#[repr(C)]
#[derive(Debug)]
pub struct UsagePage {
    /// Identification.
    pub header: UsageHeader,
    /// One per process.
    pub slots: [Slot; SLOTS],
}

const _: () = assert!(size_of::<UsagePage>() == USAGE_BYTES);
