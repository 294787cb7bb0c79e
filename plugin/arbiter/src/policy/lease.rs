//! The life of a lease: granted, charged, closed, late, ended.

use super::fair::cost;
use super::journal::{Note, Why};
use super::tenant::{DrainNotice, Lease, Phase, Slot, Stood, Tenant};
use super::types::{Command, MS, Used};
use super::{Policy, moving_mean};

/// How long after its closing a late and silent tenant is charged: what a stopped process had in flight is
/// bounded, and the process cannot report its end.
const SILENT_CHARGED: u64 = 1000 * MS;
/// How long a report counts that the GPU works for a late tenant; tenants repeat it every 10 ms.
const WORD_COUNTS: u64 = 30 * MS;
/// How long after its lease a tenant counts as competing: its next want may be on its way.
const COUNTS_AFTER: u64 = 5 * MS;
/// What a change of the GPU to another tenant takes, which is not charged to a cap.
const SWITCH: u64 = 50_000;
/// The largest part of the time charged to a cap that a tenant's report can give back, as a divisor.
const BELIEVED: u64 = 16;
/// Weight of the newest drain in a GPU's mean, as a divisor.
const DRAIN_WEIGHT: u64 = 8;
/// The same of the newest hand-over.
const HANDOVER_WEIGHT: u64 = 16;
/// A hand-over counts for no more than this: one thread that woke very late, or one report of no use, does
/// not make leases as long as they may be.
pub(super) const HANDOVER_MOST: u64 = 4 * MS;

impl Policy {
    /// Charges every tenant with a lease on `slot`'s GPUs up to `now`. To be called before anything changes.
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

    /// Charges the time since the last charge. The holder pays for all of it, except the parts of late
    /// tenants that report that the GPU works for them: these pay for their parts. A late tenant that is
    /// stopped, waits for the host or is silent takes nothing from others.
    pub(super) fn charge(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &self.tenants[slot] else { return };
        let from = tenant.charged_at;
        let end = match (tenant.phase, tenant.word) {
            (Phase::Out, _) => return,
            (Phase::Late { .. }, DrainNotice::Works { until }) => now.min(until),
            (Phase::Late { .. }, DrainNotice::Waits) => from,
            (Phase::Late { since }, DrainNotice::None) => {
                now.min(since.saturating_add(SILENT_CHARGED))
            }
            _ => now,
        };
        let mut used = 0;
        for i in 0..tenant.gpus.len() {
            let Some(tenant) = &self.tenants[slot] else { return };
            let (gpu, millis) = (usize::from(tenant.gpus[i]), tenant.share.millis);
            let part = self.part_of(gpu, slot, from, end);
            if let Some(entity) = self.gpus[gpu].entity_mut(slot) {
                entity.v += cost(part, millis);
            }
            used = used.max(part);
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.charged_at = from.max(now);
        tenant.totals.leased_ns += used;
        if tenant.is_alone() {
            tenant.lease_alone_ns += used;
            tenant.totals.alone_ns += used;
        }
        tenant.lease_ns += used;
        if tenant.strict() {
            let burst = tenant.burst();
            tenant.bucket.pass(now, tenant.share.millis, burst, used);
        }
    }

    /// The part of the time from `from` to `end` in which a GPU could work for `slot`, if it served it and
    /// the other tenants with work alike.
    fn part_of(&self, gpu: usize, slot: Slot, from: u64, end: u64) -> u64 {
        let others = || {
            let others = self.gpus[gpu].leases.iter().filter(|&&other| other != slot);
            others.filter_map(|&other| self.tenants[other].as_ref())
        };
        let late = self.tenants[slot].as_ref().is_some_and(|tenant| tenant.works_until() > 0);
        // A tenant that is not late pays in full for others that are not either: there are none but by
        // mistake.
        let holds = |tenant: &&Tenant| late && !matches!(tenant.phase, Phase::Late { .. });
        let beside = 1 + others().filter(holds).count() as u64;
        let (mut at, mut part) = (from, 0);
        while at < end {
            let working = others().map(Tenant::works_until).filter(|&until| until > at);
            let next = working.clone().min().unwrap_or(end).min(end);
            part += (next - at) / (beside + working.count() as u64);
            at = next;
        }
        part
    }

    /// A closed tenant that has not drained reports whether the GPU works for it. Where it does not, no
    /// tenant waits for the drain.
    pub(super) fn note_drain_notice(&mut self, now: u64, slot: Slot, works: bool) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.word = match works {
            true => DrainNotice::Works { until: now.saturating_add(WORD_COUNTS) },
            false => DrainNotice::Waits,
        };
        if !works && matches!(tenant.phase, Phase::Draining { .. }) {
            self.give_up(now, slot);
        }
    }

