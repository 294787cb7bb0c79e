//! What was refused to a container, or came late, as events of the audit trail. Housekeeping looks every
//! few seconds at counters, most of them a container's own word, and [`Incidents`] says what is new since
//! the look before. Pure. The trail draws together what comes again and again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tessera_arbiter::policy::LONG_WAIT_NS;
use tessera_arbiter::{Arbiter, TenantShare, View};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Behind, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::percent::format_cores;
use tessera_model::record::{Holder, Record};
use tessera_peers::OverQuota;
use tessera_system::locks::lock;
use tessera_tenant::regions::{Region, Use};

use crate::Agent;

/// Counters of one allocation, since its generation or the plugin began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub refused: u64,
    pub over_quota: OverQuota,
    pub driver_refused: u64,
    pub rationed: u64,
    /// Processes without a slot, and GPUs that are not in the quota.
    pub unlisted: u64,
    /// Of each GPU, as the page counts: bytes in use, and bytes that may be held.
    pub memory: Vec<(u64, u64)>,
    pub time: Option<Time>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Thousandths of a GPU that it asked for.
    pub asked_millis: u32,
    /// And what it got in the last ten seconds.
    pub got_millis: u32,
    /// Time that it waited for leases, nanoseconds.
    pub waited_ns: u64,
    /// Waits of [`tessera_arbiter::policy::LONG_WAIT_NS`] and more, one that still goes on included.
    pub long_waits: u64,
    /// The longest wait since the arbiter took it on, nanoseconds.
    pub longest_ns: u64,
    pub overlaps: u64,
    /// The holder of its GPU's lease, if that is another. No reason names it: an owner does not learn of neighbours.
    pub behind: Behind,
}

/// What one allocation's page and sessions say; its part of GPU time comes later.
pub(crate) fn seen(region: &Region, used: &Use) -> Seen {
    let tenant = region.tenant();
    let counters = tenant.counters();
    let spec = region.spec();
    let memory = spec.gpus.iter().enumerate().map(|(gpu, quota)| {
        let overhead = region.overhead(gpu);
        (used.snapshot.granted(gpu).saturating_add(overhead), quota.memory_limit_bytes)
    });
    Seen {
        // Pages count all requests, sessions report some also when a page is ruined.
        refused: used.tally.refusals.max(counters.over_quota),
        over_quota: tenant.take_over_quota(),
        driver_refused: used.tally.driver_refusals.max(counters.driver_refused),
        rationed: used.tally.gate_timeouts,
        unlisted: counters.no_slot.saturating_add(counters.unknown_gpu),
        memory: memory.collect(),
        time: None,
    }
}

/// Waiting is judged over no less: questions look, too, and within milliseconds everybody waits now and then.
const JUDGED: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Known {
    generation: u64,
    /// Its time is that of the look with which the next judgement begins,
    seen: Seen,
    /// so long ago.
    age: Duration,
}

#[derive(Debug, Default)]
pub struct Incidents {
    known: BTreeMap<String, Known>,
    /// There was a look already: what is not known has begun since.
    looked: bool,
}

impl Incidents {
    /// Takes what a look saw, `passed` after the look before; what has happened in between. What was
    /// counted before the first look at a generation is news where the plugin has seen it begin: it is
    /// younger than `adopted_until`. (By its generation: the clock may have been set back since.)
    pub fn update(
        &mut self,
        seen: Vec<(&Record, Seen)>,
        adopted_until: u64,
        passed: Duration,
        now_unix_ms: i64,
    ) -> Vec<Event> {
        let mut before = std::mem::take(&mut self.known);
        let mut events = Vec::new();
        for (record, mut seen) in seen {
            let generation = record.generation;
            let old = before.remove(record.id.as_str());
            let old = match old.filter(|old| old.generation == generation) {
                Some(old) => Some(Known { age: old.age.saturating_add(passed), ..old }),
                None if self.looked || generation > adopted_until => {
                    Some(Known { generation, seen: Seen::fresh(&seen), age: passed })
                }
                // The plugin has just started: the one before has reported all this.
                None => None,
            };
            let mut age = Duration::ZERO;
            if let Some(old) = old {
                events.extend(news(record, &old, &seen, now_unix_ms));
                if old.age < JUDGED && seen.time.is_some() && old.seen.time.is_some() {
                    age = old.age;
                    let overlaps = seen.time.as_ref().map_or(0, |time| time.overlaps);
                    seen.time = old.seen.time.map(|time| Time { overlaps, ..time });
                }
            }
            self.known.insert(record.id.to_string(), Known { generation, seen, age });
        }
        self.looked = true;
        events
    }
}

