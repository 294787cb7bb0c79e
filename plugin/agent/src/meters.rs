//! Counters that are kept where events happen; other figures are read on demand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use strum::IntoStaticStr;
use tessera_system::locks::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    Allocate,
    PreStart,
    /// NodePrepareResources, of one claim.
    Prepare,
    /// NodeUnprepareResources, of one claim.
    Unprepare,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Outcome {
    Ok,
    /// Refused, because of what was asked for.
    Refused,
    Failed,
}

type Key = (Call, Arc<str>, Outcome);

#[derive(Debug, Default)]
pub struct Meters(Mutex<BTreeMap<Key, Counts>>);

impl Meters {
    pub fn observe(&self, call: Call, resource: &Arc<str>, outcome: Outcome, length: Duration) {
        let key = (call, Arc::clone(resource), outcome);
        lock(&self.0).entry(key).or_default().observe(length);
    }

    pub fn calls(&self, call: Call) -> Vec<(Arc<str>, Outcome, Counts)> {
        let calls = lock(&self.0);
        let of_it = calls.iter().filter(|((kind, ..), _)| *kind == call);
        of_it.map(|((_, name, outcome), h)| (Arc::clone(name), *outcome, h.clone())).collect()
    }
}

/// Upper bounds of the buckets of kubelet's calls, seconds.
const BOUNDS: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, f64::INFINITY];

/// Durations, counted in buckets that never change.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Upper bound in seconds and how many were not larger, but larger than the bound before.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
}

impl Default for Counts {
    fn default() -> Self {
        Counts { buckets: BOUNDS.map(|bound| (bound, 0)).to_vec(), sum: 0.0 }
    }
}

impl Counts {
    fn observe(&mut self, length: Duration) {
        let seconds = length.as_secs_f64();
        if let Some((_, count)) = self.buckets.iter_mut().find(|(bound, _)| seconds <= *bound) {
            *count += 1;
        }
        self.sum += seconds;
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
        let mut counts = Counts::default();
        for ms in [0, 1, 1, 3, 60_000] {
            counts.observe(Duration::from_millis(ms));
        }
        let of = |bound: f64| counts.buckets.iter().find(|(le, _)| *le == bound).unwrap().1;
        assert_eq!([of(0.0005), of(0.001), of(0.005), of(f64::INFINITY)], [1, 2, 1, 1]);
        assert_eq!(counts.buckets.iter().map(|(_, n)| n).sum::<u64>(), 5);
        assert!((counts.sum - 60.005).abs() < 1e-9);
    }
}
