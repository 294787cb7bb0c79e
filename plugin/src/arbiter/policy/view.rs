//! What the policy shows of itself, for status and demo.

use super::types::{GpuIndex, Share, State, TenantId};

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuView {
    /// Which.
    pub gpu: GpuIndex,
    /// Who holds the lease or still drains it; late ones are not counted.
    pub holder: Option<TenantId>,
    /// Who drains too late and keeps the GPU beside the holder.
    pub late: Vec<TenantId>,
    /// How many wait for the lease.
    pub waiting: usize,
    /// Length of a lease now, nanoseconds.
    pub quantum: u64,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Who.
    pub tenant: TenantId,
    /// Its GPUs.
    pub gpus: Vec<GpuIndex>,
    /// What it may have.
    pub share: Share,
    /// What its gates say.
    pub state: State,
    /// Since when it waits for a lease, in the caller's nanoseconds.
    pub waiting_since: Option<u64>,
    /// GPU time charged, nanoseconds (of one GPU, where there are several), a running lease included.
    pub leased_ns: u64,
    /// Time spent wanting and not holding, nanoseconds.
    pub waited_ns: u64,
    /// Leases granted.
    pub leases: u64,
    /// Drains that passed the deadline.
    pub overlaps: u64,
    /// The longest drain lately, nanoseconds.
    pub longest_drain_ns: u64,
}
