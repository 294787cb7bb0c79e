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
