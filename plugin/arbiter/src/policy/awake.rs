//! Who is awake, who is to be roused, and what the caller should look for in words. A holder that does nothing is closed
//! for whoever is awake, and who comes next is roused with the closing.

use super::Policy;
use super::fair::{SchedEntity, contends};
use super::journal::Why;
use super::tenant::{Phase, Slot, Tenant};
use super::types::{GateState, TenantId, Watch};

/// How often words should be read while somebody awake waits, or something drains, nanoseconds.
const LOOK_SOON: u64 = 60_000;
/// And while those who wait sleep.
const LOOK: u64 = 500_000;
/// And so long for its first launch: its thread may have slept since it was seen awake. Less would end its lease before it
/// has begun, each time.
const FIRST: u64 = 300_000;
/// So long after a sign of it something is about to change, nanoseconds.
const NEAR: u64 = 1_000_000;
/// A holder that does nothing is waited for so long by whoever is awake, nanoseconds.
const QUIET: u64 = 50_000;

impl Policy {
    /// A thread of the tenant polls at the closed gate: it has a CPU. That counts until the next grant. Of a tenant whose
    /// threads cannot say it, the caller says so as soon as the tenant is to be roused.
    pub fn awake(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if tenant.lease().is_none() && !tenant.awake {
            tenant.awake = true;
            self.settle(now, self.mask_of(slot));
        }
    }

    /// The holder has nothing in flight, and neither launched nor waits for room, since `since`, as the caller has
    /// read; `since` is the opening of the gate at the earliest. Not of a gate that says SOLO: its launches are not
    /// counted.
    pub fn quiet(&mut self, now: u64, id: TenantId, since: u64) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let Some(lease) = tenant.lease() else { return };
        let since = since.clamp(lease.since, now);
        if lease.state == GateState::Solo {
            return;
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Held(lease) = &mut tenant.phase {
            lease.quiet_at = Some(now);
        }
        if !self.is_awaited(slot) {
            // Whoever comes next is to be awake.
            let next = self.next_after(slot).filter(|&next| self.is_asleep(now, next));
            next.into_iter().for_each(|next| self.rouse(now, next));
            return;
        }
        let waited = if since == lease.since {
            FIRST
        } else if lease.idle_ns > self.settings.idle {
            // Its next pause is worth waiting for.
            lease.idle_ns
        } else {
            QUIET
        };
        if now - since < waited {
            return;
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.pauses.idle(None, since);
        self.close(now, slot, Why::Idle);
        self.settle(now, self.mask_of(slot));
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
                Phase::Held(lease) if lease.state != GateState::Solo && self.competes(slot) => {
                    Watch::Quiet
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
    /// can tell.
    #[must_use]
    pub fn look_after(&self) -> Option<u64> {
        let of = |(id, watch): (TenantId, Watch)| {
            let slot = self.ids.get(&id).copied()?;
            match watch {
                Watch::Quiet if self.is_near(slot) => Some(LOOK_SOON),
                Watch::Quiet => Some(LOOK),
                Watch::Drained => Some(LOOK_SOON),
                Watch::Awake => None,
            }
        };
        self.watches().filter_map(of).min()
    }

    /// Whether something is about to change: the holder was just quiet, or somebody has just been roused.
    fn is_near(&self, slot: Slot) -> bool {
        let recent = |at: Option<u64>| at.is_some_and(|at| self.now < at.saturating_add(NEAR));
        let last = |tenant: &Tenant| tenant.roused.map(|(_, last)| last);
        let rouses = |entity: &SchedEntity| {
            let tenant = self.tenants[entity.slot].as_ref();
            tenant.is_some_and(|tenant| !tenant.awake && recent(last(tenant)))
        };
        let lease = self.tenants[slot].as_ref().and_then(Tenant::lease);
        lease.is_some_and(|lease| recent(lease.quiet_at))
            || self.gpus_of(slot).any(|gpu| self.gpus[gpu].entities.iter().any(rouses))
    }

    /// It has not been roused lately.
    pub(super) fn is_asleep(&self, now: u64, slot: Slot) -> bool {
        let tenant = self.tenants[slot].as_ref();
        let roused = tenant.and_then(|tenant| tenant.roused);
        roused.is_none_or(|(_, last)| now >= last.saturating_add(NEAR))
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

    /// Has `slot` woken.
    pub(super) fn rouse(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.roused = Some((tenant.roused.map_or(now, |(first, _)| first), now));
        if !self.rouses.contains(&tenant.id) {
            self.rouses.push_back(tenant.id);
        }
    }
}
