//! A token bucket: how many messages one sender may send. Integer arithmetic, pure.

use std::time::{Duration, Instant};

/// Starts full.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    tokens: u32,
    size: u32,
    interval: Duration,
    refilled: Instant,
}

impl TokenBucket {
    /// `rate` tokens a second, at most `size` at once.
    pub fn new(size: u32, rate: u32, now: Instant) -> Self {
        Self::every(size, Duration::from_secs(1) / rate.max(1), now)
    }

    /// A token comes back every `interval`, at most `size` at once.
    pub fn every(size: u32, interval: Duration, now: Instant) -> Self {
        TokenBucket { tokens: size, size, interval, refilled: now }
    }

    /// Whether as many tokens are there as can be.
    pub fn is_full(&self, now: Instant) -> bool {
        let missing = self.size - self.tokens;
        now.saturating_duration_since(self.refilled) >= self.interval * missing
    }

    /// Takes a token, or says how long until there is one.
    ///
    /// # Errors
    /// The time until the next token.
    pub fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let elapsed = now.saturating_duration_since(self.refilled);
        let earned = elapsed.as_nanos() / self.interval.as_nanos().max(1);
        if let Ok(earned) = u32::try_from(earned)
            && earned < self.size - self.tokens
        {
            // The remainder stays for the next time.
            self.refilled += self.interval * earned;
            self.tokens += earned;
        } else {
            self.refilled = now;
            self.tokens = self.size;
        }
        match self.tokens.checked_sub(1) {
            Some(left) => {
                self.tokens = left;
                Ok(())
            }
            None => Err(self.interval.saturating_sub(now.saturating_duration_since(self.refilled))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(3, 10, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        assert_eq!(bucket.take(start), Err(Duration::from_millis(100)));
        assert_eq!(bucket.take(start + Duration::from_millis(60)), Err(Duration::from_millis(40)));
        assert_eq!(bucket.take(start + Duration::from_millis(100)), Ok(()));
        assert!(bucket.take(start + Duration::from_millis(100)).is_err());
    }

    proptest! {
        #[test]
        fn no_more_than_size_plus_rate_passes(
            size in 1u32..50, rate in 1u32..1000,
            steps in prop::collection::vec(0u64..20_000_000, 1..300),
        ) {
            let start = Instant::now();
            let (mut bucket, mut now, mut passed) = (TokenBucket::new(size, rate, start), start, 0u128);
            for step in steps {
                now += Duration::from_nanos(step);
                if bucket.take(now).is_ok() {
                    passed += 1;
                }
            }
            let elapsed = now.duration_since(start).as_nanos();
            let interval = (Duration::from_secs(1) / rate).as_nanos();
            prop_assert!(passed <= u128::from(size) + elapsed / interval);
        }

        #[test]
        fn waiting_as_answered_is_enough(size in 1u32..9, rate in 1u32..1000, takes in 1usize..40) {
            let mut now = Instant::now();
            let mut bucket = TokenBucket::new(size, rate, now);
            for _ in 0..takes {
                if let Err(wait) = bucket.take(now) {
                    now += wait;
                    prop_assert_eq!(bucket.take(now), Ok(()));
                }
            }
        }
    }
}
