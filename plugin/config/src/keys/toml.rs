//! Values as they are written in a file.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::super::layout::Amount;
use tessera_model::duration;

/// A string.
#[must_use]
pub fn string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A path; an empty string where there is none.
#[must_use]
pub fn path(path: Option<&Path>) -> String {
    string(&path.map(|path| path.display().to_string()).unwrap_or_default())
}

/// A list of strings.
#[must_use]
pub fn strings<S: AsRef<str>>(list: &[S]) -> String {
    let list: Vec<String> = list.iter().map(|text| string(text.as_ref())).collect();
    format!("[{}]", list.join(", "))
}

/// A table of strings.
#[must_use]
pub fn table(map: &BTreeMap<String, String>) -> String {
    let entries: Vec<String> =
        map.iter().map(|(name, text)| format!("{} = {}", string(name), string(text))).collect();
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

/// Bytes, with the largest suffix that says them exactly.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let suffixes = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fits = |(bits, _): &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *bits;
    match suffixes.iter().find(fits) {
        Some((bits, suffix)) => string(&format!("{}{suffix}", bytes >> bits)),
        None => bytes.to_string(),
    }
}

/// Thousandths.
#[must_use]
pub fn millis(millis: u32) -> String {
    string(&format!("{millis}m"))
}

/// `"auto"` or what is there.
#[must_use]
pub fn auto<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| string("auto"), show)
}

/// `"auto"`, a percentage, or what is there.
#[must_use]
pub fn amount(amount: Amount, show: impl FnOnce(u64) -> String) -> String {
    match amount {
        Amount::Auto => string("auto"),
        Amount::Percent(part) if part % 1000 == 0 => string(&format!("{}%", part / 1000)),
        Amount::Percent(part) => {
            let text = format!("{}.{:03}", part / 1000, part % 1000);
            string(&format!("{}%", text.trim_end_matches('0')))
        }
        Amount::Exact(units) => show(units),
    }
}

/// A length of time.
#[must_use]
pub fn time(length: Duration) -> String {
    string(&duration::format(length))
}

/// The word that stands for `value`.
#[must_use]
pub fn word<T: PartialEq>(value: &T, words: &[(&str, T)]) -> String {
    let found = words.iter().find(|(_, known)| known == value);
    string(found.map_or("?", |(word, _)| word))
}
