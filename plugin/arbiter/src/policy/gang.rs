//! Tenants with several GPUs: all or none. Those whose GPUs nobody else has, or only tenants with the same ones, share
//! them as one GPU is shared. The rest of this is about others.
//!
//! A gang holds nothing while it waits, and others may use its GPUs, until it is *due* on all of
//! them at once: on each it comes before every tenant that has that GPU alone and waits for it or
//! holds it, and before every other gang it shares a GPU with, in one order for all gangs. Then all
//! its GPUs are reserved in one step, and each goes to it as it is freed.
//!
//! **No circular wait.** The holder of a lease waits for nobody: its lease ends by its quantum and its drain
//! deadline. A reservation is made for all GPUs of a gang in one step, and only where none of them is
//! reserved; so a gang with a reservation waits for leases, never for a reservation. The first free GPU makes it firm.
//!
//! **No starvation.** A waiting tenant does not move in virtual time, and a served one does. So a waiting
//! gang becomes due on each GPU, and its lease moves it behind the tenants that waited for it. But the
//! virtual times of several GPUs need not move together: on one of them no tenant may be served, or only
//! late ones, while another decides. So a gang is *overdue* when it has waited twice as long as its shares
//! explain: then it comes before all that are not, the oldest first. Its lease is charged like any other,
//! and the next wait that its shares explain is longer by it.
//!
//! **Bounded waste.** GPUs stand idle for a gang only from the first free one on: then the leases on the
//! others end as soon as they have lasted their minimum.

use super::Policy;
use super::fair::{Key, Virtual, contends};
use super::settle::each;
use super::tenant::Slot;

/// The one order of all gangs: overdue ones first, the oldest of them; then those that are not ahead
/// anywhere, and of these the nearest deadline on the GPU where it is furthest off, from that GPU's virtual
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    timely: bool,
    ahead: bool,
    distance: Virtual,
    since: u64,
    slot: Slot,
}

impl Policy {
    /// Notes which tenants share a GPU with a tenant of other GPUs, after one has come or left.
    pub(super) fn find_mixed(&mut self) {
        for i in 0..self.gangs.len() {
            let slot = self.gangs[i];
            let own = self.mask_of(slot);
            let others = |gpu: usize| self.gpus[gpu].entities.iter().map(|entity| entity.slot);
            let is_mixed = each(own).flat_map(others).any(|other| self.mask_of(other) != own);
            if let Some(tenant) = &mut self.tenants[slot] {
                tenant.is_mixed = is_mixed;
            }
        }
    }

    /// Reserves the GPUs of gangs that are due.
    pub(super) fn reserve(&mut self) {
        let mut waiting: Vec<(Rank, Slot)> = Vec::new();
        for i in 0..self.gangs.len() {
            let slot = self.gangs[i];
            // As long as no GPU is kept for it, the order decides anew.
            let blocked = |gpu: usize| self.gpus[gpu].blocked(&self.tenants);
            let all = |is: bool| self.gpus_of(slot).all(|gpu| blocked(gpu) == is);
            if all(true) || all(false) {
                self.unreserve(slot);
            }
            let waits = self.is_mixed(slot) && contends(&self.tenants, slot);
            if waits && !self.has_reservation(slot) && self.due(slot) {
                waiting.extend(self.rank(slot).map(|rank| (rank, slot)));
            }
        }
        waiting.sort_unstable();
        for (rank, slot) in waiting {
            if self.unreserved(slot) && self.before_holding_gangs(slot, rank) {
                for gpu in each(self.mask_of(slot)) {
                    self.gpus[gpu].reserved = Some(slot);
                }
            }
        }
    }

    fn has_reservation(&self, slot: Slot) -> bool {
        self.gpus_of(slot).any(|gpu| self.gpus[gpu].reserved == Some(slot))
    }

    fn unreserved(&self, slot: Slot) -> bool {
        self.gpus_of(slot).all(|gpu| self.gpus[gpu].reserved.is_none())
    }

    /// Notes when a gang that begins to contend is overdue: after twice the wait that its shares explain,
    /// and a few leases of the others.
    pub(super) fn promise(&mut self, now: u64, slot: Slot) {
        let Self { gpus, tenants, settings, .. } = self;
        let Some(tenant) = &tenants[slot] else { return };
        let wait = |&gpu: &u8| {
            let gpu = &gpus[usize::from(gpu)];
            let leases = settings.quantum_most.saturating_mul(gpu.entities.len() as u64);
            gpu.wait_of(now, slot, tenants, settings).saturating_mul(2).saturating_add(leases)
        };
        let wait = tenant.gpus.iter().map(wait).max().unwrap_or(0);
        if let Some(tenant) = &mut tenants[slot] {
            tenant.overdue_at = now.saturating_add(wait);
        }
    }

    fn is_overdue(&self, slot: Slot) -> bool {
        let tenant = self.tenants[slot].as_ref();
        tenant.is_some_and(|tenant| tenant.contends && tenant.overdue_at <= self.now)
    }

    /// Whether it comes before all tenants with one GPU on each of its GPUs, or is overdue.
    fn due(&self, slot: Slot) -> bool {
        self.is_overdue(slot)
            || self.gpus_of(slot).all(|at| {
                let (gpu, tenants) = (&self.gpus[at], &self.tenants);
                let quantum = gpu.quantum(tenants, &self.settings);
                let Some(key) = gpu.key(slot, quantum, tenants) else { return false };
                let holder = gpu.holder(tenants).filter(|&holder| !self.is_mixed(holder));
                let holder = holder.and_then(|holder| gpu.key(holder, quantum, tenants));
                let precedes = |other: Option<Key>| other.is_none_or(|other| key < other);
                precedes(gpu.best_unmixed(quantum, tenants)) && precedes(holder)
            })
    }

    /// Whether a gang that holds a GPU of `slot`'s would not be chosen again.
    fn before_holding_gangs(&self, slot: Slot, rank: Rank) -> bool {
        self.gpus_of(slot).all(|gpu| {
            let holder = self.gpus[gpu].holder(&self.tenants);
            let holder = holder.filter(|&holder| self.is_mixed(holder));
            holder.and_then(|holder| self.rank(holder)).is_none_or(|holder| rank < holder)
        })
    }

    fn rank(&self, slot: Slot) -> Option<Rank> {
        let tenant = self.tenants[slot].as_ref()?;
        let timely = !self.is_overdue(slot);
        let mut rank =
            Rank { timely, ahead: false, distance: Virtual::MIN, since: tenant.since, slot };
        for at in self.gpus_of(slot).filter(|_| timely) {
            let gpu = &self.gpus[at];
            let quantum = gpu.quantum(&self.tenants, &self.settings);
            let key = gpu.key(slot, quantum, &self.tenants)?;
            rank.ahead |= key.ahead();
            rank.distance = rank.distance.max(key.deadline() - gpu.v);
        }
        Some(rank)
    }

    fn is_mixed(&self, slot: Slot) -> bool {
        self.tenants[slot].as_ref().is_some_and(|tenant| tenant.is_mixed)
    }

    /// Where a gang with a reservation has a free GPU already, the leases on its other GPUs end soon.
    pub(super) fn hurry(&mut self) {
        for i in 0..self.gangs.len() {
            let slot = self.gangs[i];
            if !self.has_reservation(slot) {
                continue;
            }
            let held = |gpu: usize| self.gpus[gpu].holder(&self.tenants);
            if self.gpus_of(slot).all(|gpu| held(gpu).is_some()) {
                continue;
            }
            self.take_soon(slot, |_, _, _, _| true);
        }
    }
}
