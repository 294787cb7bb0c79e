//! Durations, counted in buckets that never change. No lock, no allocation once made.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets of kubelet's calls, seconds; beyond them is one more.
pub const BOUNDS: [f64; 12] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// See the module.
#[derive(Debug, Default)]
pub struct Histogram {
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
    /// Counts one.
    pub fn observe(&self, length: Duration) {
        let seconds = length.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// As it is now.
    pub fn counts(&self) -> Counts {
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
