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
    /// Adds one value.
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.max = self.max.max(ns);
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The highest value, exact.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value that `permille` thousandths of all do not exceed; 0 where nothing was recorded.
    pub fn permille(&self, permille: u64) -> u64 {
        let rank = (self.total * permille).div_ceil(1000).max(1);
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
    fn an_empty_histogram_answers_zero() {
        assert_eq!(Histogram::default().permille(990), 0);
    }
}
