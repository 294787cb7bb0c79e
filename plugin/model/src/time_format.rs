//! Instants as people read them, in UTC, as the log has them.

/// `2026-11-22 08:32:01` of a Unix time in milliseconds; a dash for 0, which stands for "never".
#[must_use]
pub fn utc(unix_ms: i64) -> String {
    if unix_ms == 0 {
        return "-".to_owned();
    }
    let seconds = unix_ms.div_euclid(1000);
    let (year, month, day) = date(seconds.div_euclid(86_400));
    format!("{year:04}-{month:02}-{day:02} {}", clock(unix_ms))
}

/// `08:32:01` of a Unix time in milliseconds.
#[must_use]
pub fn clock(unix_ms: i64) -> String {
    let of_day = unix_ms.div_euclid(1000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// How long ago something was, in its two largest units: `3d 4h`, `12m 5s`, `8s`.
#[must_use]
pub fn ago(since_unix_ms: i64, now_unix_ms: i64) -> String {
    let seconds = now_unix_ms.saturating_sub(since_unix_ms).max(0) / 1000;
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m {s}s"),
        (0, h, m, _) => format!("{h}h {m}m"),
        (d, h, _, _) => format!("{d}d {h}h"),
    }
}

/// Year, month and day of a number of days since 1970-01-01 in the proleptic Gregorian calendar, by
/// counting from a March 1st: leap days then come last. Days beyond any calendar are cut off.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days.clamp(-1_000_000_000, 1_000_000_000) + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_are_written_in_utc() {
        for (seconds, text) in [
            (1, "1970-01-01 00:00:01"),
            (-1, "1969-12-31 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
            (1_795_336_321, "2026-11-22 08:32:01"),
        ] {
            assert_eq!(utc(seconds * 1000), text);
        }
        assert_eq!(utc(0), "-");
        let _ = (utc(i64::MAX), utc(i64::MIN));
    }

    #[test]
    fn lengths_have_two_units() {
        for (seconds, text) in
            [(0, "0s"), (59, "59s"), (61, "1m 1s"), (7260, "2h 1m"), (97_200, "1d 3h"), (-5, "0s")]
        {
            assert_eq!(ago(0, seconds * 1000), text);
        }
        assert_eq!(ago(i64::MIN, i64::MAX), ago(0, i64::MAX));
    }
}
