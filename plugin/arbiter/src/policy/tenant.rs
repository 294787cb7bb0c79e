//! One tenant: its share, its lease and the time that it has had.

use super::LONG_WAIT_NS;
use super::bucket::{self, BURST, CapBucket};
use super::pace::{IDLE, PausePattern};
use super::types::{GateState, GpuIndex, MS, Settings, Share, ShareKind, TenantId, TenantTotals};

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
        /// When the next tenant is let in all the same.
        deadline: u64,
    },
    /// Closed, not drained in time; others may hold the GPU beside it. If it wants, it waits for its next
    /// lease like any other.
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
    /// When a tenant that is owed time takes it away.
    pub(super) preempt: Option<u64>,
    /// What the gate says: anything but CLOSED.
    pub(super) state: GateState,
    /// After how long without work it reports that it is idle.
    pub(super) idle_ns: u64,
}

impl Lease {
    /// Whether its tenant's pauses are waited for.
    pub(super) fn waits_for_pauses(self) -> bool {
        self.idle_ns > IDLE
    }
}

/// What a closed tenant that has not drained reports about the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainNotice {
    /// Nothing since the closing.
    None,
    /// The GPU works for it.
    Works {
        /// Until when the report counts.
        until: u64,
    },
    /// The host must do something first.
    Waits,
}

/// How long after its closing a late tenant may have its next lease, nanoseconds: where it waits for the
/// host, where nothing is known, and where the GPU works for it; and how often that is doubled at most.
const AGAIN_WAITS: u64 = 5 * MS;
const AGAIN: u64 = 50 * MS;
const AGAIN_WORKS: u64 = 1000 * MS;
const AGAIN_DOUBLED: u32 = 4;

/// How long the GPU serves one process while another of the tenant has work, nanoseconds.
const SLICE: u64 = 2 * MS;

/// How far back drains count: each new one weighs the old longest at 7/8.
const MEMORY: u64 = 8;

/// Time in which a holder had nothing in flight, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stood {
    /// The last such time: when it began, and up to when it has been seen to last.
    since: u64,
    until: u64,
    /// The ones before.
    ns: u64,
}

impl Stood {
    pub(super) fn see(&mut self, since: u64, until: u64) {
        if since > self.until {
            self.ns = self.all_ns();
            self.since = since;
        }
        self.until = until;
    }

    pub(super) fn all_ns(self) -> u64 {
        self.ns + (self.until - self.since)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) id: TenantId,
    pub(super) gpus: Vec<GpuIndex>,
    pub(super) share: Share,
    pub(super) phase: Phase,
    /// A launch waits.
    pub(super) wanting: bool,
    /// A thread of it polls at the closed gate.
    pub(super) awake: bool,
    /// It launched nothing in its last lease, and has not been seen awake since: others go first.
    pub(super) slept: bool,
    /// Since when it wants.
    pub(super) since: u64,
    /// Takes part in the competition: it wants, neither holds nor drains in time, and has tokens.
    pub(super) contends: bool,
    /// It has several GPUs, and shares one with a tenant of other GPUs: see [`super::gang`].
    pub(super) is_mixed: bool,
    /// When a gang that contends becomes overdue.
    pub(super) overdue_at: u64,
    /// When it last wanted or held; for SOLO.
    pub(super) last_active: Option<u64>,
    /// Until when a tenant without a want counts for the virtual time.
    pub(super) counts_until: u64,
    pub(super) bucket: CapBucket,
    pub(super) pauses: PausePattern,
    /// When this lease was granted, what the bucket has been charged for it, nanoseconds, and whether
    /// another tenant's work ran on its GPUs before.
    pub(super) granted_at: u64,
    pub(super) lease_ns: u64,
    pub(super) switched: bool,
    /// What words have shown of its lease: the time in which it had nothing in flight.
    pub(super) stood: Stood,
    /// The part of `lease_ns` in which nobody else wanted the GPU.
    pub(super) lease_alone_ns: u64,
    /// Of `totals.used_ns`, what was known at the last measurement from outside.
    pub(super) used_then: u64,
    /// Moving mean of what its leases lose to waking threads, nanoseconds.
    pub(super) handover: u64,
    /// What can still be given back to the cap of leases that have ended, nanoseconds.
    pub(super) slack_ns: u64,
    pub(super) word: DrainNotice,
    /// A late drain of this closing counts no more: it has been counted, or it is of a gate that an earlier
    /// arbiter left open.
    pub(super) overlap_noted: bool,
    /// The longest recent drain, nanoseconds.
    pub(super) longest_drain: u64,
    /// Up to when it has been charged, while it has a lease.
    pub(super) charged_at: u64,
    pub(super) totals: TenantTotals,
    /// Leases granted to it while it was late, since it last drained.
    pub(super) late_leases: u32,
    /// Recent closings that drained only because waiting launches were let pass; see [`Tenant::is_tied`].
    pub(super) helped: u32,
}

