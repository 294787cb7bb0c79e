//! A compact histogram of durations; a bucket is a sixteenth of its value wide.

use hdrhistogram::Histogram;

/// Longer durations count as this, nanoseconds.
const MOST_NS: u64 = 1 << 40;

/// Bounds of the exported buckets: powers of two, from 2^12 ns (4 µs) to 2^27 (134 ms).
const POWERS: std::ops::RangeInclusive<u32> = 12..=27;

/// An exported histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnHistogram {
    /// Counts between each bound and the one before; the last counts all beyond.
    counts: [u64; 17],
    /// Sum of all durations, nanoseconds.
    pub sum_ns: u64,
}

impl TurnHistogram {
    /// Bounds in seconds, the last one infinite, with the count between each and the one before.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = POWERS.map(|power| f64::from(1u32 << power) / 1e9).chain([f64::INFINITY]);
        bounds.zip(self.counts)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Latencies {
    counts: Histogram<u64>,
    sum_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        let counts = Histogram::new_with_max(MOST_NS, 1).expect("a digit, and room for two");
        Latencies { counts, sum_ns: 0 }
    }
}

impl Latencies {
    pub fn add(&mut self, ns: u64) {
        self.counts.saturating_record(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// The exported histogram.
    pub fn turns(&self) -> TurnHistogram {
        let mut turns = TurnHistogram { sum_ns: self.sum_ns, ..TurnHistogram::default() };
        for bucket in self.counts.iter_recorded() {
            let fits = |power: &u32| bucket.value_iterated_to() < 1 << power;
            let place = POWERS.into_iter().position(|power| fits(&power));
            turns.counts[place.unwrap_or(turns.counts.len() - 1)] += bucket.count_at_value();
        }
        turns
    }

    /// The value that `millis` thousandths of all durations do not exceed, nanoseconds; 0 without any.
    pub fn quantile(&self, millis: u32) -> u64 {
        self.counts.value_at_quantile(f64::from(millis) / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_has_all_of_them_below_their_bounds() {
        let mut latencies = Latencies::default();
        [0, 4095, 4096, 5000, 1 << 20, u64::MAX >> 1].into_iter().for_each(|ns| latencies.add(ns));
        let turns = latencies.turns();
        let shown: Vec<u64> = turns.buckets().map(|(_, count)| count).collect();
        assert_eq!(shown.iter().sum::<u64>(), 6);
        // Below 4.096 µs, below 8.192 µs, below 2.1 ms, beyond.
        assert_eq!([shown[0], shown[1], shown[9], shown[16]], [2, 2, 1, 1]);
        assert_eq!(turns.buckets().next().unwrap().0, 0.000_004_096);
    }

    #[test]
    fn quantiles_are_close() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(500), 0);
        (1..=1000).for_each(|us| latencies.add(us * 1000));
        let (half, most) = (latencies.quantile(500), latencies.quantile(990));
        assert!((500_000..570_000).contains(&half), "{half}");
        assert!((990_000..1_120_000).contains(&most), "{most}");
    }
}
