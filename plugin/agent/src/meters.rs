//! Counters that are kept where events happen; other figures are read on demand.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::histogram::{Counts, Histogram};
use tessera_system::locks::lock;

/// A call of kubelet's that is timed.
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

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Answered.
    Ok,
    /// Refused, because of what was asked for.
    Refused,
    /// Something of ours failed.
    Failed,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 3] = [Outcome::Ok, Outcome::Refused, Outcome::Failed];

    /// As a label has it.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
        }
    }
}

type Key = (Call, Arc<str>, Outcome);

/// See the module.
#[derive(Debug, Default)]
pub struct Meters {
    /// As many as there are resources; held for a look-up.
    calls: Mutex<BTreeMap<Key, Arc<Histogram>>>,
    reloads: AtomicU64,
    reloads_refused: AtomicU64,
    /// Whether the last one was refused.
    reload_refused: AtomicU64,
    /// When the configuration in force was read, Unix milliseconds.
    configured_unix_ms: AtomicI64,
}

/// Reloads of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reloads {
    pub taken: u64,
    /// Refused, the last good one stayed.
    pub refused: u64,
    /// The last one was not refused.
    pub last_ok: bool,
    /// When the configuration in force was read, Unix milliseconds.
    pub configured_unix_ms: i64,
}

impl Meters {
    /// Of a plugin that starts now.
    pub fn new(now_unix_ms: i64) -> Self {
        Meters { configured_unix_ms: AtomicI64::new(now_unix_ms), ..Meters::default() }
    }

    /// Counts a call.
    pub fn observe(&self, call: Call, resource: &Arc<str>, outcome: Outcome, length: Duration) {
        let key = (call, Arc::clone(resource), outcome);
        let mut calls = lock(&self.calls);
        let histogram = Arc::clone(calls.entry(key).or_default());
        drop(calls);
        histogram.observe(length);
    }

    /// Counts of a call, by resource and outcome.
    pub fn calls(&self, call: Call) -> Vec<(Arc<str>, Outcome, Counts)> {
        let calls = lock(&self.calls);
        let of_it = calls.iter().filter(|((kind, ..), _)| *kind == call);
        of_it.map(|((_, name, outcome), h)| (Arc::clone(name), *outcome, h.counts())).collect()
    }

    /// The configuration was read again, and taken (`ok`) or refused.
    pub fn reloaded(&self, ok: bool, now_unix_ms: i64) {
        self.reload_refused.store(u64::from(!ok), Ordering::Relaxed);
        if ok {
            self.reloads.fetch_add(1, Ordering::Relaxed);
            self.configured_unix_ms.store(now_unix_ms, Ordering::Relaxed);
        } else {
            self.reloads_refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// See [`Reloads`].
    pub fn reloads(&self) -> Reloads {
        Reloads {
            taken: self.reloads.load(Ordering::Relaxed),
            refused: self.reloads_refused.load(Ordering::Relaxed),
            last_ok: self.reload_refused.load(Ordering::Relaxed) == 0,
            configured_unix_ms: self.configured_unix_ms.load(Ordering::Relaxed),
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
    fn a_refused_reload_leaves_the_time_of_the_last_good_one() {
        let meters = Meters::new(5);
        meters.reloaded(true, 7);
        meters.reloaded(false, 9);
        let want = Reloads { taken: 1, refused: 1, last_ok: false, configured_unix_ms: 7 };
        assert_eq!(meters.reloads(), want);
        meters.reloaded(true, 11);
        assert!(meters.reloads().last_ok);
    }
}
