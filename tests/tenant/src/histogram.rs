//! Latencies in logarithmic buckets: constant memory however long a tenant serves.

/// Counts of nanosecond values, with percentiles within 0.1 %.
#[derive(Clone, Debug)]
pub struct Histogram(hdrhistogram::Histogram<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Self(
            hdrhistogram::Histogram::new_with_max(u64::MAX >> 1, 3)
                .expect("room, and three digits"),
        )
    }
}

impl Histogram {
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    pub fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same room");
    }

    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The highest value, within 0.1 %.
    pub fn max(&self) -> u64 {
        self.0.max()
    }

    /// The value that `permille` thousandths of all do not exceed; 0 where nothing was recorded.
    pub fn permille(&self, permille: u32) -> u64 {
        self.0.value_at_quantile(f64::from(permille) / 1000.0)
    }

    /// A lower bound of the 99th percentile, for a comparison with that of another series of about as many values.
    /// If both come from one distribution, this exceeds the other's 99th percentile in less than one case of a
    /// hundred: of the other series a hundredth lies beyond it; the square roots of such counts are nearly normal
    /// (Anscombe 1948), each with variance 1/4.
    #[allow(clippy::cast_precision_loss, reason = "counts of requests")]
    pub fn p99_at_least(&self) -> u64 {
        // One-sided, 99 %.
        const SPREAD: f64 = 2.33;
        let total = self.count() as f64;
        let beyond = ((total * 0.01 + 0.375).sqrt() + SPREAD * 0.5_f64.sqrt()).powi(2) - 0.375;
        self.0.value_at_quantile(((total - beyond.ceil()) / total).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
