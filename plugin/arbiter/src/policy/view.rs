//! What the policy shows of itself, for status and demo.

use super::Policy;
use super::tenant::{Phase, Slot};
use super::types::{GpuIndex, Share, State, TenantId};

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuView {
    /// Which.
    pub gpu: GpuIndex,
    /// Who holds the lease or still drains it; late ones are not counted.
    pub holder: Option<TenantId>,
    /// Who drains too late and keeps the GPU beside the holder.
    pub late: Vec<TenantId>,
    /// How many wait for the lease.
    pub waiting: usize,
    /// Length of a lease now, nanoseconds.
    pub quantum: u64,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Who.
    pub tenant: TenantId,
    /// Its GPUs.
    pub gpus: Vec<GpuIndex>,
    /// What it may have.
    pub share: Share,
    /// What its gates say.
    pub state: State,
    /// Since when it waits for a lease, in the caller's nanoseconds.
    pub waiting_since: Option<u64>,
    /// GPU time charged, nanoseconds (of one GPU, where there are several), a running lease included.
    pub leased_ns: u64,
    /// Time spent wanting and not holding, nanoseconds.
    pub waited_ns: u64,
    /// Waits of [`super::LONG_WAIT_NS`] and more that have ended.
    pub long_waits: u64,
    /// The longest that has ended, nanoseconds.
    pub longest_wait_ns: u64,
    /// Leases granted.
    pub leases: u64,
    /// Drains that passed the deadline.
    pub overlaps: u64,
}

impl Policy {
    /// One GPU as it is at `now`; `None` for one that no tenant has.
    #[must_use]
    pub fn gpu(&self, _now: u64, gpu: GpuIndex) -> Option<GpuView> {
        let at = self.gpus.get(usize::from(gpu)).filter(|at| !at.seats.is_empty())?;
        let phase = |slot: Slot| self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        let late = |slot: &Slot| matches!(phase(*slot), Some(Phase::Late { .. }));
        let id = |slot: Slot| self.tenants[slot].as_ref().map(|tenant| tenant.id);
        let contenders = at.contenders(&self.tenants);
        Some(GpuView {
            gpu,
            holder: at.leases.iter().find(|slot| !late(slot)).and_then(|&slot| id(slot)),
            late: at.leases.iter().filter(|slot| late(slot)).filter_map(|&slot| id(slot)).collect(),
            waiting: contenders,
            quantum: at.quantum(contenders, &self.settings),
        })
    }

    /// One tenant as it is at `now`.
    #[must_use]
    pub fn tenant(&self, now: u64, id: TenantId) -> Option<TenantView> {
        let tenant = self.tenants[*self.ids.get(&id)?].as_ref()?;
        let waits = tenant.waits();
        let waiting = if waits { now.saturating_sub(tenant.since) } else { 0 };
        let running = if tenant.has_lease() { now.saturating_sub(tenant.charged_at) } else { 0 };
        Some(TenantView {
            tenant: id,
            gpus: tenant.gpus.clone(),
            share: tenant.share,
            state: tenant.state(),
            waiting_since: waits.then_some(tenant.since),
            leased_ns: tenant.leased_ns + running,
            waited_ns: tenant.waited_ns + waiting,
            long_waits: tenant.long_waits,
            longest_wait_ns: tenant.longest_wait_ns,
            leases: tenant.leases,
            overlaps: tenant.overlaps,
        })
    }

    /// Who has the lease next of a tenant that drains, as it stands now.
    #[must_use]
    pub fn successor(&self, id: TenantId) -> Option<TenantId> {
        let &slot = self.ids.get(&id)?;
        let tenant = self.tenants[slot].as_ref()?;
        if !matches!(tenant.phase, Phase::Draining { .. }) {
            return None;
        }
        let gpu = &self.gpus[usize::from(*tenant.gpus.first()?)];
        let quantum = gpu.quantum(gpu.contenders(&self.tenants), &self.settings);
        let best = || Some(gpu.best_single(quantum, &self.tenants)?.slot());
        let next = gpu.reserved.or_else(best).filter(|&next| next != slot)?;
        Some(self.tenants[next].as_ref()?.id)
    }

    /// All tenants, in the order of their ids.
    #[must_use]
    pub fn tenants(&self, now: u64) -> Vec<TenantView> {
        self.ids.keys().filter_map(|&id| self.tenant(now, id)).collect()
    }
}
