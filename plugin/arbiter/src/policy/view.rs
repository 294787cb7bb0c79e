//! The policy's state, as others see it.

use super::Policy;
use super::tenant::{Phase, Slot};
use super::types::{GateState, GpuIndex, Share, TenantId, TenantTotals};

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuView {
    /// The tenant that holds the lease or still drains it; late ones do not count.
    pub holder: Option<TenantId>,
    /// Tenants that drain too late and use the GPU beside the holder.
    pub late: Vec<TenantId>,
    /// Tenants that wait for the lease.
    pub waiting: usize,
    /// Length of a lease now, nanoseconds.
    pub quantum: u64,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Its id.
    pub tenant: TenantId,
    /// Its GPUs.
    pub gpus: Vec<GpuIndex>,
    /// Its share.
    pub share: Share,
    /// The state of its gates.
    pub state: GateState,
    /// Since when it waits for a lease, in the caller's nanoseconds.
    pub waiting_since: Option<u64>,
    /// What it has had so far, a running lease and a running wait included.
    pub totals: TenantTotals,
}

impl Policy {
    /// One GPU; `None` for one that no tenant has.
    #[must_use]
    pub fn gpu(&self, gpu: GpuIndex) -> Option<GpuView> {
        let at = self.gpus.get(usize::from(gpu)).filter(|at| !at.entities.is_empty())?;
        let phase = |slot: Slot| self.tenants[slot].as_ref().map(|tenant| tenant.phase);
        let late = |slot: &Slot| matches!(phase(*slot), Some(Phase::Late { .. }));
        let id = |slot: Slot| self.tenants[slot].as_ref().map(|tenant| tenant.id);
        Some(GpuView {
            holder: at.leases.iter().find(|slot| !late(slot)).and_then(|&slot| id(slot)),
            late: at.leases.iter().filter(|slot| late(slot)).filter_map(|&slot| id(slot)).collect(),
            waiting: at.contenders(&self.tenants),
            quantum: at.quantum(&self.tenants, &self.settings),
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
            totals: TenantTotals {
                leased_ns: tenant.totals.leased_ns + running,
                waited_ns: tenant.totals.waited_ns + waiting,
                alone_ns: tenant.totals.alone_ns + if tenant.is_alone() { running } else { 0 },
                ..tenant.totals
            },
        })
    }

    /// The tenant that gets the lease next, as things stand, after one that drains.
    pub(super) fn successor_of(&self, slot: Slot) -> Option<Slot> {
        let tenant = self.tenants[slot].as_ref()?;
        if !matches!(tenant.phase, Phase::Draining { .. }) {
            return None;
        }
        self.next_on(usize::from(*tenant.gpus.first()?)).filter(|&next| next != slot)
    }

    /// All tenants, in the order of their ids.
    #[must_use]
    pub fn tenants(&self, now: u64) -> Vec<TenantView> {
        self.ids.keys().filter_map(|&id| self.tenant(now, id)).collect()
    }
}
