//! A month of a node's life on a made-up clock: 64 tenants that come and go, nights in which the node is off, plugins
//! that are replaced or killed, clocks that are set. What is known afterwards agrees with what happened, and the file
//! keeps its bound at every commit.

// Made-up figures: neither negative nor large.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use tessera_history::{Found, History, Options};
use tessera_view::history::{Answer, Query};
use tessera_view::status::{Allocation, Gpu, GpuState, Holder, Status};
use tessera_view::tenant::{Compute, Use};

use fastrand::Rng;

use crate::{HOUR, KEEP, T0};

const TENANTS: u64 = 64;
const GPUS: u64 = 8;
const GIB: u64 = 1 << 30;

/// What was handed over, of one generation of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    got_us: u64,
    waited_us: u64,
    launches: u64,
    refusals: u64,
    ms: u64,
    peak: u64,
    /// Highest share of ten seconds, thousandths.
    busiest: u32,
}

impl Sum {
    fn add(&mut self, more: &Sum) {
        self.got_us += more.got_us;
        self.waited_us += more.waited_us;
        self.launches += more.launches;
        self.refusals += more.refusals;
        self.ms += more.ms;
        self.peak = self.peak.max(more.peak);
        self.busiest = self.busiest.max(more.busiest);
    }
}

/// By generation of a slot, and the second of a bucket.
type Sums = BTreeMap<(u64, u32), Sum>;

struct Tenant {
    slot: u64,
    generation: u64,
    ends: i64,
    allocation: Allocation,
}

impl Tenant {
    fn new(slot: u64, generation: u64, now: i64, random: &mut Rng) -> Self {
        let lives = HOUR * (1 + random.u64(..72).cast_signed());
        let used = Use {
            gpu_uuid: format!("GPU-{:08}-0000-0000-0000-000000000000", slot % GPUS),
            memory_limit_bytes: 10 * GIB,
            cores_millis: 125,
            ..Use::default()
        };
        let holder = Holder {
            namespace: format!("team-{}", slot % 5),
            pod: format!("model-{slot}-7c9d8f6b5-{generation:05}"),
            container: "server".into(),
        };
        let allocation = Allocation {
            id: format!("{slot:032x}"),
            generation,
            holder: Some(holder),
            gpus: vec![used],
            compute: Some(Compute::default()),
            ..Allocation::default()
        };
        Tenant { slot, generation, ends: now + lives, allocation }
    }

    /// Goes on for so long; what it did.
    fn live(&mut self, seconds: i64, random: &mut Rng) -> Sum {
        let us = seconds.cast_unsigned() * 1_000_000;
        let mut did = Sum { ms: us / 1000, ..Sum::default() };
        // A third of them has little to do.
        if !self.slot.is_multiple_of(3) || random.u64(..50) == 0 {
            did.got_us = random.u64(..us / 6);
            did.waited_us = random.u64(..us / 3);
            did.launches = random.u64(..100_000);
            did.refusals = u64::from(random.u64(..100) == 0);
        }
        let one = &mut self.allocation;
        let used = &mut one.gpus[0];
        if random.u64(..4) == 0 {
            used.memory_used_bytes = GIB + random.u64(..8 * GIB);
        }
        did.peak = used.memory_used_bytes;
        if let Some(compute) = &mut one.compute {
            compute.leased_us += did.got_us;
            compute.used_us = compute.leased_us;
            compute.measured_us = compute.leased_us;
            compute.waited_us += did.waited_us;
        }
        one.launches += did.launches;
        one.refusals += did.refusals;
        did
    }
}

struct Node {
    options: Options,
    history: History,
    tenants: Vec<Tenant>,
    random: Rng,
    /// Handed over since the last flush, and what the file should have.
    waits: Sums,
    stored: Sums,
    monotonic_ms: u64,
    first_look: bool,
}

impl Node {
    fn new(dir: &Path, bound: u64, keep: [u32; 3]) -> Self {
        let options = Options { path: dir.join("history.redb"), bound, keep, sync: false };
        let mut random = Rng::with_seed(7);
        let tenants = (0..TENANTS).map(|slot| Tenant::new(slot, 1, T0, &mut random)).collect();
        let history = History::new(options.clone());
        assert_eq!(history.flush(false), Ok(Some(Found::Created)));
        Node {
            options,
            history,
            tenants,
            random,
            waits: Sums::new(),
            stored: Sums::new(),
            monotonic_ms: 0,
            first_look: true,
        }
    }

