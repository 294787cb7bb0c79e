//! The one decision pass: after every event, on the GPUs that it touched.

use super::Policy;
use super::fair::{Key, SchedEntity, contends, cost};
use super::journal::Why;
use super::tenant::{Phase, Slot, Tenant};
use super::types::{GateState, MS};

/// A tenant is SOLO when no other has wanted or held the GPU for so long.
pub(super) const SOLO_AFTER: u64 = 1000 * MS;

/// A set of GPUs.
pub(crate) type Mask = u128;

/// The GPUs in a set, ascending.
pub(crate) fn each(mut mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let gpu = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (gpu < Mask::BITS).then_some(gpu as usize)
    })
}

impl Policy {
    /// Brings everything about these GPUs, and those that gangs tie to them, up to `now`.
    pub(super) fn settle(&mut self, now: u64, touched: Mask) {
        let mask = self.tied(touched);
        for gpu in each(mask) {
            self.charge_gpu(now, gpu);
            self.gpus[gpu].update(now, &self.tenants);
        }
        for gpu in each(mask) {
            self.admit(now, gpu);
            self.gpus[gpu].update(now, &self.tenants);
        }
        if !self.gangs.is_empty() {
            self.reserve();
            self.hurry();
        }
        for gpu in each(mask) {
            if let Some(holder) = self.gpus[gpu].holder(&self.tenants) {
                self.review(now, holder);
            }
        }
        for gpu in each(mask) {
            self.hand_out(now, gpu);
        }
        for gpu in each(mask) {
            self.gpus[gpu].next = self.next_of(gpu);
            self.note_idle(now, gpu);
        }
    }

    /// The GPUs that gangs tie to these.
    fn tied(&self, mut mask: Mask) -> Mask {
        let mut grown = true;
        while grown && !self.gangs.is_empty() {
            grown = false;
            for &gang in &self.gangs {
                let own = self.mask_of(gang);
                if own & mask != 0 && own & !mask != 0 {
                    mask |= own;
                    grown = true;
                }
            }
        }
        mask
    }

    /// Charges the leases up to now, and gives up drains that are too late.
    fn charge_gpu(&mut self, now: u64, gpu: usize) {
        for i in 0..self.gpus[gpu].leases.len() {
            self.charge(now, self.gpus[gpu].leases[i]);
        }
        for i in 0..self.gpus[gpu].leases.len() {
            let slot = self.gpus[gpu].leases[i];
            let phase = self.tenants[slot].as_ref().map(|tenant| tenant.phase);
            if matches!(phase, Some(Phase::Draining { deadline, .. }) if deadline <= now) {
                // From here on it pays in full, on all its GPUs.
                self.charge_around(now, slot);
                self.give_up(now, slot);
            }
        }
    }

    /// Lets tenants that want, and may, take part in the competition.
    fn admit(&mut self, now: u64, gpu: usize) {
        for i in 0..self.gpus[gpu].entities.len() {
            let slot = self.gpus[gpu].entities[i].slot;
            let Some(tenant) = &self.tenants[slot] else { continue };
            let may = tenant.waits() && !tenant.contends;
            if may && tenant.ready_at() <= now {
                self.arrive(now, slot);
            }
        }
    }

