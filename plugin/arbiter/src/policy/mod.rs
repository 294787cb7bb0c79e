//! The arbiter's policy: a pure state machine that decides which tenant holds a GPU's lease.
//!
//! The caller passes events with the time in and carries [`Policy::commands`] out: after every event, and
//! when [`Policy::deadline`] has come ([`Policy::tick`]). The caller counts processes and epochs: `drained`
//! here means that all bound processes of the tenant have drained the current closing. Times are nanoseconds
//! of one monotonic clock.
//!
//! Events may come in any order and from any tenant: one that makes no sense now is ignored.
//!
//! | File | What |
//! |---|---|
//! | `awake` | who is awake, and what words are looked for |
//! | `fair` | the order on one GPU: earliest eligible virtual deadline first |
//! | `bucket` | the cap of a strict share |
//! | `gang` | tenants with several GPUs; why they cannot block each other |
//! | `lease` | granting, charging, closing, late drains |
//! | `settle` | the decision pass after each event |
//! | `pace` | how long a pause is waited for, how much may be in flight |
//! | `idle` | time that a GPU was idle while somebody wanted it |
//! | `journal` | what is noted for a trace |
//!
//! `docs/internals/compute.md`, "The policy", has the reasons and bounds.

mod awake;
mod bucket;
mod fair;
mod gang;
mod idle;
mod journal;
mod lease;
mod pace;
mod settle;
mod tenant;
mod types;
mod view;

use std::collections::{BTreeMap, VecDeque};

use fair::{Gpu, SchedEntity, Virtual};
pub use idle::{Cause, IdleTotals};
use journal::Ring;
pub use journal::{Event, Note, RING, Why};
pub use pace::IDLE;
pub(crate) use settle::{Mask, each};
use tenant::{Phase, Slot, Tenant};
pub use types::{
    Command, GateState, GpuIndex, MAX_GPUS, MS, Pace, Settings, Share, ShareKind, TenantId,
    TenantTotals, Used, Watch,
};
pub use view::{GpuView, TenantView};

/// Shortest single wait for a lease that counts as long, nanoseconds.
pub const LONG_WAIT_NS: u64 = 1_000_000_000;
/// The arbiter has been silent if it acts later than this, nanoseconds; see `tessera_region::layout`.
const ARBITER_STALE_NS: u64 = 1000 * MS;

/// All leases of a node.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    ids: BTreeMap<TenantId, Slot>,
    tenants: Vec<Option<Tenant>>,
    gpus: Vec<Gpu>,
    /// Tenants with several GPUs.
    gangs: Vec<Slot>,
    commands: VecDeque<Command>,
    /// Tenants to be woken.
    rouses: VecDeque<TenantId>,
    /// What happens, while somebody traces it.
    notes: Option<Ring>,
    /// The latest time of any event: time does not go back.
    now: u64,
}

