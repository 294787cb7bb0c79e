//! Earliest eligible virtual deadline first (Stoica et al., 1996) on leased time, per GPU.
//!
//! Each tenant has a seat on each of its GPUs, with the virtual time `v` that its leases there have
//! cost: time leased over its weight. The GPU's virtual time is the weighted mean of those who
//! compete; who lies behind it is owed time, who lies ahead has had more than its share. Next is,
//! among those not ahead, who would be the first to have had a quantum: so a heavy tenant is not
//! made to wait for one quantum of every light one.

use super::tenant::{Phase, Slot, Tenant};
use super::types::{MS, Settings};

/// GPU time that a tenant may have had too much of, and must do without when it wants again. More
/// comes only from an arbiter that stood still, when tenants rationed themselves.
const MOST_DEBT: u64 = 60_000 * MS;

/// Virtual time: nanoseconds of GPU time × 10⁶ / thousandths of share.
pub(super) type Virtual = i128;

/// `ns` of GPU time for a share of `millis`.
pub(super) fn cost(ns: u64, millis: u32) -> Virtual {
    i128::from(ns) * 1_000_000 / i128::from(millis.max(1))
}

/// A tenant on one GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) slot: Slot,
    pub(super) v: Virtual,
    /// The virtual deadline of the quantum being served.
    pub(super) deadline: Virtual,
}

/// One GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Gpu {
    pub(super) seats: Vec<Seat>,
    /// Who holds, drains or is late here.
    pub(super) leases: Vec<Slot>,
    /// The gang for which freed GPUs are kept.
    pub(super) reserved: Option<Slot>,
    /// The last virtual time, for a GPU where nobody competes.
    pub(super) v: Virtual,
    /// Who held it last.
    pub(super) last: Option<Slot>,
    /// Moving mean of the drains, nanoseconds.
    pub(super) drain: u64,
    /// When something falls due.
    pub(super) next: Option<u64>,
}

/// Who comes first: the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    ahead: bool,
    deadline: Virtual,
    since: u64,
    slot: Slot,
}

