//! Writes refusals and delays of containers to the audit trail.

use std::time::Instant;

use super::Agent;
use crate::incidents::{Incidents, Seen, Time};
use tessera_arbiter::policy::LONG_WAIT_NS;
use tessera_arbiter::{TenantShare, View};
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::unix_ms;

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

impl Agent {
    /// Writes to the audit trail what has happened since the call before. Blocking.
    pub fn note_incidents(&self, seen: Vec<(AllocationId, Seen)>) {
        let view =
            self.allocations.arbiter().and_then(tessera_arbiter::Arbiter::view).unwrap_or_default();
        let records = self.allocations.all().all();
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
        let mut looked = self.incidents.lock();
        let passed = looked.at.elapsed();
        looked.at = Instant::now();
        let events =
            looked.incidents.look(seen, self.allocations.adopted_until(), passed, unix_ms());
        drop(looked);
        self.journal.audit_all(events);
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
