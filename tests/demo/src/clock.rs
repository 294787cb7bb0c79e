//! How far the demo is, and how long it takes in all. What waits for processes takes as long as it takes, so the end
//! moves when a part is late; what is shown never stands still and never runs past its end.

use std::time::Duration;

/// Parts with planned lengths, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    /// When each part ends if none is late.
    ends: Vec<Duration>,
    /// How many parts are over.
    over: usize,
    /// How late the last one of those ended; less than nothing is not counted.
    late: Duration,
}

impl Clock {
    /// For parts of these lengths.
    pub fn of(parts: impl IntoIterator<Item = Duration>) -> Self {
        let mut end = Duration::ZERO;
        let ends = parts.into_iter().map(|part| {
            end += part;
            end
        });
        Self { ends: ends.collect(), over: 0, late: Duration::ZERO }
    }

    /// A part is over, so long after the start.
    pub fn part_is_over(&mut self, elapsed: Duration) {
        if let Some(end) = self.ends.get(self.over) {
            self.late = elapsed.saturating_sub(*end);
            self.over += 1;
        }
    }

    /// How long it takes in all, as seen so long after the start; exact once the last part is over.
    pub fn total(&self, elapsed: Duration) -> Duration {
        let whole = self.ends.last().copied().unwrap_or_default();
        let Some(end) = self.ends.get(self.over) else { return elapsed };
        // The part that runs may be late already.
        let late = self.late.max(elapsed.saturating_sub(*end));
        whole + late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_has_passed_is_never_more_than_all_and_all_of_it_at_the_end() {
        for lengths in [[1.0, 1.0, 1.0], [0.5, 3.0, 0.9], [4.0, 0.1, 2.0]] {
            let mut clock = Clock::of([SECOND, SECOND, SECOND]);
            let mut now = Duration::ZERO;
            for length in lengths {
                let end = now + SECOND.mul_f64(length);
                while now < end {
                    // With parts to come there is always time left.
                    assert!(now < clock.total(now) || clock.over == 2, "{lengths:?} at {now:?}");
                    assert!(now <= clock.total(now), "{lengths:?} at {now:?}");
                    now += SECOND / 10;
                }
                now = end;
                clock.part_is_over(now);
            }
            assert_eq!(clock.total(now), now, "{lengths:?}");
        }
    }

    #[test]
    fn a_part_that_is_late_moves_the_end() {
        let mut clock = Clock::of([SECOND, SECOND]);
        assert_eq!(clock.total(Duration::ZERO), 2 * SECOND);
        assert_eq!(clock.total(3 * SECOND), 4 * SECOND, "a second is still to come");
        clock.part_is_over(3 * SECOND);
        assert_eq!(clock.total(3 * SECOND), 4 * SECOND);
    }
}
