//! Values as they are written in a file.

use std::path::Path;
use std::time::Duration;

use tessera_model::duration;
use tessera_model::percent::format_cores;

/// A string.
pub fn string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A path; an empty string where there is none.
pub fn path(path: Option<&Path>) -> String {
    string(&path.map(|path| path.display().to_string()).unwrap_or_default())
}

/// Bytes, with the largest suffix that says them exactly.
pub fn bytes(bytes: u64) -> String {
    let suffixes = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fits = |(bits, _): &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *bits;
    match suffixes.iter().find(fits) {
        Some((bits, suffix)) => string(&format!("{}{suffix}", bytes >> bits)),
        None => bytes.to_string(),
    }
}

/// A share of a GPU's time, of thousandths.
pub fn cores(millis: u64) -> String {
    string(&format_cores(millis))
}

/// A length of time.
pub fn time(length: Duration) -> String {
    string(&duration::format(length))
}