    fn arrive(&mut self, now: u64, slot: Slot) {
        for gpu in each(self.mask_of(slot)) {
            self.gpus[gpu].wake(now, slot, self.settings.credit, &self.tenants);
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.contends = true;
        if tenant.gpus.len() > 1 {
            self.promise(now, slot);
        }
        for gpu in each(self.mask_of(slot)) {
            self.gpus[gpu].update(now, &self.tenants);
        }
        self.take_soon(slot, Self::preempts);
    }

    /// Whether `slot`, which has just begun to want, is owed so much that the holder must not finish its
    /// quantum. Half a quantum is the threshold, so that small differences cost no hand-over.
    fn preempts(&self, slot: Slot, holder: Slot, gpu: usize) -> bool {
        let (Some(tenant), gpu) = (&self.tenants[slot], &self.gpus[gpu]) else { return false };
        let quantum = self.quantum_of(slot);
        let key = gpu.key(slot, quantum, &self.tenants);
        let held = gpu.entity(holder).map(|entity| entity.deadline);
        let margin = cost(quantum / 2, tenant.share.millis);
        matches!((key, held), (Some(key), Some(held)) if !key.ahead() && key.deadline() + margin < held)
    }

    /// Ends the leases on `slot`'s GPUs when they have lasted their minimum, if `yields` says so of all holders.
    pub(super) fn take_soon(&mut self, slot: Slot, yields: fn(&Self, Slot, Slot, usize) -> bool) {
        let Some(tenant) = &self.tenants[slot] else { return };
        let least = tenant.pauses.lent();
        let held = |gpu: usize| Some((gpu, self.gpus[gpu].holder(&self.tenants)?));
        let held: Vec<(usize, Slot)> = self.gpus_of(slot).filter_map(held).collect();
        let all_yield = held.iter().all(|&(gpu, holder)| yields(self, slot, holder, gpu));
        for (_, holder) in held.into_iter().filter(|_| all_yield) {
            if let Some(Phase::Held(lease)) =
                self.tenants[holder].as_mut().map(|held| &mut held.phase)
            {
                let soon = lease.since.saturating_add(least);
                lease.preempt = Some(lease.preempt.map_or(soon, |at| at.min(soon)));
            }
        }
    }

    /// Whether a lease goes on, and what its gate says.
    fn review(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &self.tenants[slot] else { return };
        let Some(lease) = tenant.lease() else { return };
        let competes = self.competes(slot);
        let strict = tenant.strict();
        let over = competes && now >= lease.until;
        let why = if strict && tenant.bucket.empty() {
            Some(Why::Cap)
        } else if lease.state == GateState::Solo && (competes || strict) {
            Some(Why::Newcomer)
        } else if competes && lease.preempt.is_some_and(|at| at <= now) {
            Some(Why::Owed)
        } else {
            (over && self.yields(slot)).then_some(Why::Quantum)
        };
        if let Some(why) = why {
            self.close(now, slot, why);
            return;
        }
        if over {
            self.renew(now, slot);
        }
        let state = self.state_for(now, slot);
        if lease.state != GateState::Solo && lease.state != state {
            self.say(now, slot, state);
        }
    }

    /// Whether any other tenant could have the lease of one of its GPUs.
    pub(super) fn competes(&self, slot: Slot) -> bool {
        self.gpus_of(slot).any(|gpu| {
            let others =
                |entity: &SchedEntity| entity.slot != slot && contends(&self.tenants, entity.slot);
            self.gpus[gpu].entities.iter().any(others)
        })
    }

    /// Whether another tenant comes before this holder, on any of its GPUs.
    fn yields(&self, slot: Slot) -> bool {
        let quantum = self.quantum_of(slot);
        let is_there =
            |key: &Key| self.tenants[key.slot()].as_ref().is_some_and(|tenant| !tenant.slept);
        self.gpus_of(slot).any(|at| {
            let gpu = &self.gpus[at];
            let key = gpu.key(slot, quantum, &self.tenants);
            let best = gpu.best_unmixed(quantum, &self.tenants).filter(is_there);
            gpu.reserved.is_some() || matches!((key, best), (Some(key), Some(best)) if best < key)
        })
    }

    /// What the gate of a holder should say.
    pub(super) fn state_for(&self, now: u64, slot: Slot) -> GateState {
        let strict = self.tenants[slot].as_ref().is_some_and(Tenant::strict);
        if strict || self.competes(slot) {
            GateState::Yield
        } else if self.alone_at(slot).is_some_and(|at| at <= now) {
            GateState::Solo
        } else {
            GateState::Open
        }
    }

    /// From when on no other tenant has used its GPUs for a while, if none does until then.
    pub(super) fn alone_at(&self, slot: Slot) -> Option<u64> {
        let mut alone = 0;
        for gpu in self.gpus_of(slot) {
            for entity in self.gpus[gpu].entities.iter().filter(|entity| entity.slot != slot) {
                let Some(other) = &self.tenants[entity.slot] else { continue };
                if other.active() {
                    return None;
                }
                if let Some(last) = other.last_active {
                    alone = alone.max(last.saturating_add(SOLO_AFTER));
                }
            }
        }
        Some(alone)
    }

    /// Gives a free GPU to the next tenant.
    fn hand_out(&mut self, now: u64, gpu: usize) {
        if self.gpus[gpu].blocked(&self.tenants) {
            return;
        }
        if let Some(next) = self.next_on(gpu)
            && self.gpus_of(next).all(|gpu| !self.gpus[gpu].blocked(&self.tenants))
        {
            self.grant(now, next);
        }
    }

    /// The tenant that gets this GPU next, as things stand.
    pub(super) fn next_on(&self, gpu: usize) -> Option<Slot> {
        let gpu = &self.gpus[gpu];
        let quantum = gpu.quantum(&self.tenants, &self.settings);
        gpu.reserved.or_else(|| Some(gpu.best_unmixed(quantum, &self.tenants)?.slot()))
    }

    /// When something on this GPU falls due by time alone.
    fn next_of(&self, gpu: usize) -> Option<u64> {
        let gpu = &self.gpus[gpu];
        let lease = |&slot: &Slot| match self.tenants[slot].as_ref()?.phase {
            Phase::Held(_) => self.next_of_holder(slot),
            Phase::Draining { deadline, .. } => Some(deadline),
            Phase::Out | Phase::Late { .. } => None,
        };
        let saving = |entity: &SchedEntity| {
            let tenant = self.tenants[entity.slot].as_ref()?;
            let saves = tenant.waits() && !tenant.contends;
            saves.then(|| tenant.ready_at())
        };
        let leases = gpu.leases.iter().filter_map(lease);
        leases.chain(gpu.entities.iter().filter_map(saving)).min()
    }

    fn next_of_holder(&self, slot: Slot) -> Option<u64> {
        let tenant = self.tenants[slot].as_ref()?;
        let lease = tenant.lease()?;
        let mut next = if self.competes(slot) {
            Some(lease.preempt.map_or(lease.until, |at| at.min(lease.until)))
        } else if lease.state == GateState::Open {
            self.alone_at(slot)
        } else {
            None
        };
        if tenant.strict()
            && let Some(at) = tenant.bucket.empty_at(tenant.share.millis)
        {
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        next
    }
}
