//! A lease's life: granted, charged, closed, late, over.

use super::Policy;
use super::fair::cost;
use super::tenant::{Lease, Phase, Slot};
use super::types::{Command, MS};

/// A lease is charged for at most so long after its closing: what a stopped process or a kernel
/// without end holds on to is not known, and a debt without bound would be a sentence.
const LATE_CHARGED: u64 = 1000 * MS;
/// A tenant counts as competing for so long after its lease: the next want may be on its way.
const COUNTS_AFTER: u64 = 5 * MS;
/// Weight of the newest drain in a GPU's mean, as a divisor.
const DRAIN_WEIGHT: u64 = 8;

impl Policy {
    /// Charges everybody who has a lease on `slot`'s GPUs up to `now`. Before anything changes.
    pub(super) fn charge_around(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &self.tenants[slot] else { return };
        for i in 0..tenant.gpus.len() {
            let Some(tenant) = &self.tenants[slot] else { return };
            let gpu = usize::from(tenant.gpus[i]);
            for j in 0..self.gpus[gpu].leases.len() {
                self.charge(now, self.gpus[gpu].leases[j]);
            }
        }
    }

    /// Wall time since the last charge. In an OVERLAP who is late pays all of it, and who holds the
    /// lease pays its part of the GPU: the hardware serves both, and only one is to blame.
    pub(super) fn charge(&mut self, now: u64, slot: Slot) {
        let Self { tenants, gpus, settings, .. } = self;
        let Some(tenant) = &mut tenants[slot] else { return };
        let (late, end) = match tenant.phase {
            Phase::Out => return,
            Phase::Late { since } => (true, now.min(since.saturating_add(LATE_CHARGED))),
            _ => (false, now),
        };
        let passed = end.saturating_sub(tenant.charged_at);
        tenant.charged_at = tenant.charged_at.max(now);
        let mut used = 0;
        for &gpu in &tenant.gpus {
            let gpu = &mut gpus[usize::from(gpu)];
            let busy = if late { 1 } else { gpu.leases.len().max(1) as u64 };
            if let Some(seat) = gpu.seat_mut(slot) {
                seat.v += cost(passed / busy, tenant.share.millis);
            }
            used = used.max(passed / busy);
        }
        tenant.leased_ns += used;
        tenant.lease_ns += used;
        if tenant.strict() {
            tenant.bucket.pass(now, tenant.share.millis, settings.burst, used);
        }
    }

    /// Grants all of `slot`'s GPUs, which are free.
    pub(super) fn grant(&mut self, now: u64, slot: Slot) {
        self.charge_around(now, slot);
        let state = self.state_for(now, slot);
        let quantum = self.quantum_of(slot);
        let pace = self.pace(now, slot, state);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.contends = false;
        tenant.wanting = false;
        tenant.rhythm.granted();
        tenant.lease_ns = 0;
        tenant.waited(now.saturating_sub(tenant.since));
        tenant.since = now;
        tenant.leases += 1;
        tenant.charged_at = now;
        tenant.bucket.wait(now, tenant.share.millis, self.settings.burst);
        let until = now.saturating_add(quantum);
        let idle_ns = pace.idle_ns;
        tenant.phase = Phase::Held(Lease { since: now, until, preempt: None, state, idle_ns });
        tenant.switched = false;
        for &gpu in &tenant.gpus {
            let gpu = &mut self.gpus[usize::from(gpu)];
            gpu.leases.push(slot);
            gpu.reserved = None;
            tenant.switched |= gpu.last.replace(slot) != Some(slot);
            if let Some(seat) = gpu.seat_mut(slot) {
                seat.deadline = seat.v + cost(quantum, tenant.share.millis);
            }
        }
        let command = Command { tenant: tenant.id, state, pace };
        self.commands.push_back(command);
    }

