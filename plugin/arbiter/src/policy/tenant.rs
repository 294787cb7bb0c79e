//! One tenant: its share, its lease and what it has had.

use super::LONG_WAIT_NS;
use super::bucket::Bucket;
use super::pace::Rhythm;
use super::types::{GpuIndex, Kind, MS, Settings, Share, State, TenantId};

/// Index into the policy's tenants.
pub(super) type Slot = usize;

/// Where a tenant is with its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No lease, and nothing in flight.
    Out,
    /// Holds the lease.
    Held(Lease),
    /// Closed, and not yet drained.
    Draining {
        /// When it was closed.
        since: u64,
        /// When the next is let in all the same.
        deadline: u64,
    },
    /// Closed, not drained in time; others may hold the GPU beside it. If it wants, it waits for its
    /// next lease like anybody.
    Late {
        /// When it was closed.
        since: u64,
    },
}

/// See [`Phase::Held`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    /// When it was granted.
    pub(super) since: u64,
    /// When its quantum ends, which counts while others wait.
    pub(super) until: u64,
    /// When somebody who is owed time takes it away.
    pub(super) preempt: Option<u64>,
    /// What the gate says: anything but CLOSED.
    pub(super) state: State,
    /// After how long it says that it is idle.
    pub(super) idle_ns: u64,
}

/// What a tenant that is closed and has not drained says the GPU does for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// It has said nothing since the closing.
    None,
    /// It works, as far as is known until then.
    Works {
        /// The word counts no longer.
        until: u64,
    },
    /// Nothing: the host is to do something first.
    Waits,
}

/// How long after its closing a late tenant may have the next lease, nanoseconds: where it waits for the
/// host, where nothing is known, and where the GPU works for it. How often that is doubled at most.
const AGAIN_WAITS: u64 = 5 * MS;
const AGAIN: u64 = 50 * MS;
const AGAIN_WORKS: u64 = 1000 * MS;
const AGAIN_DOUBLED: u32 = 4;

/// How far back drains count: each further one weighs the old longest at 7/8.
const MEMORY: u64 = 8;

#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) id: TenantId,
    pub(super) gpus: Vec<GpuIndex>,
    pub(super) share: Share,
    pub(super) phase: Phase,
    /// A launch waits.
    pub(super) wanting: bool,
    /// Since when.
    pub(super) since: u64,
    /// Takes part in the competition: wants, neither holds nor drains in time, and has tokens.
    pub(super) contends: bool,
    /// A gang that contends comes before all who are not overdue, from then on.
    pub(super) overdue_at: u64,
    /// When it last wanted or held; for SOLO.
    pub(super) last_active: Option<u64>,
    /// Up to when a tenant without a want counts for the virtual time.
    pub(super) counts_until: u64,
    pub(super) bucket: Bucket,
    pub(super) rhythm: Rhythm,
    /// When this lease was granted, what the bucket has been charged for it, nanoseconds, and whether
    /// another tenant's work ran on its GPUs before.
    pub(super) granted_at: u64,
    pub(super) lease_ns: u64,
    pub(super) switched: bool,
    /// What could still be given back to the cap of leases that have ended, nanoseconds.
    pub(super) slack_ns: u64,
    pub(super) word: Word,
    /// The longest lately, nanoseconds.
    pub(super) longest_drain: u64,
    /// Up to when it has been charged, while it has a lease.
    pub(super) charged_at: u64,
    pub(super) leased_ns: u64,
    pub(super) waited_ns: u64,
    /// Waits of [`LONG_WAIT_NS`] and more.
    pub(super) long_waits: u64,
    pub(super) longest_wait_ns: u64,
    pub(super) leases: u64,
    pub(super) overlaps: u64,
    /// Leases that it was granted although it was late, since it has drained.
    pub(super) late_leases: u32,
    /// Closings, of late, that drained only because launches that waited were let pass; see
    /// [`Tenant::is_tied`].
    pub(super) helped: u32,
}

impl Tenant {
    pub(super) fn new(
        now: u64,
        id: TenantId,
        gpus: Vec<GpuIndex>,
        share: Share,
        set: &Settings,
    ) -> Self {
        Self {
            id,
            gpus,
            share,
            phase: Phase::Out,
            wanting: false,
            since: now,
            contends: false,
            overdue_at: u64::MAX,
            last_active: None,
            counts_until: 0,
            bucket: Bucket::new(now, share.millis, set.burst),
            rhythm: Rhythm::default(),
            granted_at: now,
            lease_ns: 0,
            switched: false,
            slack_ns: 0,
            word: Word::None,
            longest_drain: 0,
            charged_at: now,
            leased_ns: 0,
            waited_ns: 0,
            long_waits: 0,
            longest_wait_ns: 0,
            leases: 0,
            overlaps: 0,
            late_leases: 0,
            helped: 0,
        }
    }

