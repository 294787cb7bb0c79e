//! Tenants come and go: their GPUs, links and parts of the fallback cycle.

use std::collections::BTreeMap;

use tracing::{debug, warn};

use super::{Now, Thread};
use crate::arbitrated_tenant::{ArbitratedTenant, OpenedPages};
use crate::fallback_schedule::{self, Part};
use crate::flights::Flights;
use crate::gate_connections::GateConnections;
use crate::linked_shares::OwnShare;
use crate::policy::{GateState, GpuIndex, IDLE, MAX_GPUS, Pace, Share, TenantId};

impl Thread {
    pub(super) fn admit(&mut self, mut opened: OpenedPages, now: Now) {
        let known = self.key(&opened.id);
        let Some(share) = opened.share else {
            return match known {
                Some(key) => self.release(key, now),
                None => ArbitratedTenant::free(&opened.page, &Flights::default()),
            };
        };
        if let Some(key) = known {
            let tenant = self.tenants.get_mut(&key).filter(|tenant| tenant.file == opened.file);
            if let Some(tenant) = tenant {
                let listening = opened.listening.take();
                if let Some(Err(error)) =
                    listening.map(|new| tenant.connections.replace_listener(new, &self.reactor))
                {
                    warn!(allocation = opened.id, %error, "gate.sock");
                }
                if tenant.own_share != share {
                    tenant.own_share = share;
                    self.moved.insert(key);
                    self.relink(now);
                }
                return;
            }
            // Another page: another tenant, whatever its name.
            self.release(key, now);
        }
        let Some(listening) = opened.listening.take() else {
            return warn!(allocation = opened.id, "no gate.sock; its compute is not limited");
        };
        let key = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        let mut gpus: Vec<GpuIndex> = opened.uuids.iter().filter_map(|u| self.gpu(u)).collect();
        gpus.sort_unstable();
        let connections = match GateConnections::open(
            listening,
            key,
            self.max_processes,
            &self.reactor,
            now.instant,
        ) {
            Ok(connections) if !gpus.is_empty() => connections,
            Ok(_) => return warn!(allocation = opened.id, "more than {MAX_GPUS} GPUs"),
            Err(error) => return warn!(allocation = opened.id, %error, "gate.sock"),
        };
        debug!(allocation = opened.id, ?gpus, ?share, "arbitrated");
        let adopted = opened.in_use > 0;
        let mut tenant =
            ArbitratedTenant::new(opened, gpus.clone(), share, connections, now.instant);
        tenant.set_pace(&self.leases, Pace { idle_ns: IDLE, is_narrow: false });
        tenant.beat(now.ns);
        if let Some(traced) = &mut self.traced {
            traced.tenants.insert(TenantId(key), tenant.id.clone());
        }
        self.tenants.insert(key, tenant);
        self.policy.join(now.ns, TenantId(key), &gpus, share);
        if adopted {
            self.policy.adopt(now.ns, TenantId(key));
        }
        self.carry_out(now);
        self.note_due(key);
    }

    pub(super) fn release(&mut self, key: u32, now: Now) {
        let Some(mut tenant) = self.tenants.remove(&key) else { return };
        self.policy.leave(now.ns, TenantId(key));
        if let Some(at) = tenant.due {
            self.dues.remove(&(at, key));
        }
        self.links.released(key, &mut self.moved);
        tenant.connections.close(&self.reactor);
        tenant.set_free();
        self.relink(now);
        for (index, uuid) in (0..).zip(&mut self.gpus) {
            let uses = |tenant: &ArbitratedTenant| tenant.gpus.contains(&index);
            if !self.tenants.values().any(uses)
                && let Some(uuid) = uuid.take()
            {
                self.idle_before.insert(uuid, self.policy.idle_totals(now.ns, index));
            }
        }
        self.carry_out(now);
    }

