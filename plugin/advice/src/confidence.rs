//! How much what was seen is worth.

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// How far advice is to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Hardly: little was seen.
    Low,
    /// Daily or weekly peaks may be missing.
    Medium,
    /// A whole day was seen, of several pods or for days.
    High,
}

/// What confidence is judged by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Over all pods.
    pub observed_ms: u64,
    pub pods: usize,
    /// The hours of the day that were seen, a bit each.
    pub hours: u32,
}

impl Confidence {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Confidence::Low => "low",
            Confidence::Medium => "medium",
            Confidence::High => "high",
        }
    }

    pub(crate) fn of(seen: Seen) -> Self {
        if seen.observed_ms < HOUR_MS {
            Confidence::Low
        } else if seen.full_day() && (seen.pods > 1 || seen.observed_ms >= 3 * DAY_MS) {
            Confidence::High
        } else {
            Confidence::Medium
        }
    }

    /// One less.
    pub(crate) fn lowered(self) -> Self {
        match self {
            Confidence::High => Confidence::Medium,
            Confidence::Medium | Confidence::Low => Confidence::Low,
        }
    }
}

impl Seen {
    /// Notes a stretch of time.
    pub fn note(&mut self, from_unix_ms: i64, to_unix_ms: i64) {
        let hour = |unix_ms: i64| unix_ms.div_euclid(HOUR_MS as i64);
        let (first, last) = (hour(from_unix_ms), hour(to_unix_ms.saturating_sub(1)));
        // A day has them all.
        for hour in first..=last.min(first.saturating_add(23)) {
            self.hours |= 1 << hour.rem_euclid(24);
        }
    }

    /// Every hour of the day was seen, at least in part.
    pub fn full_day(&self) -> bool {
        self.hours == (1 << 24) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_grows_with_time_pods_and_a_whole_day() {
        let seen = |hours: u64, pods, day: bool| Seen {
            observed_ms: hours * HOUR_MS,
            pods,
            hours: if day { (1 << 24) - 1 } else { 0b111 },
        };
        assert_eq!(Confidence::of(Seen::default()), Confidence::Low);
        assert_eq!(Confidence::of(seen(5, 3, false)), Confidence::Medium);
        assert_eq!(Confidence::of(seen(24, 1, true)), Confidence::Medium);
        assert_eq!(Confidence::of(seen(48, 2, true)), Confidence::High);
        assert_eq!(Confidence::of(seen(72, 1, true)), Confidence::High);
    }

    #[test]
    fn hours_of_the_day_are_noted() {
        let mut seen = Seen::default();
        let hour = HOUR_MS as i64;
        seen.note(0, hour);
        assert_eq!(seen.hours, 1);
        seen.note(47 * hour + 1, 48 * hour + 1);
        assert_eq!(seen.hours, 1 | 1 << 23);
        seen.note(i64::MIN, i64::MAX);
        assert!(seen.full_day());
        // A clock that runs backwards says nothing.
        let mut backwards = Seen::default();
        backwards.note(hour, 0);
        assert_eq!(backwards.hours, 0);
    }
}
