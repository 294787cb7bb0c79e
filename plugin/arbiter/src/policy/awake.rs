//! Who is awake, who is to be roused, and what the caller should look for in words. A holder that does nothing is closed
//! for whoever is awake, and who comes next is roused with the closing.

use super::Policy;
use super::fair::contends;
use super::tenant::{Phase, Slot, Tenant};
use super::types::{GateState, TenantId, Watch};

/// How often words should be read while something drains, nanoseconds.
const LOOK_SOON: u64 = 60_000;
/// While somebody awake waits for a holder to have nothing in flight: its helper says so, too, unless it has no processor.
const LOOK_QUIET: u64 = 250_000;
/// And while those who wait sleep.
const LOOK: u64 = 500_000;
/// What is in flight is not looked at before it can have landed, but this often, whatever is said of it.
const LOOK_MOST: u64 = 1_000_000;
/// A holder that does nothing is waited for so long by whoever is awake, nanoseconds.
const QUIET: u64 = 50_000;
/// Or as long as hand-overs take of late, up to this: sooner, two would cost more than the wait.
const QUIET_MOST: u64 = 300_000;
/// And so long before somebody is woken who could have the GPU instead: a thread of the holder that was woken is there by
/// then.
const ASLEEP: u64 = 1_000_000;

impl Policy {
    /// A thread of the tenant polls at the closed gate: it launches as soon as the gate opens. That stays true until
    /// [`Self::asleep`] or the next grant. Of a tenant whose threads cannot say it, the caller says so as soon as the
    /// tenant is to be roused.
    pub fn awake(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if tenant.lease().is_none() {
            tenant.awake = true;
            if std::mem::take(&mut tenant.slept) {
                self.take_soon(slot, Self::comes_before);
            }
            self.settle(now, self.mask_of(slot));
        }
    }

    /// None polls any more.
    pub fn asleep(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if std::mem::take(&mut tenant.awake) {
            self.settle(now, self.mask_of(slot));
        }
    }

    /// The holder has nothing in flight, and neither launched nor waits for room, since `since`, as the caller has
    /// read; `since` is the opening of the gate at the earliest. Not of a gate that says SOLO: its launches are not
    /// counted.
    pub fn quiet(&mut self, now: u64, id: TenantId, since: u64) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &self.tenants[slot] else { return };
        let Some(lease) = tenant.lease() else { return };
        let since = since.clamp(lease.since, now);
        // Short pauses of one within its share are waited for, and others' as long as a hand-over takes.
        let handover = self.gpus_of(slot).map(|gpu| self.gpus[gpu].handover).max().unwrap_or(0);
        let quiet = match lease.waits_for_pauses() {
            true => lease.idle_ns,
            // It has come to the end of its work.
            false if tenant.pauses.are_long() && since > lease.since => 0,
            false => handover.clamp(QUIET, QUIET_MOST),
        };
        if lease.state == GateState::Solo || now - since < quiet {
            return;
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.stood.see(since, now);
        let competes = self.competes(slot);
        if !self.is_awaited(slot) {
            if now - since < ASLEEP.max(lease.idle_ns) {
                return;
            }
            if competes {
                return self.rouse_next(slot);
            }
        }
        // Alone, and under a cap: it pays for no more of this.
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.slept = since == lease.since;
        self.close_idle(now, slot, lease, since);
    }

    /// Tenants of which a thread should be woken, without a change of the gate word: each is returned once for each
    /// time. To be called after [`Self::commands`].
    pub fn rouses(&mut self) -> impl Iterator<Item = TenantId> + '_ {
        self.rouses.drain(..)
    }

    /// What the caller should look for in the words of which tenants.
    pub fn watches(&self) -> impl Iterator<Item = (TenantId, Watch)> + '_ {
        self.tenants.iter().enumerate().filter_map(|(slot, tenant)| {
            let tenant = tenant.as_ref()?;
            let watch = match tenant.phase {
                Phase::Held(lease)
                    if lease.state != GateState::Solo
                        && (tenant.strict() || self.competes(slot)) =>
                {
                    match tenant.pauses.are_long() && self.is_awaited(slot) {
                        true => Watch::Pauses,
                        false => Watch::Quiet,
                    }
                }
                Phase::Draining { .. } => Watch::Drained,
                Phase::Out | Phase::Late { .. } if tenant.wanting => Watch::Awake,
                Phase::Late { .. } => Watch::Drained,
                Phase::Out | Phase::Held(_) => return None,
            };
            Some((tenant.id, watch))
        })
    }

    /// How long after the last look the next is due, nanoseconds; `None` where nobody waits for anything that words
    /// can tell. `lasts`: about how long what a tenant has in flight takes, 0 where that is not known.
    #[must_use]
    pub fn look_after(&self, lasts: impl Fn(TenantId) -> u64) -> Option<u64> {
        let of = |(id, watch): (TenantId, Watch)| {
            let slot = self.ids.get(&id).copied()?;
            let often = match watch {
                Watch::Quiet if self.is_awaited(slot) => LOOK_QUIET,
                Watch::Quiet => LOOK,
                Watch::Drained | Watch::Pauses => LOOK_SOON,
                Watch::Awake => return None,
            };
            // Sooner than said, because looks come late.
            let before = lasts(id) / 4 * if watch == Watch::Pauses { 2 } else { 3 };
            Some(often.max(before.min(LOOK_MOST)))
        };
        self.watches().filter_map(of).min()
    }

    /// Whether a tenant that is awake waits for one of `slot`'s GPUs.
    fn is_awaited(&self, slot: Slot) -> bool {
        let waits = |other: Slot| {
            other != slot
                && contends(&self.tenants, other)
                && self.tenants[other].as_ref().is_some_and(|other| other.awake)
        };
        self.gpus_of(slot)
            .any(|gpu| self.gpus[gpu].entities.iter().any(|entity| waits(entity.slot)))
    }

    /// Has those woken who slept through their turns and want `slot`'s GPUs.
    pub(super) fn rouse_sleepers(&mut self, slot: Slot) {
        for gpu in super::each(self.mask_of(slot)) {
            for i in 0..self.gpus[gpu].entities.len() {
                let other = self.gpus[gpu].entities[i].slot;
                let sleeps = |other: &Tenant| other.slept && other.contends;
                if self.tenants[other].as_ref().is_some_and(sleeps) {
                    self.rouse(other);
                }
            }
        }
    }

    /// Has those woken who come after `slot`, one on each of its GPUs.
    fn rouse_next(&mut self, slot: Slot) {
        for gpu in super::each(self.mask_of(slot)) {
            self.next_on(gpu).into_iter().for_each(|next| self.rouse(next));
        }
    }

    fn comes_before(&self, slot: Slot, holder: Slot, gpu: usize) -> bool {
        let quantum = self.quantum_of(holder);
        let key = |slot| self.gpus[gpu].key(slot, quantum, &self.tenants);
        matches!((key(slot), key(holder)), (Some(key), Some(held)) if key < held)
    }

    /// Has `slot` woken.
    pub(super) fn rouse(&mut self, slot: Slot) {
        let Some(tenant) = &self.tenants[slot] else { return };
        if !tenant.awake && !self.rouses.contains(&tenant.id) {
            self.rouses.push_back(tenant.id);
        }
    }
}
