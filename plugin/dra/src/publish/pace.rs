//! How fast writes follow each other, and how long a failure is waited out. Pure.

use std::time::{Duration, Instant};

use tessera_cluster::error::{ApiError, Retry};

/// Writes that may follow each other at once.
const BURST: u32 = 10;
/// Then one in this time.
const REFILL: Duration = Duration::from_millis(500);
/// Pause after a first failure that passes by itself; it doubles …
const SHORTEST: Duration = Duration::from_millis(250);
/// … up to this.
const LONGEST: Duration = Duration::from_secs(30);
/// Pause after a failure that a person must mend.
const LATER: Duration = Duration::from_secs(60);
/// So many failures in a row a 403 counts as one that passes by itself: some 16 s.
const EARLY: u32 = 6;
/// Pause after slices were removed by another; it doubles with each time …
const WIPED: Duration = Duration::from_secs(1);
/// … that comes within this of the one before.
const WIPED_WITHIN: Duration = Duration::from_secs(60);

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Writes in advance, and since when that counts.
    spent: u32,
    refilled: Option<Instant>,
    failures: u32,
    /// Nothing is asked before.
    asks_at: Option<Instant>,
    wipes: u32,
    wiped: Option<Instant>,
    /// Nothing is made before.
    makes_at: Option<Instant>,
}

impl Pace {
    /// How long to wait before anything is asked of the API server.
    pub(super) fn before_asking(&self, now: Instant) -> Option<Duration> {
        left(self.asks_at, now)
    }

    /// How long to wait before slices are written.
    pub(super) fn before_writing(&self, now: Instant) -> Option<Duration> {
        let rate = match (self.spent >= BURST, self.refilled) {
            (true, Some(then)) => left(Some(then + REFILL), now),
            _ => None,
        };
        rate.max(left(self.makes_at, now))
    }

    /// A write was made.
    pub(super) fn wrote(&mut self, now: Instant) {
        let since = *self.refilled.get_or_insert(now);
        let back = now.saturating_duration_since(since).as_millis() / REFILL.as_millis();
        let back = u32::try_from(back).unwrap_or(u32::MAX);
        if back > 0 {
            self.refilled = Some(now);
        }
        self.spent = self.spent.saturating_sub(back).min(BURST) + 1;
    }

    /// The server answered.
    pub(super) fn succeeded(&mut self) {
        (self.failures, self.asks_at) = (0, None);
    }

    /// The server did not, or refused.
    pub(super) fn failed(&mut self, error: &ApiError, now: Instant) {
        let doubled = SHORTEST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        let is_early = self.failures < EARLY;
        let pause = match error.retry() {
            // An API server that has just started denies everything for some seconds.
            Retry::Later if is_early && matches!(error, ApiError::Forbidden { .. }) => doubled,
            Retry::Soon | Retry::Reread | Retry::Never => doubled,
            Retry::Later => LATER,
        };
        let asked = match error {
            ApiError::Busy { after, .. } => after.unwrap_or_default().min(LATER),
            _ => Duration::ZERO,
        };
        self.failures = self.failures.saturating_add(1);
        self.asks_at = Some(now + pause.max(asked));
    }

    /// Somebody removed slices. Several removals in one pause are one.
    pub(super) fn wiped(&mut self, now: Instant) -> bool {
        if left(self.makes_at, now).is_some() {
            return false;
        }
        let again =
            self.wiped.is_some_and(|then| now.saturating_duration_since(then) < WIPED_WITHIN);
        self.wipes = if again { self.wipes.saturating_add(1) } else { 0 };
        self.wiped = Some(now);
        self.makes_at = Some(now + WIPED.saturating_mul(1 << self.wipes.min(10)).min(LONGEST));
        true
    }
}

fn left(until: Option<Instant>, now: Instant) -> Option<Duration> {
    until?.checked_duration_since(now).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use tessera_cluster::error::{Call, Kind, Verb};

    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_burst_goes_through_and_then_one_at_a_time() {
        let (mut pace, begin) = (Pace::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(pace.before_writing(begin), None);
            pace.wrote(begin);
        }
        assert_eq!(pace.before_writing(begin), Some(REFILL));
        let mut now = begin + REFILL;
        for _ in 0..5 {
            assert_eq!(pace.before_writing(now), None);
            pace.wrote(now);
            assert!(pace.before_writing(now + MILLI).is_some());
            now += REFILL;
        }
        now += REFILL * 20;
        pace.wrote(now);
        assert_eq!(pace.before_writing(now), None);
    }

    #[test]
    fn failures_are_waited_out_longer_each_time() {
        let call = Call::new(Verb::List, Kind::Slices, "");
        let error = ApiError::Unreachable { call: call.clone(), reason: "x".to_owned() };
        let (mut pace, now) = (Pace::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..10 {
            pace.failed(&error, now);
            pauses.push(pace.before_asking(now).unwrap());
        }
        assert_eq!(pauses[..3], [SHORTEST, SHORTEST * 2, SHORTEST * 4]);
        assert_eq!(pauses[9], LONGEST);
        pace.succeeded();
        assert_eq!(pace.before_asking(now), None);
        let forbidden = ApiError::Forbidden { call: call.clone(), message: String::new() };
        let pauses: Vec<_> = (0..EARLY + 2)
            .map(|_| {
                pace.failed(&forbidden, now);
                pace.before_asking(now).unwrap()
            })
            .collect();
        assert_eq!(pauses[..2], [SHORTEST, SHORTEST * 2], "the server may have just started");
        assert_eq!(pauses[6..], [LATER, LATER], "a right that lacks is asked for once a minute");
        pace.succeeded();
        let after = Some(Duration::from_secs(7));
        pace.failed(&ApiError::Busy { call, status: 429, after, message: String::new() }, now);
        assert_eq!(pace.before_asking(now), after);
    }

    #[test]
    fn whoever_removes_slices_over_and_over_is_given_more_time() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            assert!(pace.wiped(now));
            assert!(!pace.wiped(now + MILLI), "the same wipe");
            let pause = pace.before_writing(now).unwrap();
            assert_eq!(pause, Duration::from_secs(seconds));
            now += pause;
        }
        assert!(pace.wiped(now + WIPED_WITHIN * 2));
        assert_eq!(pace.before_writing(now + WIPED_WITHIN * 2), Some(WIPED));
    }
}