    /// Grants all of `slot`'s GPUs, which are free. A late tenant's lease takes over what it has in flight
    /// of the last one, and the drain at its end covers both.
    pub(super) fn grant(&mut self, now: u64, slot: Slot) {
        self.charge_around(now, slot);
        self.note_overlaps(slot);
        let state = self.state_for(now, slot);
        let quantum = self.quantum_of(slot);
        let pace = self.pace(now, slot, state);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        tenant.contends = false;
        tenant.wanting = false;
        tenant.awake = false;
        tenant.late_leases += u32::from(matches!(tenant.phase, Phase::Late { .. }));
        tenant.pauses.granted();
        tenant.lease_ns = 0;
        tenant.lease_alone_ns = 0;
        tenant.granted_at = now;
        tenant.waited(now.saturating_sub(tenant.since));
        tenant.since = now;
        tenant.totals.leases += 1;
        tenant.charged_at = now;
        tenant.bucket.wait(now, tenant.share.millis);
        let until = now.saturating_add(quantum);
        let idle_ns = pace.idle_ns;
        tenant.phase = Phase::Held(Lease { since: now, until, preempt: None, state, idle_ns });
        tenant.switched = false;
        tenant.stood = Stood::default();
        for &gpu in &tenant.gpus {
            let gpu = &mut self.gpus[usize::from(gpu)];
            if !gpu.leases.contains(&slot) {
                gpu.leases.push(slot);
            }
            gpu.reserved = None;
            tenant.switched |= gpu.last.replace(slot) != Some(slot);
            if let Some(entity) = gpu.entity_mut(slot) {
                entity.deadline = entity.v + cost(quantum, tenant.share.millis);
            }
        }
        let command = Command { tenant: tenant.id, state, pace };
        self.commands.push_back(command);
        self.note(now, slot, Note::Granted(state));
    }

    /// Gives a holder that is still first another quantum.
    pub(super) fn renew(&mut self, now: u64, slot: Slot) {
        self.rouse_sleepers(slot);
        let quantum = self.quantum_of(slot);
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Held(lease) = &mut tenant.phase {
            lease.until = now.saturating_add(quantum);
            lease.preempt = None;
        }
        // Among equals the tenant that has waited longer comes first.
        tenant.since = now;
        for &gpu in &tenant.gpus {
            if let Some(entity) = self.gpus[usize::from(gpu)].entity_mut(slot) {
                entity.deadline = entity.v + cost(quantum, tenant.share.millis);
            }
        }
    }

