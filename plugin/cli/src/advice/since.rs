//! How far back.

use std::str::FromStr;
use std::time::Duration;

use tessera_model::duration;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// A length of time before now: `90m`, `12h`, `7d`, `2w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since(Duration);

impl Since {
    /// The instant, Unix milliseconds; at least 1, because 0 stands for the beginning.
    pub fn before(self, now_unix_ms: i64) -> i64 {
        let back = i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX);
        now_unix_ms.saturating_sub(back).max(1)
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_inclusive(|c: char| c.is_ascii_alphabetic());
        let length = parts.map(part).try_fold(Duration::ZERO, |sum, part| sum.checked_add(part?));
        let length = length.filter(|_| !text.is_empty()).ok_or_else(|| {
            format!("\"{text}\" is no length of time; write it like 90m, 12h, 1d12h or 7d")
        })?;
        if length.is_zero() {
            return Err("nothing was seen in no time; write it like 90m, 12h or 7d".to_owned());
        }
        Ok(Since(length))
    }
}

/// A number with its unit.
fn part(text: &str) -> Option<Duration> {
    let days = [("d", DAY), ("w", 7 * DAY)].into_iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(number.checked_mul(seconds)?))
    });
    days.or_else(|| duration::parse(text).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_weeks_are_known() {
        for (text, seconds) in [
            ("90m", 5400),
            ("12h", 12 * HOUR),
            ("7d", 7 * DAY),
            ("2w", 14 * DAY),
            ("1h30m", 5400),
            ("1d12h", 36 * HOUR),
        ] {
            assert_eq!(text.parse(), Ok(Since(Duration::from_secs(seconds))), "{text}");
        }
        for text in [
            "",
            "0h",
            "0d",
            "d",
            "-1d",
            "1.5d",
            "7 d",
            "99999999999999999999d",
            "soon",
            "1h30",
            "h1",
            "1d-1h",
        ] {
            assert!(text.parse::<Since>().unwrap_err().contains("7d"), "{text}");
        }
        assert_eq!(Since(Duration::from_secs(HOUR)).before(7_200_000), 3_600_000);
        assert_eq!(Since(Duration::MAX).before(5), 1);
    }
}
