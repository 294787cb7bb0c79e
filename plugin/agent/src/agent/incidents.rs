//! Writes refusals and delays of containers to the audit trail.

use std::time::Instant;

use tessera_system::locks::lock;

use super::Agent;
use crate::allocations::{Allocations, Mended};
use crate::incidents::{Incidents, Seen, Time};
use tessera_arbiter::policy::LONG_WAIT_NS;
use tessera_arbiter::{TenantShare, View};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Behind, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::record::Holder;

/// What has been reported so far, and when the last look was.
#[derive(Debug)]
pub(super) struct Reported {
    at: Instant,
    incidents: Incidents,
}

impl Default for Reported {
    fn default() -> Self {
        Reported { at: Instant::now(), incidents: Incidents::default() }
    }
}

impl Agent {
    /// Looks at every allocation, and writes to the audit trail what has happened since the look before. Blocking.
    pub fn note_incidents(&self) {
        self.note(Allocations::inspect);
    }

    /// As [`Agent::note_incidents`], without the search for damage in slots where nobody is. What a view says of counters
    /// and of the trail agrees after it. Blocking.
    pub fn note_incidents_for_view(&self) {
        self.note(Allocations::glance);
    }

    /// Mends what containers start with, and writes to the audit trail what was not whole; true if anything was not.
    /// Blocking.
    pub fn mend(&self) -> bool {
        let mended = self.allocations.mend();
        let is_mended = !mended.is_empty();
        let event = |one: Mended| {
            Event::of(&one.record, What::Restored { what: one.what.join(", ") }, unix_ms())
        };
        self.journal.audit_all(mended.into_iter().map(event).collect());
        is_mended
    }

    fn note(&self, look: impl FnOnce(&Allocations) -> Vec<(AllocationId, Seen)>) {
        // A look and its comparison are one: an older look that came later would count twice.
        let _one = lock(&self.looking);
        let seen = look(&self.allocations);
        let view =
            self.allocations.arbiter().and_then(tessera_arbiter::Arbiter::view).unwrap_or_default();
        let records = self.allocations.all().all();
        let holder = |id: &str| records.get(&AllocationId::parse(id)?)?.holder.clone();
        let seen = seen.into_iter().filter_map(|(id, seen)| {
            let record = records.get(&id)?.as_ref();
            let share = view.tenants.iter().find(|share| share.id == id.as_str());
            let time = share.map(|share| time(share, &view, &holder));
            Some((record, Seen { time, ..seen }))
        });
        let seen = seen.collect();
        let mut reported = self.incidents.lock();
        let passed = reported.at.elapsed();
        reported.at = Instant::now();
        let events =
            reported.incidents.update(seen, self.allocations.adopted_until(), passed, unix_ms());
        drop(reported);
        self.journal.audit_all(events);
    }
}

fn time(share: &TenantShare, view: &View, holder: &dyn Fn(&str) -> Option<Holder>) -> Time {
    let mine = |uuid: &String| share.uuids.contains(uuid);
    let holders = view.gpus.iter().filter(|gpu| mine(&gpu.uuid));
    let behind = holders.filter_map(|gpu| gpu.holder.as_deref()).find(|id| *id != share.id);
    let waits = share.waiting_ns.unwrap_or(0);
    Time {
        asked_millis: share.share.millis,
        got_millis: share.got_10s_millis,
        waited_ns: share.totals.waited_ns,
        long_waits: share.totals.long_waits.saturating_add(u64::from(waits >= LONG_WAIT_NS)),
        longest_ns: share.totals.longest_wait_ns.max(waits),
        overlaps: share.totals.overlaps,
        behind: behind.map_or(Behind::Nobody, |id| Behind::Allocation {
            id: id.to_owned(),
            holder: holder(id),
        }),
    }
}