    /// Another quantum for a holder who is still first.
    pub(super) fn renew(&mut self, now: u64, slot: Slot) {
        let quantum = self.quantum_of(slot);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Held(lease) = &mut tenant.phase {
            lease.until = now.saturating_add(quantum);
            lease.preempt = None;
        }
        // Who has waited longer comes first among equals.
        tenant.since = now;
        for &gpu in &tenant.gpus {
            if let Some(seat) = self.gpus[usize::from(gpu)].seat_mut(slot) {
                seat.deadline = seat.v + cost(quantum, tenant.share.millis);
            }
        }
    }

    /// Says CLOSED; the lease ends when all has drained.
    pub(super) fn close(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let deadline = now.saturating_add(tenant.patience(&self.settings));
        tenant.phase = Phase::Draining { since: now, deadline };
        let id = tenant.id;
        self.say_closed(id);
    }

    /// The drain has passed its deadline: the lease is over for others, but goes on being charged.
    pub(super) fn give_up(&mut self, slot: Slot) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Draining { since, .. } = tenant.phase {
            tenant.phase = Phase::Late { since };
            tenant.overlaps += 1;
        }
    }

    /// Gives the cap back what of the lease it had no work: while the tenant's thread woke up, the GPU
    /// changed over, and `drained` was on its way. That is some 150 µs of each lease, which is several
    /// percent of a short one. The tenant's word counts, but only so far: one that lies passes its cap
    /// by a sixteenth at most.
    pub(super) fn credit(&mut self, slot: Slot, used_ns: Option<u64>) {
        let Some(tenant) = self.tenants[slot].as_mut().filter(|tenant| tenant.strict()) else {
            return;
        };
        let unused = tenant.lease_ns.saturating_sub(used_ns.unwrap_or(u64::MAX));
        let switch = if tenant.switched { self.settings.switch } else { 0 };
        let most = self.settings.slack.min(tenant.lease_ns / 16);
        tenant.bucket.refund(unused.saturating_add(switch).min(most));
    }

    /// The lease is over; all is charged already.
    pub(super) fn end(&mut self, now: u64, slot: Slot, drained: bool) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let (true, Phase::Draining { since, .. } | Phase::Late { since }) =
            (drained, tenant.phase)
        {
            let took = now.saturating_sub(since);
            tenant.drained_in(took, &self.settings);
            tenant.rhythm.drained(since, took, &self.settings);
            for &gpu in &tenant.gpus {
                let mean = &mut self.gpus[usize::from(gpu)].drain;
                let took = took.min(self.settings.drain_most);
                *mean = *mean - *mean / DRAIN_WEIGHT + took / DRAIN_WEIGHT;
            }
        }
        tenant.phase = Phase::Out;
        tenant.last_active = Some(now);
        tenant.counts_until = now.saturating_add(COUNTS_AFTER);
        // A launch that has waited since the closing waits for the next lease since now.
        tenant.since = now;
        for &gpu in &tenant.gpus {
            let gpu = &mut self.gpus[usize::from(gpu)];
            gpu.leases.retain(|&other| other != slot);
        }
        if tenant.gang() {
            self.forget_lag(now, slot);
        }
    }

    /// What a gang is owed on a GPU where it waited for another of its GPUs is not owed by those who
    /// have that GPU alone.
    fn forget_lag(&mut self, now: u64, slot: Slot) {
        let Self { tenants, gpus, settings, .. } = self;
        let Some(tenant) = &tenants[slot] else { return };
        for &gpu in &tenant.gpus {
            gpus[usize::from(gpu)].wake(now, slot, settings.credit, tenants);
        }
    }

    /// The quantum of a lease of `slot`: the shortest of its GPUs.
    pub(super) fn quantum_of(&self, slot: Slot) -> u64 {
        let Some(tenant) = &self.tenants[slot] else { return self.settings.quantum };
        let quantum = |&gpu: &u8| {
            let gpu = &self.gpus[usize::from(gpu)];
            gpu.quantum(gpu.contenders(&self.tenants), &self.settings)
        };
        tenant.gpus.iter().map(quantum).min().unwrap_or(self.settings.quantum)
    }
}
