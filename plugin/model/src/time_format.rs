//! Instants as people read them, in UTC, as the log has them.

use jiff::Timestamp;

/// `2026-11-22 08:32:01` of a Unix time in milliseconds; a dash for 0, which stands for "never".
pub fn utc(unix_ms: i64) -> String {
    if unix_ms == 0 {
        return "-".to_owned();
    }
    timestamp(unix_ms).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// `08:32:01` of a Unix time in milliseconds.
pub fn clock(unix_ms: i64) -> String {
    timestamp(unix_ms).strftime("%H:%M:%S").to_string()
}

/// `2026-11-22T08:32:01Z` of a Unix time in milliseconds: RFC 3339, to the second, as Kubernetes writes times.
pub fn rfc3339(unix_ms: i64) -> String {
    timestamp(unix_ms).to_string()
}

/// The second that it is in; the calendar's first or last for what is beyond.
fn timestamp(unix_ms: i64) -> Timestamp {
    let beyond = if unix_ms < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::from_second(unix_ms.div_euclid(1000)).unwrap_or(beyond)
}

/// How long ago something was, in its two largest units: `3d 4h`, `12m 5s`, `8s`.
pub fn ago(since_unix_ms: i64, now_unix_ms: i64) -> String {
    let seconds = now_unix_ms.saturating_sub(since_unix_ms).max(0) / 1000;
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m {s}s"),
        (0, h, m, _) => format!("{h}h {m}m"),
        (d, h, _, _) => format!("{d}d {h}h"),
    }
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
    fn times_are_written_as_kubernetes_reads_them() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_795_340_700_999, "2026-11-22T09:45:00Z"),
            (4_107_542_399_000, "2100-02-28T23:59:59Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00Z"),
            (-1000, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(ms), text);
        }
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
