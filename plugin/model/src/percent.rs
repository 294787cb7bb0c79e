//! Shares of GPU time: percent for people, thousandths of a GPU inside.

/// Percent of a GPU, with one decimal at most, as thousandths.
pub fn parse_cores(text: &str) -> Result<u32, String> {
    let number = text.trim().trim_end_matches('%');
    let (whole_text, tenth_text) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let millis = match (whole_text.parse::<u32>(), tenth_text.parse::<u32>()) {
        (Ok(whole @ 0..=100), Ok(tenth @ 0..=9))
            if [whole_text, tenth_text].into_iter().all(is_number) =>
        {
            Some(whole * 10 + tenth)
        }
        _ => None,
    };
    let fits = millis.filter(|millis| (1..=1000).contains(millis));
    fits.ok_or_else(|| "must be a part of a GPU in percent, from 0.1 to 100, such as 30".to_owned())
}

/// A share of a GPU's time for people, `25%`, of thousandths of the GPU.
pub fn format_cores(millis: impl Into<u64>) -> String {
    format_percent(millis.into().saturating_mul(100))
}

/// GPU time that was used, as a share of a GPU's time: `?` where it is unknown.
pub fn format_used(millis: Option<u32>) -> String {
    millis.map_or_else(|| "?".to_owned(), format_cores)
}

/// A percentage, of thousandths of a percent.
pub fn format_percent(part: u64) -> String {
    let (whole, rest) = (part / 1000, part % 1000);
    let text = if rest == 0 { whole.to_string() } else { format!("{whole}.{rest:03}") };
    let text = if rest == 0 { &text } else { text.trim_end_matches('0') };
    format!("{text}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_written_as_it_is_read() {
        for (millis, text) in [(1, "0.1%"), (250, "25%"), (333, "33.3%"), (1000, "100%")] {
            assert_eq!(format_cores(millis), text);
            assert_eq!(parse_cores(text), Ok(millis));
        }
        assert_eq!(format_percent(100_002), "100.002%");
        assert_eq!(format_percent(0), "0%");
    }
}