impl Policy {
    /// A policy without tenants.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            ids: BTreeMap::new(),
            tenants: Vec::new(),
            gpus: Vec::new(),
            gangs: Vec::new(),
            commands: VecDeque::new(),
            rouses: VecDeque::new(),
            notes: None,
            now: 0,
        }
    }

    /// Adds a tenant with nothing in flight and closes its gate. A tenant with several GPUs is a gang: it is
    /// granted all or none. GPUs from [`MAX_GPUS`] on are left out; without any GPU the tenant does not
    /// join. A known tenant with the same GPUs gets the new share; with other GPUs it leaves first, and keeps what
    /// it owes: to join again is worth nothing.
    pub fn join(&mut self, now: u64, id: TenantId, gpus: &[GpuIndex], share: Share) {
        let now = self.pass(now);
        let mut own: Vec<GpuIndex> = gpus.to_vec();
        own.retain(|&gpu| usize::from(gpu) < MAX_GPUS);
        own.sort_unstable();
        own.dedup();
        let mut before = None;
        if let Some(&slot) = self.ids.get(&id) {
            if self.tenants[slot].as_ref().is_some_and(|tenant| tenant.gpus == own) {
                self.set_share(now, id, share);
                return;
            }
            before = self.leave_with_debts(now, id);
        }
        let Some(&last) = own.last() else { return };
        let share = sane(share);
        if self.gpus.len() <= usize::from(last) {
            self.gpus.resize_with(usize::from(last) + 1, Gpu::default);
        }
        let slot = self.tenants.iter().position(Option::is_none).unwrap_or(self.tenants.len());
        if slot == self.tenants.len() {
            self.tenants.push(None);
        }
        self.ids.insert(id, slot);
        for &gpu in &own {
            let gpu = usize::from(gpu);
            for i in 0..self.gpus[gpu].leases.len() {
                self.charge(now, self.gpus[gpu].leases[i]);
            }
            let gpu = &mut self.gpus[gpu];
            gpu.update(now, &self.tenants);
            // A newcomer neither owes time nor is owed any.
            let owed = before.as_ref().map_or(0, |(_, owed)| owed / i128::from(share.millis));
            let v = gpu.v + owed;
            gpu.entities.push(SchedEntity { slot, v, deadline: v });
        }
        if own.len() > 1 {
            self.gangs.push(slot);
        }
        let tenant = Tenant::new(now, id, own, share);
        self.tenants[slot] = Some(match before {
            Some((before, _)) => tenant.after(before),
            None => tenant,
        });
        self.find_mixed();
        self.say_closed(id);
    }

    /// Removes a tenant that joins again, charged; what it has had more than those it leaves, on the GPU where that is
    /// most, in virtual time of a share of a thousandth.
    fn leave_with_debts(&mut self, now: u64, id: TenantId) -> Option<(Tenant, Virtual)> {
        let (now, slot) = self.event(now, id)?;
        let tenant = self.tenants[slot].clone()?;
        let gpus: Vec<usize> = settle::each(self.mask_of(slot)).collect();
        let had = |gpu: &usize| self.gpus[*gpu].entity(slot).map_or(0, |entity| entity.v);
        let had: Vec<Virtual> = gpus.iter().map(had).collect();
        self.leave(now, id);
        let ahead = |(gpu, had): (&usize, Virtual)| (had - self.gpus[*gpu].v).max(0);
        let ahead = gpus.iter().zip(had).map(ahead).max().unwrap_or(0);
        let owed = ahead * i128::from(tenant.share.millis);
        Some((tenant, owed))
    }

    /// To be called right after `join` when the arbiter has restarted: the tenant's gate was open, so it may
    /// have work in flight. It drains like any other tenant and is charged until it has.
    pub fn adopt(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let deadline = now.saturating_add(self.settings.drain_most);
        if let Some(tenant) = self.tenants[slot].as_mut().filter(|tenant| !tenant.has_lease()) {
            tenant.phase = Phase::Draining { since: now, deadline };
            // Its processes have yet to connect: their report is late by no fault of theirs.
            tenant.overlap_noted = true;
            tenant.charged_at = now;
            tenant.contends = false;
            for gpu in settle::each(self.mask_of(slot)) {
                self.gpus[gpu].leases.push(slot);
            }
            self.unreserve(slot);
            self.note(now, slot, Note::Closed(Why::Found));
        }
        self.settle(now, self.mask_of(slot));
    }

    /// Removes the tenant. It gets no more commands.
    pub fn leave(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let mask = self.mask_of(slot);
        self.note(now, slot, Note::Gone);
        self.end(now, slot, false);
        self.unreserve(slot);
        for gpu in settle::each(mask) {
            self.gpus[gpu].entities.retain(|entity| entity.slot != slot);
        }
        self.gangs.retain(|&gang| gang != slot);
        self.tenants[slot] = None;
        self.find_mixed();
        self.ids.remove(&id);
        self.commands.retain(|command| command.tenant != id);
        self.rouses.retain(|&rouse| rouse != id);
        self.settle(now, mask);
    }

    /// Changes the share. Time already charged, and GPU time owed, stay as they are.
    pub fn set_share(&mut self, now: u64, id: TenantId, share: Share) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let share = sane(share);
        let Self { tenants, gpus, .. } = self;
        if let Some(tenant) = tenants[slot].as_mut().filter(|tenant| tenant.share != share) {
            for &gpu in &tenant.gpus {
                let gpu = &mut gpus[usize::from(gpu)];
                let v = gpu.v;
                if let Some(entity) = gpu.entity_mut(slot) {
                    let (old, new) = (i128::from(tenant.share.millis), i128::from(share.millis));
                    entity.v = v + (entity.v - v) * old / new;
                    entity.deadline = v + (entity.deadline - v) * old / new;
                }
            }
            if tenant.strict() {
                let burst = tenant.burst();
                tenant.bucket.pass(now, tenant.share.millis, burst, 0);
            } else {
                tenant.bucket = bucket::CapBucket::new(now, share.millis);
            }
            tenant.share = share;
            self.note(now, slot, Note::Share(share));
        }
        self.settle(now, self.mask_of(slot));
    }

    /// A launch waits at the closed gate. That stays true until the next grant.
    pub fn want(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        // The holder has wanted before the grant.
        if tenant.lease().is_none() && !tenant.wanting {
            tenant.wanting = true;
            tenant.since = now;
            tenant.last_active = Some(now);
            tenant.pauses.back(now);
            let (millis, burst) = (tenant.share.millis, tenant.burst());
            tenant.bucket.pass(now, millis, burst, 0);
            // A tenant that still drains has not been idle.
            if now >= tenant.counts_until && !tenant.has_lease() {
                tenant.bucket.forget(millis, burst);
            }
            self.note(now, slot, Note::Waits);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// The tenant had nothing in flight and no launch for a while, while its gate said YIELD.
    pub fn idle(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let lease = self.tenants[slot].as_ref().and_then(Tenant::lease);
        if let Some(lease) = lease.filter(|lease| lease.state == GateState::Yield) {
            self.close_idle(now, slot, lease, now.saturating_sub(lease.idle_ns));
        }
    }

    /// Nothing of the tenant is in flight any more since its gate was closed. `used` is what the tenant
    /// reports of the time since the opening; it moves a cap by a little.
    pub fn drained(&mut self, now: u64, id: TenantId, used: Option<Used>) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let phase = self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        if matches!(phase, Some(Phase::Draining { .. } | Phase::Late { .. })) {
            self.note_used(slot, used);
            self.credit(now, slot, used);
            self.note_handover(now, slot, used);
            self.note_lost(now, slot, used);
            self.end(now, slot, true);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// How long the tenant's work ran since the last call, nanoseconds, as somebody else has measured it; `None` where
    /// nobody can. It counts where the tenant was alone, and decides nothing.
    pub fn measured(&mut self, now: u64, id: TenantId, busy_ns: Option<u64>) {
        if let Some((_, slot)) = self.event(now, id) {
            self.note_measured(slot, busy_ns);
        }
    }

    /// The tenant has not drained yet: the GPU works for it (`true`), or it waits for the host.
    pub fn works(&mut self, now: u64, id: TenantId, works: bool) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let phase = self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        if matches!(phase, Some(Phase::Draining { .. } | Phase::Late { .. })) {
            self.note_drain_notice(now, slot, works);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// The closed tenant stood still until waiting launches were let pass.
    pub fn helped(&mut self, id: TenantId) {
        const MOST: u32 = 8;
        if let Some(tenant) = self.ids.get(&id).and_then(|&slot| self.tenants[slot].as_mut()) {
            tenant.helped = (tenant.helped + 2).min(MOST);
        }
    }

    /// Whether a launch of the tenant waits.
    #[must_use]
    pub fn wants(&self, id: TenantId) -> bool {
        let tenant = self.ids.get(&id).and_then(|&slot| self.tenants[slot].as_ref());
        tenant.is_some_and(|tenant| tenant.wanting)
    }

    /// All processes of the tenant are dead: its lease ends at once, and it wants nothing.
    pub fn gone(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.wanting = false;
        tenant.contends = false;
        // Nobody can tell any more what they did.
        tenant.totals.alone_ns = 0;
        let held = tenant.lease().is_some();
        self.note(now, slot, Note::Gone);
        if held {
            self.say_closed(id);
        }
        if self.tenants[slot].as_ref().is_some_and(Tenant::has_lease) {
            self.end(now, slot, false);
        }
        self.unreserve(slot);
        self.settle(now, self.mask_of(slot));
    }

    /// The time of [`Self::deadline`] has come. Harmless at any other time.
    pub fn tick(&mut self, now: u64) {
        let now = self.pass(now);
        let due = |gpu: &Gpu| gpu.next.is_some_and(|next| next <= now);
        let due = self.gpus.iter().enumerate().filter(|(_, gpu)| due(gpu));
        let mask: Mask = due.fold(0, |mask, (gpu, _)| mask | 1 << gpu);
        if mask != 0 {
            self.settle(now, mask);
        }
    }

    /// When to call [`Self::tick`] next, if no event comes before.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.gpus.iter().filter_map(|gpu| gpu.next).min()
    }

    /// The commands to carry out, in this order; each is returned once.
    pub fn commands(&mut self) -> impl Iterator<Item = Command> + '_ {
        self.commands.drain(..)
    }

    /// Changes the constants, from the next event on.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }
}

/// What all events have in common.
impl Policy {
    /// Time never goes back. If it comes long after the deadline, the arbiter stood still and tenants
    /// rationed themselves: nobody is charged for that time.
    fn pass(&mut self, now: u64) -> u64 {
        self.now = self.now.max(now);
        let silent = self.deadline().map_or(u64::MAX, |at| at.saturating_add(ARBITER_STALE_NS));
        if let Some(stood) = self.now.checked_sub(silent) {
            for tenant in self.tenants.iter_mut().flatten() {
                tenant.charged_at = tenant.charged_at.saturating_add(stood).min(self.now);
            }
            self.gpus.iter_mut().for_each(|gpu| gpu.idle.skip(stood, self.now));
        }
        self.now
    }

    /// The tenant of an event, with all leases on its GPUs charged up to now.
    fn event(&mut self, now: u64, id: TenantId) -> Option<(u64, Slot)> {
        let now = self.pass(now);
        let &slot = self.ids.get(&id)?;
        self.charge_around(now, slot);
        Some((now, slot))
    }

    fn say(&mut self, now: u64, slot: Slot, state: GateState) {
        let pace = self.pace(now, slot, state);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Held(lease) = &mut tenant.phase {
            (lease.state, lease.idle_ns) = (state, pace.idle_ns);
            self.commands.push_back(Command { tenant: tenant.id, state, pace });
        }
    }

    fn say_closed(&mut self, tenant: TenantId) {
        let pace = Pace { idle_ns: IDLE, is_narrow: false };
        self.commands.push_back(Command { tenant, state: GateState::Closed, pace });
    }

    fn unreserve(&mut self, slot: Slot) {
        for gpu in settle::each(self.mask_of(slot)) {
            if self.gpus[gpu].reserved == Some(slot) {
                self.gpus[gpu].reserved = None;
            }
        }
    }

    fn gpus_of(&self, slot: Slot) -> impl Iterator<Item = usize> + '_ {
        let tenant = self.tenants[slot].as_ref();
        tenant.into_iter().flat_map(|tenant| tenant.gpus.iter().map(|&gpu| usize::from(gpu)))
    }

    fn mask_of(&self, slot: Slot) -> Mask {
        self.gpus_of(slot).fold(0, |mask, gpu| mask | 1 << gpu)
    }
}

/// The mean with `newest` in it, which weighs one part of `weight`.
fn moving_mean(mean: u64, newest: u64, weight: u64) -> u64 {
    mean - mean / weight + newest / weight
}

/// A share with a valid divisor.
fn sane(share: Share) -> Share {
    Share { millis: share.millis.clamp(1, 1000), ..share }
}
