//! What the policy is told and what it answers.

/// Most GPUs (MIG instances count) on one node.
pub const MAX_GPUS: usize = 128;

/// Names a tenant; the caller chooses the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u64);

/// A GPU's (or MIG instance's) index on the node, below [`MAX_GPUS`].
pub type GpuIndex = u8;

/// How a share is meant. Tenants of the policy `none` are not the arbiter's affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A weight: what others leave idle is anybody's.
    Burst,
    /// A weight and a cap.
    Strict,
}

/// A tenant's share of each of its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Thousandths of a GPU; 0 counts as 1.
    pub millis: u32,
    /// How it is meant.
    pub kind: Kind,
}

/// What a tenant's gate is to say, see `docs/compute.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Alone and not capped: launches pass, and what is in flight is not bounded.
    Solo,
    /// Holds the lease.
    Open,
    /// Holds the lease, and others wait or the share is a cap.
    Yield,
    /// Holds no lease, or must give it back.
    Closed,
}

/// What a tenant says of a lease when it has drained. It is believed within bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// How long something of it was in flight, nanoseconds.
    pub ns: u64,
    /// How many of its processes had work at the same time.
    pub processes: u32,
}

/// How a tenant is to use its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pace {
    /// So long it may be idle before it says so, nanoseconds.
    pub idle_ns: u64,
    /// Somebody may come who must not wait for a whole window.
    pub is_narrow: bool,
}

/// Write this state, in a new epoch, to all gates of the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Whose gates.
    pub tenant: TenantId,
    /// What they are to say.
    pub state: State,
    /// To be written before the state, where that is not CLOSED.
    pub pace: Pace,
}

/// Nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;

/// The policy's constants, nanoseconds. `docs/compute.md` gives the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a lease lasts while others wait, where nothing speaks for another length.
    pub quantum: u64,
    /// Shortest quantum, with many waiters.
    pub quantum_least: u64,
    /// Longest quantum, where drains are long.
    pub quantum_most: u64,
    /// A lease is not taken away sooner, even by who is owed time.
    pub min_hold: u64,
    /// Most GPU time that is owed to a tenant when it begins to want.
    pub credit: u64,
    /// Least time to drain before the next is let in beside the late one.
    pub drain_least: u64,
    /// Most.
    pub drain_most: u64,
    /// SOLO when nobody else has wanted or held the GPU for so long.
    pub solo_after: u64,
    /// Strict shares: what may be saved up, in time at the rate of the share.
    pub burst: u64,
    /// Strict shares: what the GPU takes to change over to another tenant, which is not charged to
    /// the cap.
    pub switch: u64,
    /// How long the GPU serves one process while another of the tenant has work, too.
    pub slice: u64,
    /// Strict shares: a sixteenth of the time charged may be given back to the cap because the tenant
    /// says that it had nothing in flight; so much of it is saved up at most.
    pub slack: u64,
    /// A tenant that pauses is idle after so long.
    pub idle: u64,
    /// The same for one that comes back soon as a rule, at most: the lease is kept for it.
    pub idle_most: u64,
    /// And for one that never does.
    pub idle_least: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            quantum: 5 * MS,
            quantum_least: 2 * MS,
            quantum_most: 20 * MS,
            min_hold: MS,
            credit: 20 * MS,
            drain_least: 20 * MS,
            drain_most: 200 * MS,
            solo_after: 1000 * MS,
            burst: 50 * MS,
            switch: 50_000,
            slice: 2 * MS,
            slack: 5 * MS,
            idle: 100_000,
            idle_most: 1_500_000,
            idle_least: 30_000,
        }
    }
}