    /// Closes the gate; the lease ends when everything has drained.
    pub(super) fn close(&mut self, now: u64, slot: Slot, why: Why) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let deadline = now.saturating_add(tenant.patience(&self.settings));
        tenant.phase = Phase::Draining { since: now, deadline };
        tenant.word = DrainNotice::None;
        tenant.overlap_noted = false;
        if why != Why::Idle {
            tenant.pauses.interrupted(tenant.lease_ns);
        }
        let id = tenant.id;
        self.say_closed(id);
        self.note(now, slot, Note::Closed(why));
        let next = self.successor_of(slot);
        next.into_iter().for_each(|next| self.rouse(next));
    }

    /// Closes the gate of a tenant that has been idle since `since`.
    pub(super) fn close_idle(&mut self, now: u64, slot: Slot, lease: Lease, since: u64) {
        if let Some(tenant) = &mut self.tenants[slot] {
            let are_waited_for = lease.waits_for_pauses();
            tenant.pauses.idle(since, tenant.lease_ns, are_waited_for);
        }
        self.close(now, slot, Why::Idle);
        self.settle(now, self.mask_of(slot));
    }

    /// The drain has passed its deadline: the lease has ended for others, and is still charged.
    pub(super) fn give_up(&mut self, now: u64, slot: Slot) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let Phase::Draining { since, .. } = tenant.phase {
            tenant.phase = Phase::Late { since };
            // A launch that has waited since the closing waits for the next lease since now.
            tenant.since = now;
            self.note(now, slot, Note::Late);
        }
    }

    /// Notes that `slot` gets a lease beside tenants that drain late. A late drain that holds up no tenant is
    /// no overlap, and no tenant runs beside one that waits for the host.
    fn note_overlaps(&mut self, slot: Slot) {
        let Some(tenant) = &self.tenants[slot] else { return };
        for i in 0..tenant.gpus.len() {
            let Some(tenant) = &self.tenants[slot] else { return };
            let gpu = usize::from(tenant.gpus[i]);
            for &other in self.gpus[gpu].leases.iter().filter(|&&other| other != slot) {
                let Some(late) = &mut self.tenants[other] else { continue };
                let runs = matches!(late.phase, Phase::Late { .. });
                if runs && late.word != DrainNotice::Waits && !late.overlap_noted {
                    late.overlap_noted = true;
                    late.totals.overlaps += 1;
                }
            }
        }
    }

    /// Gives the part of the lease without work back to the cap: while the tenant's thread woke up, the GPU
    /// changed over to it or among its processes, and `drained` was on its way. That is some 150 µs of each
    /// lease (several percent of a short one), and 1 ms with many processes. The tenant's report is limited:
    /// a lie passes the cap by a sixteenth at most.
    pub(super) fn credit(&mut self, now: u64, slot: Slot, used: Option<Used>) {
        let Some(tenant) = self.tenants[slot].as_mut().filter(|tenant| tenant.strict()) else {
            return;
        };
        let lasted = now.saturating_sub(tenant.granted_at).max(1);
        // Beside a late tenant the lease cost less than it lasted.
        let lease_ns = tenant.lease_ns;
        let charged = |ns: u64| {
            let part = u128::from(lease_ns) * u128::from(ns) / u128::from(lasted);
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let unused = lasted.saturating_sub(used.map_or(u64::MAX, |used| used.ns));
        let processes = used.map_or(0, |used| used.processes);
        let changes = u64::from(tenant.switched) + tenant.changes(now, processes);
        let wanted = unused.saturating_add(changes.saturating_mul(SWITCH));
        // A lease whose threads woke late may have what others left.
        let allowed = tenant.slack_ns.saturating_add(lease_ns / BELIEVED).min(self.settings.slack);
        let given = charged(wanted).min(allowed);
        tenant.slack_ns = allowed - given;
        tenant.bucket.refund(given);
    }

    /// Notes what a lease that has drained lost to waking threads: until the tenant's first launch, and from
    /// its last completion to this report. A tenant's own pauses are no hand-over: not where it idled.
    pub(super) fn note_handover(&mut self, now: u64, slot: Slot, used: Option<Used>) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let Some(used) = used.filter(|_| !tenant.pauses.is_idle()) else { return };
        let lost = now.saturating_sub(tenant.granted_at).saturating_sub(used.ns).min(HANDOVER_MOST);
        tenant.handover = moving_mean(tenant.handover, lost, HANDOVER_WEIGHT);
        // Alone it was given to nobody.
        for &gpu in tenant.gpus.iter().filter(|_| tenant.switched) {
            let mean = &mut self.gpus[usize::from(gpu)].handover;
            *mean = moving_mean(*mean, lost, HANDOVER_WEIGHT);
        }
    }

    /// Adds what the tenant reports of a lease that has drained to what it used. Its report has its pauses where
    /// nobody else wanted the GPU: where that is most of the lease, the lease is left to be measured.
    pub(super) fn note_used(&mut self, slot: Slot, used: Option<Used>) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let (lease_ns, alone_ns) = (tenant.lease_ns, tenant.lease_alone_ns);
        let totals = &mut tenant.totals;
        if alone_ns * 2 > lease_ns {
            totals.alone_ns += lease_ns - alone_ns;
            return;
        }
        totals.alone_ns = totals.alone_ns.saturating_sub(alone_ns);
        if let Some(used) = used {
            totals.used_ns += used.ns.min(lease_ns);
            totals.measured_ns = (totals.measured_ns + lease_ns).min(totals.leased_ns);
        }
    }

    /// Adds what was measured from outside, of all its work, since the last measurement: the part that no report has
    /// told belongs to the time in which it was alone. `None`: nothing is known of that time.
    pub(super) fn note_measured(&mut self, slot: Slot, busy_ns: Option<u64>) {
        let Some(tenant) = &mut self.tenants[slot] else { return };
        let alone_ns = std::mem::take(&mut tenant.totals.alone_ns);
        if let Some(busy_ns) = busy_ns {
            let told = tenant.totals.used_ns - tenant.used_then;
            tenant.totals.used_ns += busy_ns.saturating_sub(told).min(alone_ns);
            tenant.totals.measured_ns += alone_ns;
        }
        tenant.used_then = tenant.totals.used_ns;
    }

    /// Ends the lease; everything is charged already.
    pub(super) fn end(&mut self, now: u64, slot: Slot, drained: bool) {
        if self.tenants[slot].as_ref().is_some_and(Tenant::has_lease) {
            self.note(now, slot, Note::Ended);
        }
        let Some(tenant) = &mut self.tenants[slot] else { return };
        if let (true, Phase::Draining { since, .. } | Phase::Late { since }) =
            (drained, tenant.phase)
        {
            let took = now.saturating_sub(since);
            // How long others waited for it: beside a late tenant they were let in at its deadline, beside a
            // stopped one or one that waits for the host at once.
            let held_up = match tenant.phase {
                Phase::Draining { .. } => Some(took),
                _ if tenant.works_until() >= now => Some(tenant.patience(&self.settings)),
                _ => None,
            };
            tenant.drained_in(took, &self.settings);
            tenant.pauses.drained(since, took);
            if let Some(held_up) = held_up {
                for &gpu in &tenant.gpus {
                    let mean = &mut self.gpus[usize::from(gpu)].drain;
                    *mean = moving_mean(*mean, held_up, DRAIN_WEIGHT);
                }
            }
        }
        tenant.phase = Phase::Out;
        tenant.late_leases = 0;
        tenant.helped = tenant.helped.saturating_sub(1);
        tenant.last_active = Some(now);
        tenant.counts_until = now.saturating_add(COUNTS_AFTER);
        // A launch that has waited since the closing waits for the next lease since now.
        tenant.since = now;
        for &gpu in &tenant.gpus {
            let gpu = &mut self.gpus[usize::from(gpu)];
            gpu.leases.retain(|&other| other != slot);
        }
        if tenant.is_mixed {
            self.forget_lag(now, slot);
        }
    }

    /// Time that a gang is owed on one GPU because it waited for another is not owed by tenants that have
    /// that GPU alone.
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
        // Closing a tenant that cannot drain by itself costs more than closing others.
        let whole = tenant.pauses.whole_burst(&self.settings);
        let least = if tenant.is_tied() { self.settings.quantum_most } else { whole };
        let quantum = |&gpu: &u8| {
            self.gpus[usize::from(gpu)].quantum_of(least, &self.tenants, &self.settings)
        };
        tenant.gpus.iter().map(quantum).min().unwrap_or(self.settings.quantum)
    }
}
