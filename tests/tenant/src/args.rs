//! Command-line options without a parser crate: this binary goes into every test image.

use std::str::FromStr;
use std::time::Duration;

use crate::exit::Exit;
use crate::memory::Api;
use strum::VariantArray;

/// Arguments not yet consumed.
#[derive(Debug)]
pub struct Args {
    rest: Vec<String>,
}

impl Args {
    pub fn from_env() -> Self {
        Self::new(std::env::args().skip(1).collect())
    }

    pub fn new(rest: Vec<String>) -> Self {
        Self { rest }
    }

    /// Whether `name` was given; consumes it.
    pub fn flag(&mut self, name: &str) -> bool {
        let before = self.rest.len();
        self.rest.retain(|a| a != name);
        self.rest.len() != before
    }

    /// The value of `--name value` or `--name=value`, consumed; the last one wins.
    pub fn value(&mut self, name: &str) -> Result<Option<String>, Exit> {
        let mut found = None;
        let mut at = 0;
        while at < self.rest.len() {
            if self.rest[at] == name {
                if at + 1 == self.rest.len() {
                    return Err(Exit::usage(format!("{name} needs a value")));
                }
                found = Some(self.rest.remove(at + 1));
                self.rest.remove(at);
            } else if let Some(value) =
                self.rest[at].strip_prefix(name).and_then(|v| v.strip_prefix('='))
            {
                found = Some(value.to_owned());
                self.rest.remove(at);
            } else {
                at += 1;
            }
        }
        Ok(found)
    }

    /// A number, or whatever else is written as one word, or `default`.
    pub fn number<T: FromStr>(&mut self, name: &str, default: T) -> Result<T, Exit> {
        match self.value(name)? {
            None => Ok(default),
            Some(text) => {
                text.parse().map_err(|_| Exit::usage(format!("{name}: it cannot be {text:?}")))
            }
        }
    }

    /// `--for`, in seconds; 0: without end.
    pub fn limit(&mut self) -> Result<Option<Duration>, Exit> {
        let seconds: u64 = self.number("--for", 0)?;
        Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
    }

    /// `--apis`: all, unless it says which.
    pub fn apis(&mut self) -> Result<Vec<Api>, Exit> {
        match self.value("--apis")? {
            None => Ok(Api::VARIANTS.to_vec()),
            Some(list) => Api::list(&list).map_err(|e| Exit::usage(format!("--apis: {e}"))),
        }
    }

    pub fn bytes(&mut self, name: &str) -> Result<Option<u64>, Exit> {
        let Some(text) = self.value(name)? else { return Ok(None) };
        match parse_bytes(&text) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(Exit::usage(format!(
                "{name}: {text:?} is not a quantity of bytes (examples: 512Mi, 4GiB, 129M)"
            ))),
        }
    }

    /// The first argument that is no option.
    pub fn subcommand(&mut self) -> Option<String> {
        // Options before the subcommand were consumed with their values by then.
        let at = self.rest.iter().position(|a| !a.starts_with('-'))?;
        Some(self.rest.remove(at))
    }

    /// Refuses whatever nobody consumed.
    pub fn finish(self) -> Result<(), Exit> {
        match self.rest.first() {
            None => Ok(()),
            Some(left) => Err(Exit::usage(format!("unexpected argument {left}; see --help"))),
        }
    }
}

/// Bytes of a Kubernetes quantity (`512Mi`, `129M`, `1.5Gi`, `128974848`) or of its spelling with
/// a final `B` (`4GiB`). `None` where it is neither, negative, or does not fit.
pub fn parse_bytes(text: &str) -> Option<u64> {
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

    fn args(line: &str) -> Args {
        Args::new(line.split_whitespace().map(str::to_owned).collect())
    }

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

    #[test]
    fn both_spellings_of_an_option_are_read() {
        let mut a = args("--device 3 infer --rate=7.5 --for 2");
        assert_eq!(a.number("--device", 0).unwrap(), 3);
        assert_eq!(a.subcommand().as_deref(), Some("infer"));
        assert!((a.number("--rate", 0.0f64).unwrap() - 7.5).abs() < f64::EPSILON);
        assert_eq!(a.number("--for", 0u64).unwrap(), 2);
        a.finish().unwrap();
    }

    #[test]
    fn a_leftover_or_missing_value_is_a_usage_error() {
        assert_eq!(args("--what").finish().unwrap_err().code, crate::exit::USAGE);
        assert_eq!(args("--rate").number("--rate", 0).unwrap_err().code, crate::exit::USAGE);
    }
}
