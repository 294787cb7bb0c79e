//! How long the arbiter's turns took, in buckets of powers of two.

/// Bounds of the buckets: from 2^12 ns (4 µs) to 2^27 (134 ms).
const POWERS: std::ops::RangeInclusive<u32> = 12..=27;

/// A histogram of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnHistogram {
    /// Counts between each bound and the one before; the last counts all beyond.
    counts: [u64; 17],
    /// Sum of all durations, nanoseconds.
    pub sum_ns: u64,
}

impl TurnHistogram {
    pub(super) fn add(&mut self, ns: u64) {
        let place = POWERS.into_iter().position(|power| ns < 1 << power);
        self.counts[place.unwrap_or(self.counts.len() - 1)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Bounds in seconds, the last one infinite, with the count between each and the one before.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = POWERS.map(|power| f64::from(1u32 << power) / 1e9).chain([f64::INFINITY]);
        bounds.zip(self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_has_all_of_them_below_their_bounds() {
        let mut turns = TurnHistogram::default();
        [0, 4095, 4096, 5000, 1 << 20, u64::MAX >> 1].into_iter().for_each(|ns| turns.add(ns));
        let shown: Vec<u64> = turns.buckets().map(|(_, count)| count).collect();
        assert_eq!(shown.iter().sum::<u64>(), 6);
        // Below 4.096 µs, below 8.192 µs, below 2.1 ms, beyond.
        assert_eq!([shown[0], shown[1], shown[9], shown[16]], [2, 2, 1, 1]);
        assert_eq!(turns.buckets().next().unwrap().0, 0.000_004_096);
    }
}
