//! Counters that are kept where events happen; other figures are read on demand.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_system::locks::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    Allocate,
    /// PreStartContainer.
    PreStart,
    /// NodePrepareResources, of one claim.
    Prepare,
    /// NodeUnprepareResources, of one claim.
    Unprepare,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Ok,
    /// Refused, because of what was asked for.
    Refused,
    /// Something of ours failed.
    Failed,
}

impl Outcome {
    pub const ALL: [Outcome; 3] = [Outcome::Ok, Outcome::Refused, Outcome::Failed];

    pub fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
        }
    }
}

type Key = (Call, Arc<str>, Outcome);

#[derive(Debug, Default)]
pub struct Meters {
    /// As many as there are resources; held for a look-up.
    calls: Mutex<BTreeMap<Key, Arc<Histogram>>>,
}

impl Meters {
    pub fn observe(&self, call: Call, resource: &Arc<str>, outcome: Outcome, length: Duration) {
        let key = (call, Arc::clone(resource), outcome);
        let mut calls = lock(&self.calls);
        let histogram = Arc::clone(calls.entry(key).or_default());
        drop(calls);
        histogram.observe(length);
    }

    pub fn calls(&self, call: Call) -> Vec<(Arc<str>, Outcome, Counts)> {
        let calls = lock(&self.calls);
        let of_it = calls.iter().filter(|((kind, ..), _)| *kind == call);
        of_it.map(|((_, name, outcome), h)| (Arc::clone(name), *outcome, h.counts())).collect()
    }
}

/// Upper bounds of the buckets of kubelet's calls, seconds; beyond them is one more.
const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// Durations, counted in buckets that never change. No lock, no allocation once made.
#[derive(Debug, Default)]
struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_ns: AtomicU64,
}

/// A histogram at one moment: counts of each bucket by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// Upper bound in seconds and how many were not larger, but larger than the bound before.
    pub buckets: Vec<(f64, u64)>,
    /// Seconds of all together.
    pub sum: f64,
}

impl Histogram {
    fn observe(&self, length: Duration) {
        let seconds = length.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn counts(&self) -> Counts {
        let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        Counts {
            buckets: bounds.zip(counts).collect(),
            sum: Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)).as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_kept_apart_by_resource_and_outcome() {
        let meters = Meters::default();
        let name: Arc<str> = "tessera.dev/gpu".into();
        meters.observe(Call::Allocate, &name, Outcome::Ok, Duration::from_millis(1));
        meters.observe(Call::Allocate, &name, Outcome::Ok, Duration::from_millis(1));
        meters.observe(Call::Allocate, &name, Outcome::Refused, Duration::from_millis(1));
        meters.observe(Call::PreStart, &name, Outcome::Ok, Duration::from_millis(1));
        let counted: Vec<(Outcome, u64)> = meters
            .calls(Call::Allocate)
            .into_iter()
            .map(|(_, outcome, counts)| (outcome, counts.buckets.iter().map(|(_, n)| n).sum()))
            .collect();
        assert_eq!(counted, [(Outcome::Ok, 2), (Outcome::Refused, 1)]);
    }

    #[test]
    fn a_duration_counts_in_the_first_bucket_that_holds_it() {
        let histogram = Histogram::default();
        for ms in [0, 1, 1, 3, 60_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let counts = histogram.counts();
        let of = |bound: f64| counts.buckets.iter().find(|(le, _)| *le == bound).unwrap().1;
        assert_eq!([of(0.0005), of(0.001), of(0.005), of(f64::INFINITY)], [1, 2, 1, 1]);
        assert_eq!(counts.buckets.iter().map(|(_, n)| n).sum::<u64>(), 5);
        assert!((counts.sum - 60.005).abs() < 1e-9);
    }
}
