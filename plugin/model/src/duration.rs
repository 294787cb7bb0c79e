//! Lengths of time as people write them: `500ms`, `10s`, `5m`, `1h`.

use std::time::Duration;

/// Each unit with its milliseconds.
pub const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];

/// Reads one.
pub fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = UNITS.iter().find(|(unit, _)| *unit == &text[digits.len()..]);
    let millis = unit.and_then(|(_, millis)| digits.parse::<u64>().ok()?.checked_mul(*millis));
    millis
        .map(Duration::from_millis)
        .ok_or_else(|| format!("\"{text}\" is no length of time; write it like \"10s\" or \"5m\""))
}

/// Writes one: in the largest unit that loses nothing, and never finer than a second from 1 s on.
pub fn format(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let millis = if millis >= 1000 { millis.div_ceil(1000) * 1000 } else { millis };
    let fits = |&&(_, unit): &&(&str, u64)| millis >= unit && millis.is_multiple_of(unit);
    match UNITS.iter().rev().find(fits) {
        Some((unit, length)) => format!("{}{unit}", millis / length),
        None => "0s".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_and_written() {
        for (text, millis) in [("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("2h", 7_200_000)]
        {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)));
            assert_eq!(format(Duration::from_millis(millis)), text);
        }
        assert_eq!(format(Duration::from_millis(90_001)), "91s");
        assert_eq!(format(Duration::ZERO), "0s");
    }

    #[test]
    fn anything_else_is_refused_with_a_hint() {
        for text in ["", "5", "m", "-1s", "1.5h", "5 m", "1d", "99999999999999999999h", "٣s"] {
            assert!(parse(text).unwrap_err().contains("\"5m\""), "{text}");
        }
    }
}
