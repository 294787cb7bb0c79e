//! How long things took, in few words: a histogram whose buckets are an eighth of their value wide.

/// Nanoseconds up to 2^40; the last bucket has all that is longer.
const BUCKETS: usize = 320;

#[derive(Clone, Debug)]
pub(super) struct Latencies {
    counts: Box<[u32; BUCKETS]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { counts: Box::new([0; BUCKETS]) }
    }
}

fn bucket(ns: u64) -> usize {
    // Eight to each power of two, and one each below eight.
    let power = u64::from(ns.max(8).ilog2());
    let eighth = (ns >> (power - 3)) & 7;
    let index = if ns < 8 { ns } else { (power - 2) * 8 + eighth };
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The least that does not fall into it.
fn end(bucket: usize) -> u64 {
    let next = u64::try_from(bucket).unwrap_or(0) + 1;
    if next < 8 { next } else { (8 + next % 8) << (next / 8 - 1) }
}

impl Latencies {
    pub fn add(&mut self, ns: u64) {
        let count = &mut self.counts[bucket(ns)];
        *count = count.saturating_add(1);
    }

    /// What so many thousandths of them did not exceed, nanoseconds; 0 if there were none.
    pub fn quantile(&self, millis: u64) -> u64 {
        let sum: u64 = self.counts.iter().map(|count| u64::from(*count)).sum();
        let rank = (sum * millis).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
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
    fn quantiles_are_close() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(500), 0);
        (1..=1000).for_each(|us| latencies.add(us * 1000));
        let (half, most) = (latencies.quantile(500), latencies.quantile(990));
        assert!((500_000..570_000).contains(&half), "{half}");
        assert!((990_000..1_120_000).contains(&most), "{most}");
    }
}
