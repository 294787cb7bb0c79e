//! The arbiter's policy: who holds a GPU's lease, a pure state machine.
//!
//! Events go in with the time, [`Policy::commands`] come out; after every event, and when
//! [`Policy::deadline`] has come ([`Policy::tick`]), the caller carries the commands out. The caller
//! counts processes and epochs: `drained` here means that all bound processes of the tenant have
//! drained the current closing. Times are nanoseconds of one monotonic clock.
//!
//! Events may come in any order and from any tenant: one that makes no sense now is ignored.
//!
//! | File | What |
//! |---|---|
//! | `fair` | who is next on one GPU: earliest eligible virtual deadline first |
//! | `bucket` | the cap of a strict share |
//! | `gang` | tenants with several GPUs; why they cannot block each other |
//! | `lease` | granting, charging, closing, being late |
//! | `settle` | the decision pass after each event |
//! | `pace` | how long a pause is waited for, how much may be in flight |
//!
//! `docs/compute.md`, "The policy", has the reasons and bounds.

mod bucket;
mod fair;
mod gang;
mod lease;
pub mod model;
mod pace;
mod settle;
mod tenant;
mod types;
mod view;

use std::collections::{BTreeMap, VecDeque};

use fair::{Gpu, Seat};
use settle::Mask;
use tenant::{Phase, Slot, Tenant};
pub use types::{
    Command, GpuIndex, Kind, MAX_GPUS, MS, Pace, Settings, Share, State, TenantId, Used,
};
pub use view::{GpuView, TenantView};

/// A single wait for a lease that counts as long, however much was got, nanoseconds.
pub const LONG_WAIT_NS: u64 = 1_000_000_000;
/// An arbiter that is later than this has been silent, `tessera_region::layout`.
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
    /// The latest time heard of: time does not go back.
    now: u64,
}

