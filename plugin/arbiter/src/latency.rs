//! A compact histogram of durations; a bucket is an eighth of its value wide.

/// Nanoseconds up to 2^40; the last bucket has all that is longer.
const BUCKETS: usize = 320;

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
    counts: Box<[u64; BUCKETS]>,
    sum_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { counts: Box::new([0; BUCKETS]), sum_ns: 0 }
    }
}

fn bucket(ns: u64) -> usize {
    // Eight buckets for each power of two, and one for each value below eight.
    let power = u64::from(ns.max(8).ilog2());
    let eighth = (ns >> (power - 3)) & 7;
    let index = if ns < 8 { ns } else { (power - 2) * 8 + eighth };
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The smallest value beyond the bucket.
fn end(bucket: usize) -> u64 {
    let next = u64::try_from(bucket).unwrap_or(0) + 1;
    if next < 8 { next } else { (8 + next % 8) << (next / 8 - 1) }
}

impl Latencies {
    pub fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// The exported histogram.
    pub fn turns(&self) -> TurnHistogram {
        let mut turns = TurnHistogram { sum_ns: self.sum_ns, ..TurnHistogram::default() };
        for (index, count) in self.counts.iter().enumerate() {
            let fits = |power: &u32| end(index) <= 1 << power;
            let place = POWERS.into_iter().position(|power| fits(&power));
            turns.counts[place.unwrap_or(turns.counts.len() - 1)] += count;
        }
        turns
    }

    /// The value that `millis` thousandths of all durations do not exceed, nanoseconds; 0 without any.
    pub fn quantile(&self, millis: u64) -> u64 {
        let sum: u64 = self.counts.iter().sum();
        let rank = (sum * millis).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return end(index);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_an_eighth_wide() {
        for ns in (0..5000).chain((13..40).map(|power| 1 << power)) {
            let end = end(bucket(ns));
            assert!(ns < end && end - ns <= (ns / 8).max(1), "{ns} {end}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

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
