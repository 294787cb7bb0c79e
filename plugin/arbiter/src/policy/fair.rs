//! Earliest eligible virtual deadline first (Stoica et al., 1996) on leased time, per GPU.
//!
//! Each tenant has an entity on each of its GPUs. Its virtual time `v` is the time leased there divided by
//! the tenant's weight. The GPU's virtual time is the weighted mean of all competing tenants: a tenant
//! behind it is owed time, a tenant ahead of it has had more than its share. Of the tenants that are not
//! ahead, the next is the one that would first have had a quantum. So a heavy tenant does not wait for one
//! quantum of every light one.

use super::idle::IdleAccount;
use super::tenant::{Phase, Slot, Tenant};
use super::types::{MS, Settings};

/// Most GPU time that a tenant may have had too much and must do without when it wants again. Only an
/// arbiter that stood still, while tenants rationed themselves, can cause more.
const MOST_DEBT: u64 = 60_000 * MS;

/// Virtual time: nanoseconds of GPU time × 10⁶ / thousandths of share.
pub(super) type Virtual = i128;

/// `ns` of GPU time for a share of `millis`.
pub(super) fn cost(ns: u64, millis: u32) -> Virtual {
    i128::from(ns) * 1_000_000 / i128::from(millis.max(1))
}

/// A tenant on one GPU, as the scheduler sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SchedEntity {
    pub(super) slot: Slot,
    pub(super) v: Virtual,
    /// The virtual deadline of the quantum being served.
    pub(super) deadline: Virtual,
}

/// One GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Gpu {
    pub(super) entities: Vec<SchedEntity>,
    /// Tenants that hold the lease, drain it or are late.
    pub(super) leases: Vec<Slot>,
    /// The gang for which freed GPUs are kept.
    pub(super) reserved: Option<Slot>,
    /// The last virtual time, for a GPU without competing tenants.
    pub(super) v: Virtual,
    /// The tenant that held it last.
    pub(super) last: Option<Slot>,
    /// Moving mean of the drains, nanoseconds.
    pub(super) drain: u64,
    /// Moving mean of what leases lose to waking threads, nanoseconds.
    pub(super) handover: u64,
    /// When something falls due.
    pub(super) next: Option<u64>,
    /// Its time idle while somebody wanted it.
    pub(super) idle: IdleAccount,
}

/// The order of tenants: the smallest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    ahead: bool,
    deadline: Virtual,
    since: u64,
    slot: Slot,
}

impl Gpu {
    pub(super) fn entity(&self, slot: Slot) -> Option<&SchedEntity> {
        self.entities.iter().find(|entity| entity.slot == slot)
    }

    pub(super) fn entity_mut(&mut self, slot: Slot) -> Option<&mut SchedEntity> {
        self.entities.iter_mut().find(|entity| entity.slot == slot)
    }