impl Policy {
    /// Nobody there yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            ids: BTreeMap::new(),
            tenants: Vec::new(),
            gpus: Vec::new(),
            gangs: Vec::new(),
            commands: VecDeque::new(),
            now: 0,
        }
    }

    /// A tenant with nothing in flight; its gate becomes CLOSED. One with several GPUs is a gang,
    /// granted all or none. GPUs from [`MAX_GPUS`] on are left out; without any it does not join.
    /// A known tenant with the same GPUs gets the share, with other GPUs it leaves first.
    pub fn join(&mut self, now: u64, id: TenantId, gpus: &[GpuIndex], share: Share) {
        let now = self.pass(now);
        let mut own: Vec<GpuIndex> = gpus.to_vec();
        own.retain(|&gpu| usize::from(gpu) < MAX_GPUS);
        own.sort_unstable();
        own.dedup();
        if let Some(&slot) = self.ids.get(&id) {
            if self.tenants[slot].as_ref().is_some_and(|tenant| tenant.gpus == own) {
                self.set_share(now, id, share);
                return;
            }
            self.leave(now, id);
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
            // Owed nothing, owing nothing.
            gpu.seats.push(Seat { slot, v: gpu.v, deadline: gpu.v });
        }
        if own.len() > 1 {
            self.gangs.push(slot);
        }
        self.tenants[slot] = Some(Tenant::new(now, id, own, share, &self.settings));
        self.say_closed(id);
    }

    /// After the arbiter's own restart, right after `join`: the tenant's gate was open, so it may
    /// have work in flight. It drains like any other, and is charged until it has.
    pub fn adopt(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let deadline = now.saturating_add(self.settings.drain_most);
        if let Some(tenant) = self.tenants[slot].as_mut().filter(|tenant| !tenant.has_lease()) {
            tenant.phase = Phase::Draining { since: now, deadline };
            tenant.charged_at = now;
            tenant.contends = false;
            for gpu in settle::each(self.mask_of(slot)) {
                self.gpus[gpu].leases.push(slot);
            }
            self.unreserve(slot);
        }
        self.settle(now, self.mask_of(slot));
    }

    /// The tenant is no more. No command is given for it any more.
    pub fn leave(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let mask = self.mask_of(slot);
        self.end(now, slot, false);
        self.unreserve(slot);
        for gpu in settle::each(mask) {
            self.gpus[gpu].seats.retain(|seat| seat.slot != slot);
        }
        self.gangs.retain(|&gang| gang != slot);
        self.tenants[slot] = None;
        self.ids.remove(&id);
        self.commands.retain(|command| command.tenant != id);
        self.settle(now, mask);
    }

    /// Another share; what has been charged stays as it is, and what is owed in GPU time too.
    pub fn set_share(&mut self, now: u64, id: TenantId, share: Share) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let share = sane(share);
        let Self { tenants, gpus, settings, .. } = self;
        if let Some(tenant) = tenants[slot].as_mut().filter(|tenant| tenant.share != share) {
            for &gpu in &tenant.gpus {
                let gpu = &mut gpus[usize::from(gpu)];
                let v = gpu.v;
                if let Some(seat) = gpu.seat_mut(slot) {
                    let (old, new) = (i128::from(tenant.share.millis), i128::from(share.millis));
                    seat.v = v + (seat.v - v) * old / new;
                    seat.deadline = v + (seat.deadline - v) * old / new;
                }
            }
            if tenant.strict() {
                tenant.bucket.pass(now, tenant.share.millis, settings.burst, 0);
            } else {
                tenant.bucket = bucket::Bucket::new(now, share.millis, settings.burst);
            }
            tenant.share = share;
        }
        self.settle(now, self.mask_of(slot));
    }

    /// A launch waits at the closed gate. Stays so until the next grant.
    pub fn want(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        // Who holds the lease has wanted before it was granted.
        if tenant.lease().is_none() && !tenant.wanting {
            tenant.wanting = true;
            tenant.since = now;
            tenant.last_active = Some(now);
            tenant.rhythm.back(now, &self.settings);
            let (millis, burst) = (tenant.share.millis, self.settings.burst);
            tenant.bucket.pass(now, millis, burst, 0);
            // Who still drains has not been idle.
            if now >= tenant.counts_until && !tenant.has_lease() {
                tenant.bucket.forget(millis, burst);
            }
            self.settle(now, self.mask_of(slot));
        }
    }

    /// Nothing in flight and no launch for a while, while the gate says YIELD.
    pub fn idle(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Some(lease) = tenant.lease()
            && lease.state == State::Yield
        {
            let begun = (lease.idle_ns <= self.settings.idle).then_some(lease.since);
            tenant.rhythm.idle(begun, now.saturating_sub(lease.idle_ns));
            self.close(now, slot);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// Nothing of the tenant is in flight any more since its gate was closed. `used`: what was since it
    /// was opened, if the tenant says so; that moves a cap, by a little.
    pub fn drained(&mut self, now: u64, id: TenantId, used: Option<Used>) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let phase = self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        if matches!(phase, Some(Phase::Draining { .. } | Phase::Late { .. })) {
            self.credit(now, slot, used);
            self.end(now, slot, true);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// Not drained yet: the GPU works for it (`true`), or waits for something that the host is to do.
    pub fn works(&mut self, now: u64, id: TenantId, works: bool) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let phase = self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        if matches!(phase, Some(Phase::Draining { .. } | Phase::Late { .. })) {
            self.hear_word(now, slot, works);
            self.settle(now, self.mask_of(slot));
        }
    }

    /// The tenant, closed, stood still until launches that waited were let pass.
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

    /// All its processes are dead: its lease ends at once, and it wants nothing.
    pub fn gone(&mut self, now: u64, id: TenantId) {
        let Some((now, slot)) = self.event(now, id) else { return };
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.wanting = false;
        tenant.contends = false;
        let held = tenant.lease().is_some();
        if held {
            self.say_closed(id);
        }
        if self.tenants[slot].as_ref().is_some_and(Tenant::has_lease) {
            self.end(now, slot, false);
        }
        self.unreserve(slot);
        self.settle(now, self.mask_of(slot));
    }

    /// Time has come to [`Self::deadline`], or passed. Harmless at any other time.
    pub fn tick(&mut self, now: u64) {
        let now = self.pass(now);
        let due = |gpu: &Gpu| gpu.next.is_some_and(|next| next <= now);
        let due = self.gpus.iter().enumerate().filter(|(_, gpu)| due(gpu));
        let mask: Mask = due.fold(0, |mask, (gpu, _)| mask | 1 << gpu);
        if mask != 0 {
            self.settle(now, mask);
        }
    }

    /// When to call [`Self::tick`] next, if nothing else happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.gpus.iter().filter_map(|gpu| gpu.next).min()
    }

    /// What is to be done, in this order; each is given once.
    pub fn commands(&mut self) -> impl Iterator<Item = Command> + '_ {
        self.commands.drain(..)
    }

    /// Goes on with other constants: they count from the next event on.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// The constants.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// What the events have in common.
impl Policy {
    /// Time never goes back. And if it comes long after the deadline the arbiter stood still, and
    /// tenants rationed themselves: nobody is charged for that.
    fn pass(&mut self, now: u64) -> u64 {
        self.now = self.now.max(now);
        let silent = self.deadline().map_or(u64::MAX, |at| at.saturating_add(ARBITER_STALE_NS));
        if let Some(stood) = self.now.checked_sub(silent) {
            for tenant in self.tenants.iter_mut().flatten() {
                tenant.charged_at = tenant.charged_at.saturating_add(stood).min(self.now);
            }
        }
        self.now
    }

    /// The tenant of an event, with all leases around it charged up to now.
    fn event(&mut self, now: u64, id: TenantId) -> Option<(u64, Slot)> {
        let now = self.pass(now);
        let &slot = self.ids.get(&id)?;
        self.charge_around(now, slot);
        Some((now, slot))
    }

    fn say(&mut self, now: u64, slot: Slot, state: State) {
        let pace = self.pace(now, slot, state);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Held(lease) = &mut tenant.phase {
            (lease.state, lease.idle_ns) = (state, pace.idle_ns);
            self.commands.push_back(Command { tenant: tenant.id, state, pace });
        }
    }

    fn say_closed(&mut self, tenant: TenantId) {
        let pace = Pace { idle_ns: self.settings.idle, is_narrow: false };
        self.commands.push_back(Command { tenant, state: State::Closed, pace });
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

/// A share that can be divided by.
fn sane(share: Share) -> Share {
    Share { millis: share.millis.clamp(1, 1000), ..share }
}
