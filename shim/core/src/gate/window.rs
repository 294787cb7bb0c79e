//! How much may be in flight while the gate is open: so much that the GPU has work, so little that a
//! lease can end soon.
//!
//! How long an operation takes is told by markers. One that was waited for says when its operations
//! were complete; the one before it, or their launch, says when they can have begun. What was only
//! found complete bounds the duration from above, what began later than known from below. An
//! estimate that is too long costs markers, one that is too short lets too much into flight: it
//! rises at once by much, and falls slowly.

/// Most operations under one marker.
const BATCH: u32 = 16;
/// Where nobody has seen an operation end yet.
const UNKNOWN_NS: u32 = u32::MAX;

/// What is known of the durations of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Estimate {
    /// Nanoseconds.
    each_ns: u32,
    /// When the last marker was known to be complete, microseconds; and whether it was waited for.
    last_us: u32,
}

/// What may be in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Operations in flight.
    pub(crate) operations: u32,
    /// Operations under one marker.
    pub(crate) batch: u32,
}

/// What an observer of a marker knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sighting {
    pub(crate) operations: u32,
    /// Not before this can the first of them have been handed over.
    pub(crate) since_us: u32,
    pub(crate) now_us: u32,
    /// It was seen incomplete just before.
    pub(crate) awaited: bool,
}

impl Estimate {
    pub(crate) const fn new() -> Self {
        Self { each_ns: UNKNOWN_NS, last_us: 0 }
    }

    /// A marker is complete. Times wrap, and are compared over less than an hour.
    pub(crate) fn learn(&mut self, seen: Sighting) {
        let Sighting { operations, since_us, now_us, awaited } = seen;
        // The later of the two: they ran one after the other.
        let idle_us = self.last_us.wrapping_sub(since_us);
        let begun_us = if idle_us < u32::MAX / 2 { self.last_us } else { since_us };
        let span_ns = now_us.wrapping_sub(begun_us).min(4_000_000) * 1_000;
        let each_ns = span_ns / operations.max(1);
        if each_ns < self.each_ns {
            self.each_ns = match self.each_ns {
                UNKNOWN_NS => each_ns,
                before => before - (before - each_ns) / 4,
            };
        } else if awaited {
            // Within a factor of two it may be that the look came late.
            let more = each_ns - self.each_ns;
            self.each_ns += if more > self.each_ns { more } else { more / 4 };
        }
        self.last_us = now_us;
    }

    /// What may be in flight with the page's `window` and `window_us`.
    pub(crate) fn limits(self, window: u32, window_us: u32) -> Limits {
        if self.each_ns == UNKNOWN_NS {
            return Limits { operations: window.clamp(1, 2), batch: 1 };
        }
        let fit = u64::from(window_us) * 1_000 / u64::from(self.each_ns.max(1));
        let fit = u32::try_from(fit).unwrap_or(u32::MAX);
        let operations = fit.max(2).min(window.max(1));
        Limits { operations, batch: (operations / 2).clamp(1, BATCH) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `rounds` markers of `operations`, each of them `each_us` long, watched until complete.
    fn after(estimate: &mut Estimate, rounds: u32, operations: u32, each_us: u32) {
        for _ in 0..rounds {
            let now_us = estimate.last_us + operations * each_us;
            let since_us = estimate.last_us.saturating_sub(100);
            estimate.learn(Sighting { operations, since_us, now_us, awaited: true });
        }
    }

    #[test]
    fn begins_with_a_marker_for_each_and_grows_when_they_prove_short() {
        let mut estimate = Estimate::new();
        assert_eq!(estimate.limits(64, 500), Limits { operations: 2, batch: 1 });
        after(&mut estimate, 20, 1, 10);
        assert_eq!(estimate.limits(64, 500), Limits { operations: 50, batch: 16 });
        assert_eq!(estimate.limits(8, 500), Limits { operations: 8, batch: 4 });
    }

    #[test]
    fn two_operations_may_always_be_in_flight_unless_the_window_is_one() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 1, 8_000);
        assert_eq!(estimate.limits(64, 500), Limits { operations: 2, batch: 1 });
        assert_eq!(estimate.limits(1, 500), Limits { operations: 1, batch: 1 });
        assert_eq!(estimate.limits(0, 0), Limits { operations: 1, batch: 1 });
    }

    #[test]
    fn one_long_operation_narrows_the_window_at_once_and_short_ones_widen_it_again() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 4, 10);
        assert!(estimate.limits(64, 500).operations >= 50);
        after(&mut estimate, 1, 1, 5_000);
        assert_eq!(estimate.limits(64, 500).operations, 2);
        after(&mut estimate, 30, 1, 10);
        assert!(estimate.limits(64, 500).operations >= 40);
    }

    #[test]
    fn what_is_only_found_complete_never_raises_the_estimate() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 4, 10);
        let before = estimate.limits(64, 500);
        // The host launched one, slept a second, and looked.
        let now_us = estimate.last_us + 1_000_000;
        let since_us = estimate.last_us + 50;
        estimate.learn(Sighting { operations: 1, since_us, now_us, awaited: false });
        assert_eq!(estimate.limits(64, 500), before);
    }

    #[test]
    fn times_wrap() {
        let mut estimate = Estimate { each_ns: 10_000, last_us: u32::MAX - 5 };
        let since_us = u32::MAX - 100;
        estimate.learn(Sighting { operations: 1, since_us, now_us: 4, awaited: true });
        assert_eq!(estimate.each_ns, 10_000);
    }
}