impl Seen {
    fn fresh(of: &Seen) -> Seen {
        Seen { time: of.time.as_ref().map(|_| Time::default()), ..Seen::default() }
    }
}

/// A counter went back because the page was replaced or tampered with.
fn more(old: u64, new: u64) -> u64 {
    new.saturating_sub(old)
}

fn news(record: &Record, known: &Known, new: &Seen, at: i64) -> Vec<Event> {
    let old = &known.seen;
    let mut events = Vec::new();
    let mut tell = |times: u64, gpu: Option<usize>, what: What, reason: Option<String>| {
        if times > 0 {
            let gpu = gpu.or_else(|| (record.grants.len() == 1).then_some(0));
            let event = Event { reason, ..Event::of(record, what, at) }.times(times);
            events.push(match gpu.and_then(|gpu| record.grants.get(gpu)) {
                Some(grant) => event.on_gpu(&grant.uuid),
                None => event,
            });
        }
    };
    let OverQuota { bytes, gpu, memory } = new.over_quota;
    let gpu = gpu.and_then(|gpu| usize::try_from(gpu).ok());
    let gpu = gpu.or_else(|| (new.memory.len() == 1).then_some(0));
    // As it was then; a session that says nothing leaves what is there now.
    let memory = memory.or_else(|| gpu.and_then(|gpu| new.memory.get(gpu).copied()));
    let (charged_bytes, limit_bytes) = memory.unwrap_or_default();
    let refused = What::RefusedMemory { bytes, charged_bytes, limit_bytes };
    tell(more(old.refused, new.refused), gpu, refused, None);
    tell(more(old.driver_refused, new.driver_refused), None, What::DriverRefused, None);
    tell(more(old.rationed, new.rationed), None, What::Rationed, None);
    tell(more(old.unlisted, new.unlisted), None, What::Unlisted, None);
    if let (Some(old), Some(new)) = (&old.time, &new.time) {
        tell(more(old.overlaps, new.overlaps), None, What::Overlapped, None);
        let delayed = (known.age >= JUDGED).then(|| delayed(old, new, known.age)).flatten();
        if let Some((what, reason)) = delayed {
            tell(1, None, what, Some(reason));
        }
    }
    events
}

