//! What the recorder saw at one moment.

/// Everything at one moment. Counters are as their sources have them; they may restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// By the wall clock, Unix milliseconds: which bucket it falls into.
    pub at_unix_ms: i64,
    /// By a clock that is never set, milliseconds: how long ago the look before was.
    pub monotonic_ms: u64,
    pub gpus: Vec<GpuLook>,
    pub tenants: Vec<TenantLook>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuLook {
    pub uuid: String,
    /// Memory in use as the driver says, bytes.
    pub memory_used_bytes: u64,
    /// Sum of the tenants' limits, bytes.
    pub memory_limits_bytes: u64,
    /// Its health lets it be sold.
    pub healthy: bool,
    pub cordoned: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantLook {
    pub id: String,
    /// Which Allocate of this id.
    pub generation: u64,
    /// The pod's namespace; empty while unknown.
    pub namespace: String,
    pub pod: String,
    pub container: String,
    /// Its usage page could be read. Without, memory and what its processes count are unknown.
    pub read: bool,
    /// Each of its GPUs.
    pub uses: Vec<UseLook>,
    /// The arbiter did not say how much GPU time it had: the four figures below are none.
    pub unheard: bool,
    /// GPU time since the arbiter took it on, microseconds; each of its GPUs had as much.
    pub leased_us: u64,
    /// Time that it waited, microseconds.
    pub waited_us: u64,
    /// Of the leased time, how long its work ran, as far as that is known, microseconds.
    pub used_us: u64,
    /// The leased time of which that is known, microseconds.
    pub measured_us: u64,
    /// Times that a process rationed itself.
    pub rations: u64,
    /// Refused requests for memory.
    pub refusals: u64,
    pub launches: u64,
}

/// A tenant on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UseLook {
    pub gpu_uuid: String,
    /// Charged, with observed overhead, bytes.
    pub memory_used_bytes: u64,
    /// The most that any of its processes has had since it began, bytes.
    pub process_peak_bytes: u64,
    /// The limit, bytes.
    pub memory_limit_bytes: u64,
    /// Observed overhead, bytes.
    pub memory_overhead_bytes: u64,
    /// The share, thousandths.
    pub cores_millis: u32,
}
