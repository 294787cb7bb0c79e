//! How long the work of tenants ran while nobody else wanted their GPUs: they say nothing of it themselves, so the
//! driver is asked (`nvmlDeviceGetProcessUtilization`), once for each such GPU and [`SLOW`], and the arbiter is told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tessera_arbiter::{Arbiter, TenantShare};

use super::schedule::SLOW;
use super::{Found, Observer};

#[derive(Debug)]
pub(super) struct UseMeter {
    due: Instant,
    asked: BTreeMap<String, Instant>,
    alone: BTreeSet<String>,
}

impl UseMeter {
    pub fn new(now: Instant) -> Self {
        UseMeter { due: now + SLOW, asked: BTreeMap::new(), alone: BTreeSet::new() }
    }

    pub fn due(&self) -> Instant {
        self.due
    }
}

/// Busy time by pid since the answer before; `None` where that is not known.
type Busy = Option<BTreeMap<u32, Duration>>;

impl Observer {
    /// Measures what tenants used that were alone, if that is due.
    pub(super) fn measure_use(&mut self, allocations: &[Found], now: Instant) {
        if now < self.uses.due {
            return;
        }
        self.uses.due = now + SLOW;
        let agent = std::sync::Arc::clone(&self.agent);
        let Some(arbiter) = agent.allocations.arbiter() else { return };
        let Some(view) = Arbiter::view(arbiter) else { return };
        let is_unmeasured = |share: &&TenantShare| share.totals.alone_ns > 0;
        let before = std::mem::take(&mut self.uses.alone);
        let shares: Vec<&TenantShare> = view.tenants.iter().filter(is_unmeasured).collect();
        let uuids: BTreeSet<&String> = shares.iter().flat_map(|share| &share.uuids).collect();
        self.uses.asked.retain(|uuid, _| uuids.contains(uuid));
        let busy: BTreeMap<&String, Busy> =
            uuids.into_iter().map(|uuid| (uuid, self.ask(uuid))).collect();
        let hidden = self.are_pids_hidden(allocations);
        for share in &shares {
            let pids = self.pids_of(&share.id, allocations);
            // The time before the first answer is nobody's.
            let is_known = !hidden && !pids.is_empty() && before.contains(&share.id);
            let on = |uuid: &String| {
                let busy = busy.get(uuid)?.as_ref()?;
                Some(pids.iter().filter_map(|pid| busy.get(pid)).sum())
            };
            // Of several GPUs, the one that works most.
            let used: Option<Vec<Duration>> = share.uuids.iter().map(on).collect();
            let used = used.filter(|_| is_known).and_then(|used| used.into_iter().max());
            let ns = used.map(|used| u64::try_from(used.as_nanos()).unwrap_or(u64::MAX));
            arbiter.measured(&share.id, ns);
        }
        self.uses.alone = shares.into_iter().map(|share| share.id.clone()).collect();
    }

    fn ask(&mut self, uuid: &str) -> Busy {
        let before = self.uses.asked.remove(uuid);
        // MIG instances and virtual GPUs do not tell.
        let percents =
            self.discovery.utilisation(uuid, before.map(|before| before.elapsed())).ok()?;
        let now = Instant::now();
        self.uses.asked.insert(uuid.to_owned(), now);
        let elapsed = now - before?;
        Some(percents.into_iter().map(|(pid, percent)| (pid, elapsed * percent / 100)).collect())
    }

    fn pids_of(&self, id: &str, allocations: &[Found]) -> BTreeSet<u32> {
        let found = allocations.iter().find(|(record, _)| record.id.as_str() == id);
        let peers = found.map(|(_, region)| region.tenant().peers()).unwrap_or_default();
        let learnt = found.and_then(|(record, _)| self.tenants.get(&record.id));
        let learnt = learnt.into_iter().flat_map(|tenant| tenant.pids.values().copied());
        peers.into_iter().filter_map(|peer| peer.host_pid).chain(learnt).collect()
    }
}