impl Tenant {
    pub(super) fn new(now: u64, id: TenantId, gpus: Vec<GpuIndex>, share: Share) -> Self {
        Self {
            id,
            gpus,
            share,
            phase: Phase::Out,
            wanting: false,
            awake: false,
            slept: false,
            since: now,
            contends: false,
            is_mixed: false,
            overdue_at: u64::MAX,
            last_active: None,
            counts_until: 0,
            bucket: CapBucket::new(now, share.millis),
            pauses: PausePattern::default(),
            granted_at: now,
            lease_ns: 0,
            switched: false,
            stood: Stood::default(),
            lease_alone_ns: 0,
            used_then: 0,
            handover: 0,
            slack_ns: 0,
            word: DrainNotice::None,
            overlap_noted: false,
            longest_drain: 0,
            charged_at: now,
            totals: TenantTotals::default(),
            late_leases: 0,
            helped: 0,
        }
    }

    /// This tenant, which was another before: with its cap's debts, its habits and its account.
    pub(super) fn after(self, before: Self) -> Self {
        let bucket = match self.strict() && before.strict() {
            true => before.bucket,
            false => self.bucket,
        };
        Self {
            bucket,
            last_active: before.last_active,
            counts_until: before.counts_until,
            pauses: before.pauses,
            handover: before.handover,
            slack_ns: before.slack_ns,
            longest_drain: before.longest_drain,
            used_then: before.used_then,
            totals: before.totals,
            helped: before.helped,
            ..self
        }
    }

    /// It holds a lease, and nobody else wants its GPUs.
    pub(super) fn is_alone(&self) -> bool {
        let lease = self.lease();
        lease.is_some_and(|lease| matches!(lease.state, GateState::Solo | GateState::Open))
    }

    pub(super) fn strict(&self) -> bool {
        self.share.kind == ShareKind::Strict
    }

    pub(super) fn has_lease(&self) -> bool {
        self.phase != Phase::Out
    }

    /// It neither holds a lease nor drains one within its deadline, and may have the next. A late tenant
    /// may, too: what it has in flight may wait for the very launch that waits for the lease.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.phase, Phase::Out | Phase::Late { .. })
    }

    /// It has not drained in time, and not since.
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

    pub(super) fn state(&self) -> GateState {
        self.lease().map_or(GateState::Closed, |lease| lease.state)
    }

    /// Until when the GPU counts as working for a late tenant.
    pub(super) fn works_until(&self) -> u64 {
        match (self.phase, self.word) {
            (Phase::Late { .. }, DrainNotice::Works { until }) => until,
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
        // A tenant that drains with help gets time for it: being late would cost it far more.
        if self.is_tied() && self.late_leases == 0 {
            return most / 2;
        }
        self.longest_drain.saturating_mul(3).clamp(set.drain_least, most)
    }

    /// Strict shares: what may be saved, in time at the rate of the share: so much more on a host that wakes
    /// threads late that a lease loses no more to that than a report gives back
    /// ([`super::lease`]). Fewer and longer leases are the same cap.
    pub(super) fn burst(&self) -> u64 {
        /// A lease, charged, lasts at least so many hand-overs.
        const HANDOVERS: u64 = 24;
        /// And is no more than so many times as long.
        const MOST: u64 = 6;
        let charged = self.handover.saturating_mul(HANDOVERS);
        let needed = bucket::burst_for(charged, self.share.millis);
        needed.clamp(BURST, BURST * MOST)
    }

    /// Notes that it waited for a lease, and got it.
    pub(super) fn waited(&mut self, ns: u64) {
        self.totals.waited_ns += ns;
        self.totals.long_waits += u64::from(ns >= LONG_WAIT_NS);
        self.totals.longest_wait_ns = self.totals.longest_wait_ns.max(ns);
    }

    /// Estimate of how often the GPU changed between its processes in the lease that it has just drained:
    /// after each slice while it could launch, and at the end once to each.
    pub(super) fn changes(&self, now: u64, processes: u32) -> u64 {
        let (Phase::Draining { since, .. } | Phase::Late { since }) = self.phase else { return 0 };
        let others = u64::from(processes.saturating_sub(1));
        if others == 0 {
            return 0;
        }
        let slices = |ns: u64| ns / SLICE;
        let open = slices(since.saturating_sub(self.granted_at));
        open + slices(now.saturating_sub(since)).max(others)
    }

    /// Notes a drain that took `took`.
    pub(super) fn drained_in(&mut self, took: u64, set: &Settings) {
        let faded = self.longest_drain - self.longest_drain / MEMORY;
        self.longest_drain = faded.max(took.min(set.drain_most));
    }

    /// When a tenant that wants may have a lease: a strict one when it has saved enough, a late one after a
    /// moment, others at once.
    pub(super) fn ready_at(&self) -> u64 {
        let saved = match self.strict() {
            true => self.bucket.ready_at(self.share.millis, self.burst()),
            false => 0,
        };
        saved.max(self.again_at())
    }

    /// When a late tenant may have its next lease. What it has in flight may wait for that lease, or just
    /// take long: nobody can tell. Where the GPU works for it, it gets time; each lease that changed nothing
    /// doubles the wait for the next.
    fn again_at(&self) -> u64 {
        let Phase::Late { since } = self.phase else { return 0 };
        let once = match self.word {
            DrainNotice::Waits => AGAIN_WAITS,
            DrainNotice::None => AGAIN,
            DrainNotice::Works { .. } => AGAIN_WORKS,
        };
        since.saturating_add(once << self.late_leases.min(AGAIN_DOUBLED))
    }

    /// Lately it could not drain until waiting launches were let pass.
    pub(super) fn is_tied(&self) -> bool {
        self.helped >= 2
    }
}