    /// Gives the tenants whose links have changed, and those that are linked to them, what they have now of their
    /// own and others' shares.
    pub(super) fn relink(&mut self, now: Now) {
        while let Some(first) = self.moved.pop_first() {
            let linked = self.links.with(first);
            self.moved.retain(|key| !linked.contains(key));
            let own = |key: u32| {
                let tenant = self.tenants.get(&key)?;
                let (gpus, share) = (tenant.own_gpus.clone(), tenant.own_share);
                Some((key, OwnShare { gpus, share, is_used: tenant.drains.len() > 0 }))
            };
            let own = linked.into_iter().filter_map(own).collect();
            self.regroup(self.links.divide(&own), now);
        }
    }

    fn regroup(&mut self, parts: BTreeMap<u32, (Vec<GpuIndex>, Share)>, now: Now) {
        for (key, (gpus, share)) in parts {
            let Some(tenant) = self.tenants.get_mut(&key) else { continue };
            if tenant.gpus == gpus && tenant.share == share {
                continue;
            }
            debug!(allocation = tenant.id, ?gpus, ?share, "its processes' shares");
            tenant.share = share;
            if tenant.gpus == gpus {
                self.policy.set_share(now.ns, TenantId(key), share);
            } else {
                // Another gang: it joins again, and drains what it has in flight before anything else.
                tenant.gpus.clone_from(&gpus);
                let wanted = self.policy.wants(TenantId(key));
                tenant.set(now.ns, GateState::Closed);
                self.policy.join(now.ns, TenantId(key), &gpus, share);
                if tenant.drains.owing() > 0 {
                    self.policy.adopt(now.ns, TenantId(key));
                }
                if wanted {
                    self.policy.want(now.ns, TenantId(key));
                }
            }
            self.carry_out(now);
            self.unplaced.insert(key);
        }
    }

    /// The index of a GPU in the policy; assigns one if necessary.
    fn gpu(&mut self, uuid: &str) -> Option<GpuIndex> {
        let known = self.gpus.iter().position(|gpu| gpu.as_deref() == Some(uuid));
        let free = || self.gpus.iter().position(Option::is_none);
        let index = known.or_else(free).unwrap_or(self.gpus.len());
        if index >= MAX_GPUS {
            return None;
        }
        if index == self.gpus.len() {
            self.gpus.push(None);
        }
        let gpu = GpuIndex::try_from(index).ok()?;
        if self.gpus[index].replace(uuid.to_owned()).is_none() {
            let idle = self.idle_before.remove(uuid).unwrap_or_default();
            self.policy.set_idle_totals(gpu, idle);
        }
        if let Some(traced) = &mut self.traced {
            traced.gpus.insert(gpu, uuid.to_owned());
        }
        Some(gpu)
    }

    /// Assigns parts of the fallback cycle to tenants that need one and those that share GPUs with them. Tenants
    /// without processes need none.
    pub(super) fn place(&mut self) {
        let on =
            |tenant: &ArbitratedTenant| tenant.gpus.iter().fold(0_u128, |on, gpu| on | 1 << gpu);
        while let Some(key) = self.unplaced.pop_first() {
            let mut gpus = self.tenants.get(&key).map_or(0, on);
            // Gangs are neighbours of all neighbours of their GPUs.
            let near: Vec<u32> = loop {
                let reached = gpus;
                let near = self.tenants.iter().filter(|(other, tenant)| {
                    **other == key || tenant.drains.len() > 0 && on(tenant) & reached != 0
                });
                gpus = near.clone().fold(gpus, |gpus, (_, tenant)| gpus | on(tenant));
                if gpus == reached {
                    break near.map(|(key, _)| *key).collect();
                }
            };
            let parts: Vec<Part<'_>> = near
                .iter()
                .filter_map(|key| self.tenants.get(key))
                .map(|tenant| Part {
                    gpus: &tenant.gpus,
                    millis: tenant.share.millis,
                    phase: tenant.phase,
                })
                .collect();
            let phases = fallback_schedule::place(&parts);
            for (key, phase) in near.iter().zip(phases) {
                if let Some(tenant) =
                    self.tenants.get_mut(key).filter(|tenant| tenant.phase != phase)
                {
                    tenant.set_phase(phase);
                }
            }
            self.unplaced.retain(|other| !near.contains(other));
        }
    }
}
