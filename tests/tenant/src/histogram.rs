//! Latencies in logarithmic buckets: constant memory however long a tenant serves.

/// Sub-buckets per power of two: a percentile is at most 1/128 too high.
const SUB_BITS: u32 = 7;
const SUB: usize = 1 << SUB_BITS;

/// Counts of nanosecond values, with percentiles within 0.8 %.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = SUB * (64 - SUB_BITS as usize + 1);
        Self { counts: vec![0; buckets], total: 0, max: 0 }
    }
}

impl Histogram {
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.max = self.max.max(ns);
    }

    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    pub fn count(&self) -> u64 {
        self.total
    }

    /// The highest value, exact.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value that `permille` thousandths of all do not exceed; 0 where nothing was recorded.
    pub fn permille(&self, permille: u64) -> u64 {
        self.of_rank((self.total * permille).div_ceil(1000))
    }

    /// A lower bound of the 99th percentile, for a comparison with that of another series of about as many values.
    /// If both come from one distribution, this exceeds the other's 99th percentile in less than one case of a
    /// hundred: of the other series a hundredth lies beyond it; the square roots of such counts are nearly normal
    /// (Anscombe 1948), each with variance 1/4.
    #[allow(clippy::cast_precision_loss, reason = "counts of requests")]
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 to the total"
    )]
    pub fn p99_at_least(&self) -> u64 {
        // One-sided, 99 %.
        const SPREAD: f64 = 2.33;
        let total = self.total as f64;
        let beyond = ((total * 0.01 + 0.375).sqrt() + SPREAD * 0.5_f64.sqrt()).powi(2) - 0.375;
        self.of_rank((total - beyond.ceil()).max(0.0) as u64)
    }

    /// The value that so many of all do not exceed; at least the smallest.
    fn of_rank(&self, rank: u64) -> u64 {
        let rank = rank.max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return upper(index).min(self.max);
            }
        }
        self.max
    }
}

fn bucket(ns: u64) -> usize {
    let bits = 64 - ns.leading_zeros();
    let exponent = bits.saturating_sub(SUB_BITS + 1);
    // In 0..2*SUB for exponent 0, in SUB..2*SUB beyond: fits any usize.
    let mantissa = usize::try_from(ns >> exponent).unwrap_or(usize::MAX);
    (exponent as usize) * SUB + mantissa
}

fn upper(index: usize) -> u64 {
    if index < 2 * SUB {
        return index as u64;
    }
    let exponent = index / SUB - 1;
    let mantissa = (index - exponent * SUB) as u64;
    ((mantissa + 1) << exponent).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_falls_into_a_bucket_that_contains_it() {
        let mut ns = 1u64;
        while ns < u64::MAX / 3 {
            for value in [ns - 1, ns, ns + 1, ns * 2 - 1] {
                let index = bucket(value);
                assert!(upper(index) >= value, "{value} above its bucket");
                assert!(index == 0 || upper(index - 1) < value, "{value} below its bucket");
                assert!(upper(index) - value <= value / 128, "{value} too coarse");
            }
            ns = ns * 2 + 1;
        }
        assert!(bucket(u64::MAX) < Histogram::default().counts.len());
    }

    #[test]
    fn percentiles_of_a_known_series() {
        let mut h = Histogram::default();
        for ns in 1..=1000 {
            h.record(ns);
        }
        assert_eq!(h.count(), 1000);
        assert!((500..=504).contains(&h.permille(500)), "{}", h.permille(500));
        assert!((990..=998).contains(&h.permille(990)), "{}", h.permille(990));
        assert_eq!(h.permille(1000), 1000);
        assert_eq!(h.max(), 1000);
    }

    #[test]
    fn a_few_values_say_little_of_the_99th_percentile() {
        let of = |count: u64| {
            let mut h = Histogram::default();
            (1..=count).for_each(|ns| h.record(ns));
            h.p99_at_least() * 1000 / count
        };
        assert!(of(100) < 970 && of(1000) > 970 && of(100_000) > 985, "{}", of(1000));
    }

    /// The law that its text states, over series of one distribution with a long tail.
    #[test]
    fn two_series_of_one_distribution_are_distinguished_less_than_once_in_a_hundred() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut series = || {
            let mut h = Histogram::default();
            for _ in 0..300 {
                h.record(1_000_000_000 / (1 + rng.u64(..1000)));
            }
            h
        };
        let apart = (0..2000).filter(|_| series().p99_at_least() > series().permille(990)).count();
        assert!(apart < 20, "{apart} of 2000");
    }

    #[test]
    fn an_empty_histogram_answers_zero() {
        assert_eq!(Histogram::default().permille(990), 0);
        assert_eq!(Histogram::default().p99_at_least(), 0);
    }
}