    fn look(&mut self, now: i64, seconds: i64) {
        self.monotonic_ms += seconds.cast_unsigned() * 1000;
        let mut allocations = Vec::new();
        for tenant in &mut self.tenants {
            let is_new = tenant.ends <= now;
            if is_new {
                *tenant = Tenant::new(tenant.slot, tenant.generation + 1, now, &mut self.random);
            }
            let did = tenant.live(seconds, &mut self.random);
            if !self.first_look {
                // Looks are at full tens: each bucket has an equal part.
                for second in ((now - seconds)..now).step_by(10) {
                    let part = |all: u64, n: u64| {
                        all * (n + 1) / (seconds.cast_unsigned() / 10)
                            - all * n / (seconds.cast_unsigned() / 10)
                    };
                    let n = ((second - (now - seconds)) / 10).cast_unsigned();
                    let got_us = part(did.got_us, n);
                    let sum = Sum {
                        got_us,
                        busiest: got_us.div_ceil(10_000) as u32,
                        waited_us: part(did.waited_us, n),
                        launches: part(did.launches, n),
                        refusals: part(did.refusals, n),
                        ms: 10_000,
                        peak: did.peak,
                    };
                    let key =
                        (name(tenant.slot, tenant.generation), u32::try_from(second).unwrap());
                    self.waits.entry(key).or_default().add(&sum);
                }
            }
            allocations.push(tenant.allocation.clone());
        }
        let gpus = (0..GPUS).map(|n| Gpu {
            uuid: format!("GPU-{n:08}-0000-0000-0000-000000000000"),
            memory_total_bytes: 80 * GIB,
            memory_used_bytes: 40 * GIB,
            memory_limits_bytes: 80 * GIB,
            state: if n == 7 { GpuState::Unhealthy } else { GpuState::Healthy },
            cordon: if n == 6 { "fans".into() } else { String::new() },
            ..Gpu::default()
        });
        let gpus = gpus.collect();
        let status = Status { at_unix_ms: now * 1000, gpus, allocations, ..Status::default() };
        self.history.look(&status, &HashSet::new(), self.monotonic_ms);
        self.first_look = false;
    }

    fn flush(&mut self, now: i64, all: bool) {
        self.history.flush(all).unwrap();
        let newest = self.waits.keys().map(|(_, second)| *second).max().unwrap_or(0);
        let until = if all { newest + 1 } else { newest };
        let waits = std::mem::take(&mut self.waits);
        for (key, sum) in waits {
            match key.1 < until {
                true => self.stored.entry((key.0, hour(key.1))).or_default().add(&sum),
                false => self.waits.entry(key).or_default().add(&sum),
            }
        }
        let len = std::fs::metadata(&self.options.path).unwrap().len();
        assert!(len <= 2 * self.options.bound, "{len} bytes at {now}");
    }

    /// The plugin is replaced; with `kill` it ends without a word.
    fn restart(&mut self, now: i64, kill: bool) {
        let copy = self.options.path.with_extension("copy");
        if kill {
            std::fs::copy(&self.options.path, &copy).unwrap();
            self.history.stop();
            std::fs::rename(&copy, &self.options.path).unwrap();
            self.waits.clear();
        } else {
            self.flush(now, true);
            self.history.close().unwrap();
        }
        self.history = History::new(self.options.clone());
        assert_eq!(self.history.flush(false), Ok(Some(Found::Existing)));
        self.monotonic_ms = 0;
        self.first_look = true;
    }

    fn ask(&self, query: &Query, now: i64) -> Answer {
        self.history.answer(query, &crate::now(now - T0)).unwrap()
    }
}

fn name(slot: u64, generation: u64) -> u64 {
    slot << 32 | generation
}

fn hour(second: u32) -> u32 {
    second - second % 3600
}

/// What an answer says, by pod and hour.
fn sums(answer: &Answer) -> Sums {
    let mut sums = Sums::new();
    for series in &answer.tenants {
        for point in &series.points {
            let second = u32::try_from(point.at_unix_ms / 1000).unwrap();
            let us = |seconds: f64| (seconds * 1e6).round() as u64;
            assert!(point.memory_used_bytes <= point.memory_peak_bytes);
            assert!(point.seconds > 0.0 && point.got_seconds <= point.seconds);
            let sum = Sum {
                got_us: us(point.got_seconds),
                waited_us: us(point.waited_seconds),
                launches: point.launches,
                refusals: point.refusals,
                ms: us(point.seconds) / 1000,
                peak: point.memory_peak_bytes,
                busiest: point.used_peak_millis,
            };
            let slot = u64::from_str_radix(&series.id, 16).unwrap();
            sums.entry((name(slot, series.generation), hour(second))).or_default().add(&sum);
        }
    }
    sums
}

