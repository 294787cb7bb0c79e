//! What the arbiter shows of itself, for `status` and the demo.

use super::lane::Misdeeds;
use super::latency::Turns;
use super::policy::{Kind, Share, State};

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuShare {
    /// Which.
    pub uuid: String,
    /// The allocation that holds its lease, or still drains it.
    pub holder: Option<String>,
    /// Allocations that drain too late and keep it beside the holder.
    pub late: Vec<String>,
    /// How many wait for it.
    pub waiting: usize,
    /// How long a lease lasts now, nanoseconds.
    pub quantum_ns: u64,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantShare {
    /// The allocation.
    pub id: String,
    /// Its GPUs.
    pub uuids: Vec<String>,
    /// What it asked for.
    pub share: Share,
    /// What its gate says.
    pub state: State,
    /// Processes that say when they have drained.
    pub processes: usize,
    /// Those of them that have not.
    pub owing: usize,
    /// For how long it has been waiting for a lease, nanoseconds.
    pub waiting_ns: Option<u64>,
    /// Thousandths of a GPU that it got in the last second.
    pub got_1s_millis: u32,
    /// And in the last ten.
    pub got_10s_millis: u32,
    /// GPU time charged since the arbiter took it on, nanoseconds.
    pub leased_ns: u64,
    /// Time that it waited for leases, nanoseconds.
    pub waited_ns: u64,
    /// Waits of a second and more that have ended.
    pub long_waits: u64,
    /// The longest that has ended, nanoseconds.
    pub longest_wait_ns: u64,
    /// Leases.
    pub leases: u64,
    /// Drains that passed the deadline.
    pub overlaps: u64,
    /// Messages that came for another epoch, or twice.
    pub ignored: u64,
    /// What else it did wrong.
    pub misdeeds: Misdeeds,
}

impl TenantShare {
    /// Whether its share is also a cap.
    #[must_use]
    pub fn is_strict(&self) -> bool {
        self.share.kind == Kind::Strict
    }
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// GPUs that tenants have, by UUID.
    pub gpus: Vec<GpuShare>,
    /// Tenants, by id.
    pub tenants: Vec<TenantShare>,
    /// Gate words written.
    pub commands: u64,
    /// From hearing a message to the gate words that follow from it, nanoseconds: the median.
    pub turn_p50_ns: u64,
    /// And what one in a hundred exceeds.
    pub turn_p99_ns: u64,
    /// And all of them.
    pub turns: Turns,
}