    pub(super) fn gang(&self) -> bool {
        self.gpus.len() > 1
    }

    pub(super) fn strict(&self) -> bool {
        self.share.kind == Kind::Strict
    }

    pub(super) fn has_lease(&self) -> bool {
        self.phase != Phase::Out
    }

    /// Neither holds a lease nor drains one within its deadline, and may have the next. A late tenant may,
    /// too: what it has in flight may wait for the very launch that waits for the lease.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.phase, Phase::Out | Phase::Late { .. })
    }

    /// It has not drained in time, and not drained since.
    pub(super) fn is_late(&self) -> bool {
        self.late_leases > 0 || matches!(self.phase, Phase::Late { .. })
    }

    /// A launch waits, and the tenant may have a lease for it.
    pub(super) fn waits(&self) -> bool {
        self.wanting && self.is_free()
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        match self.phase {
            Phase::Held(lease) => Some(lease),
            _ => None,
        }
    }

    pub(super) fn state(&self) -> State {
        self.lease().map_or(State::Closed, |lease| lease.state)
    }

    /// Until when the GPU is taken to work for a tenant that is late.
    pub(super) fn works_until(&self) -> u64 {
        match (self.phase, self.word) {
            (Phase::Late { .. }, Word::Works { until }) => until,
            _ => 0,
        }
    }

    /// Wants, holds or drains.
    pub(super) fn active(&self) -> bool {
        self.wanting || self.has_lease()
    }

    /// How long it may drain: three times its longest drain lately, within limits.
    pub(super) fn patience(&self, set: &Settings) -> u64 {
        let most = set.drain_most.max(set.drain_least);
        // One that drains with help is given time for it: to be late would cost it far more.
        if self.is_tied() && self.late_leases == 0 {
            return most / 2;
        }
        self.longest_drain.saturating_mul(3).clamp(set.drain_least, most)
    }

    /// Notes that it waited for a lease, and got it.
    pub(super) fn waited(&mut self, ns: u64) {
        self.waited_ns += ns;
        self.long_waits += u64::from(ns >= LONG_WAIT_NS);
        self.longest_wait_ns = self.longest_wait_ns.max(ns);
    }

    /// How often, about, the GPU changed from one of its processes to another in the lease that it has
    /// just drained: after each slice while it could launch, and at the end once to each.
    pub(super) fn changes(&self, now: u64, processes: u32, set: &Settings) -> u64 {
        let (Phase::Draining { since, .. } | Phase::Late { since }) = self.phase else { return 0 };
        let others = u64::from(processes.saturating_sub(1));
        if others == 0 {
            return 0;
        }
        let slices = |ns: u64| ns / set.slice.max(1);
        let open = slices(since.saturating_sub(self.granted_at));
        open + slices(now.saturating_sub(since)).max(others)
    }

    /// Notes a drain that took `took`.
    pub(super) fn drained_in(&mut self, took: u64, set: &Settings) {
        let faded = self.longest_drain - self.longest_drain / MEMORY;
        self.longest_drain = faded.max(took.min(set.drain_most));
    }

    /// When a tenant that wants may have a lease: a strict one when it has saved enough, a late one
    /// after a moment, others at once.
    pub(super) fn ready_at(&self, set: &Settings) -> u64 {
        let saved = match self.strict() {
            true => self.bucket.ready_at(self.share.millis, set.burst),
            false => 0,
        };
        saved.max(self.again_at())
    }

    /// When a late tenant may have its next lease. What it has in flight may wait for that, or just take
    /// long: nobody can tell. Where it works it is given time; and each lease that changed nothing
    /// doubles the wait for the next.
    fn again_at(&self) -> u64 {
        let Phase::Late { since } = self.phase else { return 0 };
        let once = match self.word {
            Word::Waits => AGAIN_WAITS,
            Word::None => AGAIN,
            Word::Works { .. } => AGAIN_WORKS,
        };
        since.saturating_add(once << self.late_leases.min(AGAIN_DOUBLED))
    }

    /// It could not drain until launches that waited were let pass, lately.
    pub(super) fn is_tied(&self) -> bool {
        self.helped >= 2
    }
}