/// Times are rounded to 0.1 ms in each bucket of ten seconds, memory to KiB.
fn assert_agree(found: &Sum, happened: &Sum, what: &str) {
    let buckets = happened.ms / 10_000;
    assert!(
        found.got_us.abs_diff(happened.got_us) <= 50 * buckets,
        "{what}: {found:?}, {happened:?}"
    );
    assert!(found.waited_us.abs_diff(happened.waited_us) <= 50 * buckets, "{what}");
    assert_eq!(
        (found.launches, found.refusals, found.ms),
        (happened.launches, happened.refusals, happened.ms),
        "{what}"
    );
    assert!(found.peak.abs_diff(happened.peak) <= 1024, "{what}");
    assert!(found.busiest.abs_diff(happened.busiest) <= 1, "{what}: {found:?}, {happened:?}");
}

#[test]
fn a_month_of_64_tenants_is_known_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::new(dir.path(), 8 << 20, KEEP);
    let mut now = T0;
    // The whole month is for `make soak`.
    let days: i64 = std::env::var("HISTORY_DAYS").map_or(8, |days| days.parse().expect("days"));
    for day in 0..days {
        now = T0 + day * 24 * HOUR;
        // The node was off for the night.
        node.restart(now, false);
        let until = now + if day == days - 1 { 8 * HOUR } else { 2 * HOUR };
        while now < until {
            // Somebody looks closely for a while; else looks are late.
            let (seconds, flush) =
                if day == days - 1 && now > until - HOUR { (10, 60) } else { (60, 300) };
            now += seconds;
            node.look(now, seconds);
            if now % flush == 0 {
                node.flush(now, false);
            }
            if node.random.u64(..800) == 0 {
                let kill = node.random.u64(..2) == 0;
                node.restart(now, kill);
            }
        }
    }
    node.flush(now, true);

    let all = |step_seconds, since: i64| {
        let since_unix_ms = since * 1000;
        let mut found = Sums::new();
        for gpu in 0..GPUS {
            let subject = format!("GPU-{gpu:08}");
            let query = Query { subject, step_seconds, since_unix_ms, ..Query::default() };
            found.extend(sums(&node.ask(&query, now)));
        }
        found
    };
    let found = all(3600, 0);
    assert_eq!(found.len(), node.stored.len());
    for (key, happened) in &node.stored {
        assert_agree(&found[key], happened, &format!("{key:?}"));
    }
    // What the finer levels have agrees with what the coarsest has, hour by hour.
    let mut compared = 0;
    for (step, since) in [(300, now - 7 * 86400), (10, now - 5 * HOUR)] {
        let since = since - since % HOUR;
        let fine = all(step, since);
        for (key, sum) in found.iter().filter(|(key, _)| i64::from(key.1) >= since) {
            assert_agree(&fine[key], sum, &format!("{step} s: {key:?}"));
            compared += 1;
        }
    }
    assert!(compared > 1000, "{compared}");
    // Each pod of the month is found by its name.
    let pods: std::collections::BTreeSet<u64> = node.stored.keys().map(|(pod, _)| *pod).collect();
    assert!(pods.len() as i64 > 16 * days, "{}", pods.len());
    for pod in pods.into_iter().step_by(37) {
        let subject = format!("model-{}-7c9d8f6b5-{:05}", pod >> 32, pod as u32);
        let answer = node.ask(&Query { subject, ..Query::default() }, now);
        assert_eq!(answer.tenants.len(), 1, "{pod}");
        assert!(answer.tenants[0].points.iter().any(|point| point.seconds > 0.0), "{pod}");
    }
    let sick = node.ask(&Query { subject: "GPU-00000007".into(), ..Query::default() }, now);
    assert!(sick.gpus[0].points.iter().all(|point| point.unhealthy_seconds == point.seconds));
}

#[test]
fn where_the_bound_is_too_little_the_oldest_of_the_finest_go_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::new(dir.path(), 4 << 20, [7 * 86400, 35 * 86400, 400 * 86400]);
    let mut now = T0;
    while now < T0 + 16 * HOUR {
        now += 60;
        node.look(now, 60);
        if now % 300 == 0 {
            node.flush(now, false);
        }
    }
    node.flush(now, true);
    let since = |step_seconds| {
        let query = Query { step_seconds, since_unix_ms: (now - 60) * 1000, ..Query::default() };
        node.ask(&query, now).since_unix_ms / 1000
    };
    let fine = since(10);
    assert!(fine > T0 + HOUR && fine < now - 3 * HOUR, "{} h", (fine - T0) / HOUR);
    assert_eq!((since(300), since(3600)), (T0, T0));
    let mut found = Sums::new();
    for gpu in 0..GPUS {
        let subject = format!("GPU-{gpu:08}");
        let query = Query { subject, step_seconds: 300, ..Query::default() };
        found.extend(sums(&node.ask(&query, now)));
    }
    for (key, happened) in &node.stored {
        assert_agree(&found[key], happened, &format!("{key:?}"));
    }
}
