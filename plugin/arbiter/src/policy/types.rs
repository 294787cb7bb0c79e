//! What goes into the policy and what comes out.
use strum::IntoStaticStr;

/// Most GPUs (MIG instances count) on one node.
pub const MAX_GPUS: usize = 128;

/// Identifies a tenant; the caller chooses the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// A GPU's (or MIG instance's) index on the node, below [`MAX_GPUS`].
pub type GpuIndex = u8;

/// What a share means. Tenants of the policy `none` are not arbitrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum ShareKind {
    /// A weight: any tenant may use idle time.
    Burst,
    /// A weight and a cap.
    Strict,
}

/// A tenant's share of each of its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Thousandths of a GPU; 0 counts as 1.
    pub millis: u32,
    /// What it means.
    pub kind: ShareKind,
}

/// The state of a tenant's gate; see `docs/internals/compute.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum GateState {
    /// The tenant is alone and not capped: launches pass, and what is in flight is not bounded.
    Solo,
    /// The tenant holds the lease.
    Open,
    /// The tenant holds the lease, and others wait or its share is a cap.
    Yield,
    /// The tenant holds no lease, or must give it back.
    Closed,
}

/// What a tenant reports of a lease when it has drained. It counts within bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// How long some of its work was in flight, nanoseconds.
    pub ns: u64,
    /// How many of its processes had work at the same time.
    pub processes: u32,
}

/// What a tenant has had since it joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantTotals {
    /// GPU time charged, nanoseconds (of one GPU, where there are several).
    pub leased_ns: u64,
    /// Of that, how long its work ran, as far as that is known, nanoseconds.
    pub used_ns: u64,
    /// The leased time of which `used_ns` is known, nanoseconds.
    pub measured_ns: u64,
    /// The leased time in which nobody else wanted the GPU, so that the tenant does not say when it idles, as far as
    /// nobody has measured it yet, nanoseconds.
    pub alone_ns: u64,
    /// Time without a lease that it wanted, nanoseconds.
    pub waited_ns: u64,
    /// Waits of [`super::LONG_WAIT_NS`] and more that have ended.
    pub long_waits: u64,
    /// The longest wait that has ended, nanoseconds.
    pub longest_wait_ns: u64,
    /// Leases granted.
    pub leases: u64,
    /// Leases whose drain passed the deadline while another tenant got the GPU.
    pub overlaps: u64,
}

/// How a tenant is to use its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pace {
    /// How long it may be idle before it reports so, nanoseconds.
    pub idle_ns: u64,
    /// A tenant may come that must not wait for a whole window.
    pub is_narrow: bool,
}

/// A command: write this state, in a new epoch, to all gates of the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The tenant.
    pub tenant: TenantId,
    /// The state.
    pub state: GateState,
    /// To be written before the state, unless that is CLOSED.
    pub pace: Pace,
}

/// What the caller should look for in a tenant's words now; see [`super::Policy::watches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// A thread of it polls at its closed gate: [`super::Policy::awake`]; or none does any more:
    /// [`super::Policy::asleep`].
    Awake,
    /// It holds a lease that another waits for, and has nothing in flight: [`super::Policy::quiet`].
    Quiet,
    /// The same of one that then is expected to pause for long, while somebody awake waits.
    Pauses,
    /// It was closed, and has nothing in flight any more: [`super::Policy::drained`].
    Drained,
}

/// Nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;

/// Constants that are configured, or that tests vary, nanoseconds. `docs/internals/compute.md` gives the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a lease lasts while others wait, where nothing calls for another length.
    pub quantum: u64,
    /// Shortest quantum, with many waiters.
    pub quantum_least: u64,
    /// Longest quantum, where drains are long.
    pub quantum_most: u64,
    /// A quantum lasts at least so many mean drains, so that they do not consume it. With more, a tenant whose
    /// processes have much in flight holds the GPU for longer, and others' steps take longer.
    pub drains: u64,
    /// And so many mean hand-overs: on a host that wakes threads late, they would consume it, too.
    pub handovers: u64,
    /// Most GPU time that is owed to a tenant when it begins to want.
    pub credit: u64,
    /// Shortest time to drain before the next tenant is let in beside the late one.
    pub drain_least: u64,
    /// Longest such time.
    pub drain_most: u64,
    /// Strict shares: a sixteenth of the charge may return to the cap because the tenant reports that it had
    /// nothing in flight; this much of it is saved at most.
    pub slack: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            quantum: 5 * MS,
            quantum_least: 2 * MS,
            quantum_most: 20 * MS,
            drains: 2,
            handovers: 50,
            credit: 20 * MS,
            drain_least: 20 * MS,
            drain_most: 200 * MS,
            slack: 5 * MS,
        }
    }
}