/// It waited for half of the time and got less than nine tenths of its share; or for long at once.
fn delayed(old: &Time, new: &Time, passed: Duration) -> Option<(What, String)> {
    let waited = more(old.waited_ns, new.waited_ns);
    let passed_ns = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
    let short = u64::from(new.got_millis) * 10 < u64::from(new.asked_millis) * 9;
    let much = waited >= passed_ns / 2;
    let long = more(old.long_waits, new.long_waits) > 0;
    if !(much && short || long) {
        return None;
    }
    let seconds = |ns: u64| format!("{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10);
    let (got, asked) = (format_cores(new.got_millis), format_cores(new.asked_millis));
    let mut reason = format!("it got {got} of the {asked} that it asks for");
    if long {
        reason += &format!("; its longest wait was {}", seconds(new.longest_ns));
    }
    let within_ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
    let (waited_ms, behind) = (waited / 1_000_000, new.behind.clone());
    Some((What::Delayed { waited_ms, within_ms, behind }, reason))
}

impl Agent {
    /// Mends what containers start with, and writes to the audit trail what was not whole. Blocking.
    pub(crate) fn mend(&self) {
        self.journal.audit(self.allocations.mend().into_iter().map(|(record, what)| {
            Event::of(&record, What::Restored { what: what.join(", ") }, unix_ms())
        }));
    }

    /// Looks at every allocation, and writes to the audit trail what has happened since the look before: what a view says of
    /// counters and of the trail agrees after it. Blocking.
    pub fn note_incidents(&self) {
        // A look and its comparison are one: an older look that came later would count twice.
        let mut reported = lock(&self.incidents);
        let seen = self.allocations.pages.inspect();
        let view = self.allocations.arbiter().and_then(Arbiter::view).unwrap_or_default();
        let records = self.allocations.all().clone();
        let holder = |id: &str| records.get(&AllocationId::parse(id)?)?.holder.clone();
        let seen = seen.into_iter().filter_map(|(id, seen)| {
            let record = records.get(&id)?.as_ref();
            let share = view.tenants.iter().find(|share| share.id == id.as_str());
            let time = share.map(|share| time(share, &view, &holder));
            Some((record, Seen { time, ..seen }))
        });
        let seen = seen.collect();
        let (looked, incidents) = &mut *reported;
        let passed = looked.elapsed();
        *looked = Instant::now();
        let events = incidents.update(seen, self.allocations.adopted_until, passed, unix_ms());
        drop(reported);
        self.journal.audit(events);
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

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::record::{Grant, State};
    use tessera_model::sharing::Compute;

    const ROUND: Duration = Duration::from_secs(10);
    const NOW: i64 = 1_795_336_321_000;

    fn record(gpus: usize) -> Record {
        let grant = |n: usize| Grant {
            uuid: format!("GPU-{n}"),
            memory_limit_bytes: 10 << 30,
            context_overhead_bytes: 0,
            cores_millis: 500,
            compute: Compute::Burst,
        };
        Record {
            generation: 3,
            grants: (0..gpus).map(grant).collect(),
            state: State::Started,
            allocated_unix_ms: NOW - 3_600_000,
            ..Record::new(AllocationId::of("r", std::iter::once("a")), 1, Vec::new())
        }
    }

    fn seen(refused: u64) -> Seen {
        Seen {
            refused,
            over_quota: OverQuota { bytes: 1 << 30, ..OverQuota::default() },
            memory: vec![(9 << 30, 10 << 30)],
            time: Some(Time { asked_millis: 500, ..Time::default() }),
            ..Seen::default()
        }
    }

    fn other() -> Behind {
        let name = |name: &str| name.to_owned();
        let (namespace, pod, container) = (name("prod"), name("train"), name("main"));
        Behind::Allocation { id: name("x"), holder: Some(Holder { namespace, pod, container }) }
    }

    fn waiting(waited_s: u64, got_millis: u32) -> Seen {
        let time = Time {
            asked_millis: 500,
            got_millis,
            waited_ns: waited_s * 1_000_000_000,
            behind: other(),
            ..Time::default()
        };
        Seen { time: Some(time), ..seen(0) }
    }

    fn last_events(record: &Record, looks: &[&Seen]) -> Vec<Event> {
        let mut incidents = Incidents::default();
        let look = |seen: &&Seen| incidents.update(vec![(record, (*seen).clone())], 3, ROUND, NOW);
        looks.iter().map(look).last().unwrap_or_default()
    }

    #[test]
    fn a_plugin_that_starts_reports_nothing_again_but_all_of_a_new_allocation() {
        assert_eq!(last_events(&record(1), &[&seen(5)]), []);
        // Not by the clock, which may have been set back since its Allocate.
        let older = Record { allocated_unix_ms: NOW + 18_000_000, ..record(1) };
        assert_eq!(last_events(&older, &[&seen(5)]), []);
        let new = Record { generation: 4, allocated_unix_ms: NOW - 18_000_000, ..record(1) };
        assert_eq!(last_events(&new, &[&seen(5)])[0].times, 5);
    }

    #[test]
    fn a_new_generation_begins_at_nothing() {
        let mut incidents = Incidents::default();
        let first = record(1);
        incidents.update(vec![(&first, seen(50))], 3, ROUND, NOW);
        let second = Record { generation: 4, allocated_unix_ms: NOW, ..record(1) };
        assert_eq!(incidents.update(vec![(&second, seen(2))], 3, ROUND, NOW)[0].times, 2);
        assert!(incidents.update(Vec::new(), 3, ROUND, NOW).is_empty());
        assert!(incidents.known.is_empty(), "what is gone is forgotten");
    }

    #[test]
    fn waiting_counts_when_the_share_was_not_got() {
        let before = waiting(0, 100);
        let [event] = last_events(&record(1), &[&before, &waiting(8, 100)]).try_into().unwrap();
        let what = What::Delayed { waited_ms: 8000, within_ms: 10_000, behind: other() };
        assert_eq!(event.what, what);
        let reason = "it got 10% of the 50% that it asks for";
        assert_eq!(event.reason.as_deref(), Some(reason));
        assert_eq!(last_events(&record(1), &[&before, &waiting(8, 490)]), [], "it got its share");
        assert_eq!(
            last_events(&record(1), &[&before, &waiting(3, 100)]),
            [],
            "it did not want more"
        );
    }

    #[test]
    fn waiting_is_judged_over_ten_seconds_however_often_anybody_looks() {
        let record = record(1);
        let mut incidents = Incidents::default();
        let step = Duration::from_millis(10);
        let mut late = Vec::new();
        // It waits for each third step as a whole, and then for each of ten seconds.
        let waits = (0..4500_u64).map(|at| at < 2000 && at % 3 == 0 || at >= 3000);
        let mut now = waiting(0, 100);
        for (at, waits) in waits.enumerate() {
            let time = now.time.as_mut().unwrap();
            time.waited_ns += u64::from(waits) * 10_000_000;
            if !incidents.update(vec![(&record, now.clone())], 3, step, NOW).is_empty() {
                late.push(at);
            }
        }
        assert_eq!(late, [4000]);
    }

    #[test]
    fn a_long_wait_counts_whatever_was_got() {
        let mut late = waiting(2, 500);
        let time = late.time.as_mut().unwrap();
        (time.long_waits, time.longest_ns, time.behind) = (1, 1_900_000_000, Behind::Nobody);
        let events = last_events(&record(1), &[&waiting(0, 500), &late]);
        assert!(events[0].reason.as_ref().unwrap().ends_with("its longest wait was 1.9 s"));
    }

    #[test]
    fn each_kind_is_reported_by_itself() {
        let mut all = waiting(9, 0);
        (all.refused, all.driver_refused, all.rationed, all.unlisted) = (1, 2, 3, 4);
        all.time.as_mut().unwrap().overlaps = 5;
        let events = last_events(&record(2), &[&waiting(0, 0), &all]);
        let names: Vec<(&str, u64)> = events.iter().map(|e| (e.what.into_str(), e.times)).collect();
        let kinds = [
            ("refused-memory", 1),
            ("driver-refused", 2),
            ("rationed", 3),
            ("unlisted", 4),
            ("overlapped", 5),
            ("delayed", 1),
        ];
        assert_eq!(names, kinds);
        assert!(events.iter().all(|event| event.what.is_tenants()));
    }

    #[test]
    fn counters_that_jump_or_go_back_harm_nobody() {
        let mut wild = waiting(u64::MAX / 1_000_000_000, u32::MAX);
        wild.refused = u64::MAX;
        wild.over_quota = OverQuota { bytes: u64::MAX, gpu: Some(u32::MAX), memory: None };
        for looks in [[&seen(9), &wild], [&wild, &seen(3)]] {
            assert!(last_events(&record(1), &looks).len() < 3);
        }
    }
}