    /// Competing tenants: those that contend, have a lease, or had one a moment ago and may not have
    /// reported their next want yet.
    fn competing<'a>(
        &'a self,
        now: u64,
        tenants: &'a [Option<Tenant>],
    ) -> impl Iterator<Item = (&'a SchedEntity, &'a Tenant)> {
        let competes = move |t: &&Tenant| t.contends || t.has_lease() || now < t.counts_until;
        let tenant = move |entity: &SchedEntity| tenants[entity.slot].as_ref().filter(competes);
        self.entities.iter().filter_map(move |entity| Some((entity, tenant(entity)?)))
    }

    /// The weighted mean of the competing tenants, except `but`, and the sum of their weights.
    ///
    /// A late tenant does not move. It must neither hold back the time of those that do, nor push it on,
    /// however far ahead it is, where it has a lease all the same.
    fn mean(
        &self,
        now: u64,
        tenants: &[Option<Tenant>],
        but: Option<Slot>,
    ) -> Option<(Virtual, i128)> {
        let (mut sum, mut weights) = (0_i128, 0_i128);
        let counts =
            |entity: &SchedEntity, tenant: &Tenant| Some(entity.slot) != but && !tenant.is_late();
        for (entity, tenant) in self.competing(now, tenants).filter(|(s, t)| counts(s, t)) {
            let weight = i128::from(tenant.share.millis);
            // Differences, so that products stay small.
            sum += (entity.v - self.v) * weight;
            weights += weight;
        }
        (weights > 0).then(|| (self.v + sum.div_euclid(weights), weights))
    }

    /// Estimated nanoseconds until `slot` reaches its virtual deadline, if all the GPU's time is charged to
    /// the tenants that compete now.
    pub(super) fn wait_of(
        &self,
        now: u64,
        slot: Slot,
        tenants: &[Option<Tenant>],
        set: &Settings,
    ) -> u64 {
        let quantum = self.quantum(tenants, set);
        let Some(key) = self.key(slot, quantum, tenants) else { return 0 };
        let weights: i128 =
            self.competing(now, tenants).map(|(_, t)| i128::from(t.share.millis)).sum();
        let wait = (key.deadline - self.v).max(0) * weights / 1_000_000;
        u64::try_from(wait).unwrap_or(u64::MAX)
    }

    /// Updates the virtual time; it stands still where no tenant competes.
    pub(super) fn update(&mut self, now: u64, tenants: &[Option<Tenant>]) {
        self.v = self.mean(now, tenants, None).map_or(self.v, |(mean, _)| mean);
    }

    /// Limits what `slot`, which begins to want, is owed to `credit` of GPU time.
    ///
    /// A tenant that was away begins at most that much of its own time behind the others. A tenant that only
    /// paused keeps what its share owes it, up to that amount: it catches up while the others get their
    /// shares, too.
    pub(super) fn wake(&mut self, now: u64, slot: Slot, credit: u64, tenants: &[Option<Tenant>]) {
        let Some(tenant) = &tenants[slot] else { return };
        let weight = i128::from(tenant.share.millis);
        // A tenant that waits for its cap between two leases of one with long drains must lose nothing by
        // it.
        let credit = credit.max(self.drain.saturating_mul(2));
        let Some((others, weights)) = self.mean(now, tenants, Some(slot)) else {
            let v = self.v;
            if let Some(entity) = self.entity_mut(slot) {
                entity.v = entity.v.max(v - cost(credit, tenant.share.millis));
            }
            return;
        };
        let mut behind = cost(credit, tenant.share.millis);
        if now < tenant.counts_until {
            behind = behind * (weights + weight) / weights;
        }
        let ahead = cost(MOST_DEBT, tenant.share.millis);
        if let Some(entity) = self.entity_mut(slot) {
            entity.v = entity.v.max(others - behind).min(others + ahead);
        }
    }

    /// The quantum on this GPU: longer where drains or hand-overs are long, so that they do not consume it;
    /// shorter where many tenants wait, so that a round stays short.
    pub(super) fn quantum(&self, tenants: &[Option<Tenant>], set: &Settings) -> u64 {
        self.quantum_of(0, tenants, set)
    }

    /// The same with `least` as the lower limit, unless many wait.
    pub(super) fn quantum_of(&self, least: u64, tenants: &[Option<Tenant>], set: &Settings) -> u64 {
        let drains = self.drain.saturating_mul(set.drains);
        let handovers = self.handover.saturating_mul(set.handovers);
        let long = set.quantum.max(drains).max(handovers).max(least).min(set.quantum_most);
        let round = set.quantum.saturating_mul(32) / (self.contenders(tenants) as u64 + 1);
        long.min(round).max(set.quantum_least)
    }

    pub(super) fn contenders(&self, tenants: &[Option<Tenant>]) -> usize {
        self.entities.iter().filter(|entity| contends(tenants, entity.slot)).count()
    }

    /// `slot`'s place in the queue if it asked for a quantum now.
    pub(super) fn key(&self, slot: Slot, quantum: u64, tenants: &[Option<Tenant>]) -> Option<Key> {
        let (entity, tenant) = (self.entity(slot)?, tenants[slot].as_ref()?);
        Some(self.key_of(entity, tenant, quantum))
    }

    fn key_of(&self, entity: &SchedEntity, tenant: &Tenant, quantum: u64) -> Key {
        Key {
            ahead: entity.v > self.v,
            deadline: entity.v + cost(quantum, tenant.share.millis),
            since: tenant.since,
            slot: entity.slot,
        }
    }

    /// The first of the tenants that need no reservation: see [`super::gang`]. One that slept through its turn comes after all others.
    pub(super) fn best_unmixed(&self, quantum: u64, tenants: &[Option<Tenant>]) -> Option<Key> {
        let single = |entity: &SchedEntity| {
            let tenant = tenants[entity.slot].as_ref()?;
            let counts = tenant.contends && !tenant.is_mixed;
            counts.then(|| (tenant.slept, self.key_of(entity, tenant, quantum)))
        };
        self.entities.iter().filter_map(single).min().map(|(_, key)| key)
    }

    /// Whether a tenant holds the lease, or drains it within its deadline: then no other may have it.
    pub(super) fn blocked(&self, tenants: &[Option<Tenant>]) -> bool {
        let blocks = |phase| matches!(phase, Phase::Held(_) | Phase::Draining { .. });
        self.leases.iter().any(|&slot| tenants[slot].as_ref().is_some_and(|t| blocks(t.phase)))
    }

    /// The tenant that holds the lease.
    pub(super) fn holder(&self, tenants: &[Option<Tenant>]) -> Option<Slot> {
        let holds = |slot: &Slot| tenants[*slot].as_ref().is_some_and(|t| t.lease().is_some());
        self.leases.iter().copied().find(holds)
    }
}

impl Key {
    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    pub(super) fn ahead(&self) -> bool {
        self.ahead
    }

    pub(super) fn deadline(&self) -> Virtual {
        self.deadline
    }
}

pub(super) fn contends(tenants: &[Option<Tenant>], slot: Slot) -> bool {
    tenants[slot].as_ref().is_some_and(|tenant| tenant.contends)
}