impl Gpu {
    pub(super) fn seat(&self, slot: Slot) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.slot == slot)
    }

    pub(super) fn seat_mut(&mut self, slot: Slot) -> Option<&mut Seat> {
        self.seats.iter_mut().find(|seat| seat.slot == slot)
    }

    /// Those who compete: who contends, has a lease, or had one a moment ago and may just not have said yet
    /// that it wants the next.
    fn competing<'a>(
        &'a self,
        now: u64,
        tenants: &'a [Option<Tenant>],
    ) -> impl Iterator<Item = (&'a Seat, &'a Tenant)> {
        let competes = move |t: &&Tenant| t.contends || t.has_lease() || now < t.counts_until;
        let tenant = move |seat: &Seat| tenants[seat.slot].as_ref().filter(competes);
        self.seats.iter().filter_map(move |seat| Some((seat, tenant(seat)?)))
    }

    /// The weighted mean of those who compete, `but` one, and the sum of their weights.
    ///
    /// Who is late does not move, and must not hold back the time of those who do; nor, however far ahead
    /// it is, push it on where it has a lease all the same.
    fn mean(
        &self,
        now: u64,
        tenants: &[Option<Tenant>],
        but: Option<Slot>,
    ) -> Option<(Virtual, i128)> {
        let (mut sum, mut weights) = (0_i128, 0_i128);
        let counts = |seat: &Seat, tenant: &Tenant| Some(seat.slot) != but && !tenant.is_late();
        for (seat, tenant) in self.competing(now, tenants).filter(|(s, t)| counts(s, t)) {
            let weight = i128::from(tenant.share.millis);
            // Differences, so that products stay small.
            sum += (seat.v - self.v) * weight;
            weights += weight;
        }
        (weights > 0).then(|| (self.v + sum.div_euclid(weights), weights))
    }

    /// How long `slot` waits, about, until it has its turn by its share: nanoseconds until its virtual
    /// deadline, where all the GPU's time is charged to those who compete now.
    pub(super) fn wait_of(
        &self,
        now: u64,
        slot: Slot,
        tenants: &[Option<Tenant>],
        set: &Settings,
    ) -> u64 {
        let quantum = self.quantum(self.contenders(tenants), set);
        let Some(key) = self.key(slot, quantum, tenants) else { return 0 };
        let weights: i128 =
            self.competing(now, tenants).map(|(_, t)| i128::from(t.share.millis)).sum();
        let wait = (key.deadline - self.v).max(0) * weights / 1_000_000;
        u64::try_from(wait).unwrap_or(u64::MAX)
    }

    /// Takes the virtual time of now; where nobody competes in time it stands still.
    pub(super) fn update(&mut self, now: u64, tenants: &[Option<Tenant>]) {
        self.v = self.mean(now, tenants, None).map_or(self.v, |(mean, _)| mean);
    }

    /// Lets `slot`, which begins to want, be owed no more than `credit` of GPU time.
    ///
    /// Who was away begins at most so much of its own time behind the others. Who only paused keeps
    /// what its share owes it, up to that: it catches up while the others get their shares, too.
    pub(super) fn wake(&mut self, now: u64, slot: Slot, credit: u64, tenants: &[Option<Tenant>]) {
        let Some(tenant) = &tenants[slot] else { return };
        let weight = i128::from(tenant.share.millis);
        // Who waits for its cap between two leases of somebody with long drains must not lose by it.
        let credit = credit.max(self.drain.saturating_mul(2));
        let Some((others, weights)) = self.mean(now, tenants, Some(slot)) else {
            let v = self.v;
            if let Some(seat) = self.seat_mut(slot) {
                seat.v = seat.v.max(v - cost(credit, tenant.share.millis));
            }
            return;
        };
        let mut behind = cost(credit, tenant.share.millis);
        if now < tenant.counts_until {
            behind = behind * (weights + weight) / weights;
        }
        let ahead = cost(MOST_DEBT, tenant.share.millis);
        if let Some(seat) = self.seat_mut(slot) {
            seat.v = seat.v.max(others - behind).min(others + ahead);
        }
    }

    /// The quantum here: longer where drains are long, so that they do not eat it up; shorter where
    /// many wait, so that a round stays short.
    pub(super) fn quantum(&self, contenders: usize, set: &Settings) -> u64 {
        self.quantum_of(0, contenders, set)
    }

    /// The same, and `least` unless many wait.
    pub(super) fn quantum_of(&self, least: u64, contenders: usize, set: &Settings) -> u64 {
        let long = set.quantum.max(self.drain.saturating_mul(5)).max(least).min(set.quantum_most);
        let round = set.quantum.saturating_mul(32) / (contenders as u64 + 1);
        long.min(round).max(set.quantum_least)
    }

    pub(super) fn contenders(&self, tenants: &[Option<Tenant>]) -> usize {
        self.seats.iter().filter(|seat| contends(tenants, seat.slot)).count()
    }

    /// `slot`'s place in the queue if it asked for a quantum now.
    pub(super) fn key(&self, slot: Slot, quantum: u64, tenants: &[Option<Tenant>]) -> Option<Key> {
        let (seat, tenant) = (self.seat(slot)?, tenants[slot].as_ref()?);
        Some(self.key_of(seat, tenant, quantum))
    }

    fn key_of(&self, seat: &Seat, tenant: &Tenant, quantum: u64) -> Key {
        Key {
            ahead: seat.v > self.v,
            deadline: seat.v + cost(quantum, tenant.share.millis),
            since: tenant.since,
            slot: seat.slot,
        }
    }

    /// The first among those with this GPU alone.
    pub(super) fn best_single(&self, quantum: u64, tenants: &[Option<Tenant>]) -> Option<Key> {
        let single = |seat: &Seat| {
            let tenant = tenants[seat.slot].as_ref()?;
            (tenant.contends && !tenant.gang()).then(|| self.key_of(seat, tenant, quantum))
        };
        self.seats.iter().filter_map(single).min()
    }

    /// Who holds the lease, or drains it within its deadline: nobody else may have it.
    pub(super) fn blocked(&self, tenants: &[Option<Tenant>]) -> bool {
        let blocks = |phase| matches!(phase, Phase::Held(_) | Phase::Draining { .. });
        self.leases.iter().any(|&slot| tenants[slot].as_ref().is_some_and(|t| blocks(t.phase)))
    }

    /// Who holds the lease.
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
