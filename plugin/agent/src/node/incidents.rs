//! What containers were refused, and what came late, into the audit trail.

use std::time::Instant;

use super::Node;
use crate::incidents::{Incidents, Seen, Time};
use tessera_arbiter::policy::LONG_WAIT_NS;
use tessera_arbiter::{TenantShare, View};
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::unix_ms;
use tessera_system::locks::lock;
use tessera_tenant::regions::{Region, Use};

/// What was seen, and when.
#[derive(Debug)]
pub(super) struct Looked {
    at: Instant,
    incidents: Incidents,
}

impl Default for Looked {
    fn default() -> Self {
        Looked { at: Instant::now(), incidents: Incidents::default() }
    }
}

/// What one allocation's page and sessions say; its part of GPU time comes later.
pub(super) fn seen(region: &Region, used: &Use) -> Seen {
    let tenant = region.tenant();
    let counters = tenant.counters();
    let (largest_refused, gpu) = tenant.take_refused();
    let spec = region.spec();
    let memory = spec.gpus.iter().enumerate().map(|(gpu, quota)| {
        let overhead = region.overhead(gpu);
        (used.snapshot.charged(gpu).saturating_add(overhead), quota.memory_limit_bytes)
    });
    Seen {
        // Pages count all requests, sessions tell of some also when a page is ruined.
        refused: used.tally.refusals.max(counters.over_quota),
        largest_refused,
        refused_gpu: gpu.and_then(|gpu| usize::try_from(gpu).ok()),
        driver_refused: used.tally.driver_refusals.max(counters.driver_refused),
        rationed: used.tally.gate_timeouts,
        unlisted: counters.no_slot.saturating_add(counters.unknown_gpu),
        memory: memory.collect(),
        time: None,
    }
}

impl Node {
    /// Writes to the audit trail what has happened since the call before. Blocking.
    pub fn note_incidents(&self, seen: Vec<(AllocationId, Seen)>) {
        let view = self.arbiter().and_then(tessera_arbiter::Arbiter::view).unwrap_or_default();
        let records = lock(&self.records).all();
        let name = |id: &str| {
            let holder = AllocationId::parse(id).and_then(|id| records.get(&id)?.holder.clone());
            holder.map_or_else(|| id.to_owned(), |h| format!("{}/{}", h.namespace, h.pod))
        };
        let seen = seen.into_iter().filter_map(|(id, seen)| {
            let record = records.get(&id)?.as_ref();
            let share = view.tenants.iter().find(|share| share.id == id.as_str());
            let time = share.map(|share| time(share, &view, &name));
            Some((record, Seen { time, ..seen }))
        });
        let seen = seen.collect();
        let mut looked = lock(&self.incidents);
        let passed = looked.at.elapsed();
        looked.at = Instant::now();
        let events = looked.incidents.look(seen, self.adopted_until, passed, unix_ms());
        drop(looked);
        self.audit_all(events);
    }
}

fn time(share: &TenantShare, view: &View, name: &dyn Fn(&str) -> String) -> Time {
    let mine = |uuid: &String| share.uuids.contains(uuid);
    let holders = view.gpus.iter().filter(|gpu| mine(&gpu.uuid));
    let behind = holders.filter_map(|gpu| gpu.holder.as_deref()).find(|id| *id != share.id);
    let waits = share.waiting_ns.unwrap_or(0);
    Time {
        asked_millis: share.share.millis,
        got_millis: share.got_10s_millis,
        waited_ns: share.waited_ns,
        long_waits: share.long_waits.saturating_add(u64::from(waits >= LONG_WAIT_NS)),
        longest_ns: share.longest_wait_ns.max(waits),
        overlaps: share.overlaps,
        behind: behind.map(name),
    }
}
