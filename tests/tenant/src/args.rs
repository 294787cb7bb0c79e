//! What values of options mean.

use std::num::ParseIntError;
use std::time::Duration;

use strum::VariantArray;

use crate::memory::Api;

/// `--for`, in seconds; 0: without end.
pub fn limit(text: &str) -> Result<Duration, ParseIntError> {
    let seconds = text.parse()?;
    Ok(if seconds == 0 { Duration::MAX } else { Duration::from_secs(seconds) })
}

/// `--rate`, requests per second.
pub fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse::<f64>().ok().filter(|rate| (0.0..=1e6).contains(rate));
    rate.ok_or("it must be from 0 to 1000000 per second")
}

pub fn bytes(text: &str) -> Result<u64, &'static str> {
    parse_bytes(text).ok_or("it is not a quantity of bytes (examples: 512Mi, 4GiB, 129M)")
}

/// `--apis`: all, unless it says which.
pub fn or_all(apis: &[Api]) -> &[Api] {
    if apis.is_empty() { Api::VARIANTS } else { apis }
}

/// Bytes of a Kubernetes quantity (`512Mi`, `129M`, `1.5Gi`, `128974848`) or of its spelling with
/// a final `B` (`4GiB`). `None` where it is neither, negative, or does not fit.
fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let scale: u128 = match unit {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let digits = u32::try_from(fraction.len()).ok()?;
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let bytes = whole.checked_mul(scale)? + part * scale / 10u128.pow(digits);
    u64::try_from(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_parse_as_kubernetes_reads_them() {
        assert_eq!(parse_bytes("4GiB"), Some(4 << 30));
        assert_eq!(parse_bytes("512Mi"), Some(512 << 20));
        assert_eq!(parse_bytes("1.5Gi"), Some(3 << 29));
        assert_eq!(parse_bytes("129M"), Some(129_000_000));
        assert_eq!(parse_bytes("77"), Some(77));
        for bad in ["", "Gi", "-1", "4Gib", "1e3x", "99999999999Ti", "."] {
            assert_eq!(parse_bytes(bad), None, "{bad}");
        }
    }
}
