//! The time by which buckets grow old.
//!
//! A wall clock that is ahead for a while must take nothing away. So this time is the earliest that the wall clock said
//! within the last hours, plus what has passed since then by the clock that is never set. A clock that is set forward
//! is believed once it has stood for so long, one that is set back at once.

use std::collections::VecDeque;

/// How long a clock must stand before it is believed, seconds.
pub(crate) const STANDS: u64 = 6 * 3600;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct AgingClock {
    /// Where an earlier plugin stopped.
    resumed: Option<u32>,
    /// By the clock that is never set: when the wall clock was so far ahead of it, seconds. Both grow.
    readings: VecDeque<(u64, i64)>,
}

impl AgingClock {
    /// Goes on from the second at which an earlier plugin stopped.
    pub(crate) fn new(resumed: Option<u32>) -> Self {
        AgingClock { resumed, readings: VecDeque::new() }
    }

    /// The second by which buckets are old now. `monotonic` never goes back while this lives.
    pub(crate) fn read(&mut self, wall: u32, monotonic: u64) -> u32 {
        let behind = i64::try_from(monotonic).unwrap_or(i64::MAX);
        if let Some(second) = self.resumed.take() {
            self.note(monotonic, i64::from(second) - behind);
        }
        self.note(monotonic, i64::from(wall) - behind);
        while self.readings.len() > 1
            && self.readings.front().is_some_and(|(at, _)| at.saturating_add(STANDS) < monotonic)
        {
            self.readings.pop_front();
        }
        let earliest = self.readings.front().map_or(0, |(_, ahead)| *ahead);
        u32::try_from(earliest.saturating_add(behind).max(0)).unwrap_or(u32::MAX).min(wall)
    }

    /// An earlier reading that was no less counts no more.
    fn note(&mut self, monotonic: u64, ahead: i64) {
        while self.readings.back().is_some_and(|(_, before)| *before >= ahead) {
            self.readings.pop_back();
        }
        self.readings.push_back((monotonic, ahead));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const T0: u32 = 1_750_032_000;
    const MINUTE: u64 = 60;

    #[test]
    fn a_clock_that_is_right_is_believed_at_once() {
        let mut clock = AgingClock::default();
        for minute in 0..1000u32 {
            assert_eq!(clock.read(T0 + minute * 60, u64::from(minute) * 60), T0 + minute * 60);
        }
    }

    #[test]
    fn a_clock_that_is_set_forward_is_believed_once_it_has_stood() {
        let mut clock = AgingClock::new(Some(T0));
        let year = 365 * 86_400;
        for second in (0..=STANDS).step_by(60) {
            let now = u32::try_from(second).unwrap();
            assert_eq!(clock.read(T0 + year + now, second), T0 + now, "{second}");
        }
        let now = STANDS + MINUTE;
        let second = T0 + year + u32::try_from(now).unwrap();
        assert_eq!(clock.read(second, now), second);
        // Back again, at once.
        assert_eq!(clock.read(T0, now + 1), T0);
    }

    proptest! {
        #[test]
        fn no_more_is_old_than_any_clock_of_the_last_hours_says(
            resumed in prop::option::of(any::<u32>()),
            readings in prop::collection::vec((any::<u32>(), 0u64..8000), 1..40),
        ) {
            let mut clock = AgingClock::new(resumed);
            let (mut monotonic, mut said) = (0u64, Vec::new());
            for (wall, passed) in readings {
                monotonic += passed;
                if said.is_empty() {
                    said.extend(resumed.map(|second| (monotonic, second)));
                }
                said.push((monotonic, wall));
                let recent = said.iter().filter(|(at, _)| at + STANDS >= monotonic);
                let least = recent.map(|(at, wall)| u64::from(*wall) + monotonic - at).min();
                let old = clock.read(wall, monotonic);
                prop_assert_eq!(Some(u64::from(old)), least.map(|least| least.min(u64::from(wall))));
            }
        }
    }
}
