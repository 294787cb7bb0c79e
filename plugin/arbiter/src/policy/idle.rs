//! Time in which a GPU was idle while somebody wanted it, and why, as far as the policy's events tell.

use super::Policy;
use super::fair::{Gpu, SchedEntity, contends};
use super::journal::Note;
use super::lease::HANDOVER_MOST;
use super::tenant::{DrainNotice, Phase, Slot};
use super::types::{GpuIndex, ShareKind, Used};
use strum::{IntoStaticStr, VariantArray};

/// Why a GPU was idle while somebody wanted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Cause {
    /// A lease that others ended: until its first launch, and from its last completion until that was reported.
    HandOver,
    /// The same of a lease whose holder was idle: until it said so.
    IdleReport,
    /// What of a hand-over is longer than waking threads explains: the holder did not launch and did not say that it
    /// was idle, as a container that is throttled.
    NoCpu,
    /// A late tenant's work waits for the host, and the tenant waits for its next lease.
    Drain,
    /// Only capped tenants wait, and their buckets fill.
    Bucket,
    /// It is kept for a tenant whose other GPUs are not free yet.
    Gang,
}

/// Nanoseconds for each of [`Cause::VARIANTS`].
pub type IdleTotals = [u64; Cause::VARIANTS.len()];

/// One GPU's account.
#[derive(Clone, Debug, Default)]
pub(super) struct IdleAccount {
    /// Up to when it is kept, and why the GPU has been idle since then.
    at: u64,
    cause: Option<Cause>,
    totals: IdleTotals,
}

impl IdleAccount {
    /// Charges the time up to `now`, and notes why the GPU is idle from then on. Returns what has been charged.
    fn pass(&mut self, now: u64, cause: Option<Cause>) -> Option<(Cause, u64)> {
        let ns = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        let ended = std::mem::replace(&mut self.cause, cause).filter(|_| ns > 0)?;
        self.totals[ended as usize] += ns;
        Some((ended, ns))
    }

    /// Nobody is charged for a time in which the arbiter stood still.
    pub(super) fn skip(&mut self, stood: u64, now: u64) {
        self.at = self.at.saturating_add(stood).min(now);
    }
}

impl Policy {
    /// Nanoseconds that a GPU was idle while somebody wanted it, by cause, since [`Policy::set_idle_totals`].
    #[must_use]
    pub fn idle_totals(&self, now: u64, gpu: GpuIndex) -> IdleTotals {
        let Some(gpu) = self.gpus.get(usize::from(gpu)) else { return IdleTotals::default() };
        let mut account = gpu.idle.clone();
        account.pass(now, None);
        account.totals
    }

    /// Goes on from these totals: those of a GPU that was here before, or none.
    pub fn set_idle_totals(&mut self, gpu: GpuIndex, totals: IdleTotals) {
        let gpu = usize::from(gpu);
        if self.gpus.len() <= gpu {
            self.gpus.resize_with(gpu + 1, Gpu::default);
        }
        self.gpus[gpu].idle.totals = totals;
    }

    /// Notes all intervals that still last.
    pub(super) fn pass_idle(&mut self, now: u64) {
        let now = self.pass(now);
        (0..self.gpus.len()).for_each(|gpu| self.note_idle(now, gpu));
    }

    /// After each event of a GPU: why it is idle from now on, if it is.
    pub(super) fn note_idle(&mut self, now: u64, gpu: usize) {
        let cause = self.idle_cause(now, gpu);
        if let Some((cause, ns)) = self.gpus[gpu].idle.pass(now, cause) {
            self.note_gpu(now, gpu, Note::Idle { cause, ns });
        }
    }

    fn idle_cause(&self, now: u64, gpu: usize) -> Option<Cause> {
        let gpu = &self.gpus[gpu];
        // Where somebody has it, `drained` tells afterwards; what a late tenant has in flight may run.
        let is_out = |&slot: &Slot| {
            self.tenants[slot].as_ref().is_none_or(|tenant| {
                matches!(tenant.phase, Phase::Late { .. }) && tenant.word == DrainNotice::Waits
            })
        };
        if !gpu.leases.iter().all(is_out) {
            return None;
        }
        let mut found = None;
        for SchedEntity { slot, .. } in &gpu.entities {
            let Some(tenant) = self.tenants[*slot].as_ref().filter(|tenant| tenant.waits()) else {
                continue;
            };
            if contends(&self.tenants, *slot) {
                return Some(Cause::Gang);
            }
            let saves = tenant.share.kind == ShareKind::Strict && !gpu.leases.contains(slot);
            if saves && tenant.ready_at() > now {
                found.get_or_insert(Cause::Bucket);
            } else {
                found = Some(Cause::Drain);
            }
        }
        found
    }

    /// Charges what a lease that has drained in time had without work, by its tenant's report and by its words, if another
    /// tenant waited meanwhile. To be called before the lease ends.
    pub(super) fn note_lost(&mut self, now: u64, slot: Slot, used: Option<Used>) {
        let Some(tenant) = &self.tenants[slot] else { return };
        let (Phase::Draining { .. }, Some(used)) = (tenant.phase, used) else { return };
        let lasted = now.saturating_sub(tenant.granted_at);
        let (granted_at, lost) = (tenant.granted_at, lasted.saturating_sub(used.ns));
        let (was_idle, stood) = (tenant.pauses.is_idle(), tenant.stood.all_ns());
        for gpu in super::each(self.mask_of(slot)) {
            let others = self.gpus[gpu].entities.iter().map(|entity| entity.slot);
            let waits =
                |other: Slot| (other != slot && contends(&self.tenants, other)).then_some(other);
            let since = |other: Slot| self.tenants[other].as_ref().map(|tenant| tenant.since);
            let Some(since) = others.filter_map(waits).filter_map(since).min() else { continue };
            let waited = now.saturating_sub(since.max(granted_at));
            let woken = if was_idle { 0 } else { lost.min(HANDOVER_MOST).min(waited) };
            let lost = lost.max(stood).min(waited);
            let rest = if was_idle { Cause::IdleReport } else { Cause::NoCpu };
            let parts = [(now - woken, rest, lost - woken), (now, Cause::HandOver, woken)];
            for (at, cause, ns) in parts.into_iter().filter(|(.., ns)| *ns > 0) {
                self.gpus[gpu].idle.totals[cause as usize] += ns;
                self.note_gpu(at, gpu, Note::Idle { cause, ns });
            }
        }
    }
}
