//! Numbers: counts, times, quantities and shares.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::{Value, json};
use toml::de::DeValue;

use super::text::write_string;
use super::{Leaf, string, wrong_type};
use crate::MIB;
use crate::pattern;
use tessera_model::duration;
use tessera_model::percent::{format_cores, format_percent};
use tessera_model::quantity::{Quantity, QuantityError};

/// Thousandths of a percent in a whole.
pub const WHOLE_PERCENT: u32 = 100_000;

/// The size of a layout's share, relative to the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// What the others leave, evenly.
    Auto,
    /// Thousandths of a percent of the whole.
    Percent(u32),
    /// So many units.
    Exact(u64),
}

impl Amount {
    /// In units of the whole, rounded down; `None` for [`Amount::Auto`].
    pub fn of(self, whole: u64) -> Option<u64> {
        match self {
            Amount::Auto => None,
            Amount::Exact(units) => Some(units),
            Amount::Percent(part) => {
                let units = u128::from(whole) * u128::from(part) / u128::from(WHOLE_PERCENT);
                // At most 100 %, so it fits.
                Some(u64::try_from(units).unwrap_or(u64::MAX))
            }
        }
    }
}

/// `true` or `false`.
pub struct Boolean;

/// A count within bounds.
pub struct Whole(RangeInclusive<u32>);

/// A length of time within bounds.
pub struct Time(RangeInclusive<Duration>);

/// An amount of memory, bytes.
pub struct Bytes {
    least: u64,
    /// What is wrong with less.
    less: &'static str,
    /// In whole MiB.
    whole_mib: bool,
}

impl Bytes {
    /// Only multiples of a MiB.
    pub(crate) const fn in_whole_mib(self) -> Self {
        Bytes { whole_mib: true, ..self }
    }
}

/// A share of a GPU's time, thousandths.
pub struct Cores;

/// An amount of money, thousandths of its currency.
pub struct Money;

/// `"auto"`, which is `None`, or what the other form takes.
pub struct Auto<F>(F);

/// `"auto"`, a percentage, or units of what is shared.
pub struct Shared<F>(F);

pub(crate) const fn boolean() -> Boolean {
    Boolean
}

pub(crate) const fn whole(range: RangeInclusive<u32>) -> Whole {
    Whole(range)
}

pub(crate) const fn time(least: Duration, most: Duration) -> Time {
    Time(RangeInclusive::new(least, most))
}

pub(crate) const fn bytes(least: u64, less: &'static str) -> Bytes {
    Bytes { least, less, whole_mib: false }
}

pub(crate) const fn cores() -> Cores {
    Cores
}

pub(crate) const fn money() -> Money {
    Money
}

pub(crate) const fn auto<F>(form: F) -> Auto<F> {
    Auto(form)
}

pub(crate) const fn amount<F: Units>(form: F) -> Shared<F> {
    Shared(form)
}

impl Leaf for Boolean {
    type Value = bool;

    fn parse(&self, value: &DeValue<'_>) -> Result<bool, String> {
        value.as_bool().ok_or_else(|| wrong_type("true or false", value))
    }

    fn show(&self, value: &bool) -> Option<String> {
        Some(value.to_string())
    }

    fn accepts(&self) -> String {
        "`true`, `false`".to_owned()
    }

    fn schema(&self) -> Value {
        json!({ "type": "boolean" })
    }
}

impl Leaf for Whole {
    type Value = u32;

    fn parse(&self, value: &DeValue<'_>) -> Result<u32, String> {
        let integer = value.as_integer().ok_or_else(|| wrong_type("a whole number", value))?;
        let number = u64::from_str_radix(integer.as_str(), integer.radix())
            .map_err(|_| "must be a whole number, not negative".to_owned())?;
        let fits = u32::try_from(number).ok().filter(|number| self.0.contains(number));
        fits.ok_or_else(|| format!("must be from {} to {}", self.0.start(), self.0.end()))
    }

    fn show(&self, value: &u32) -> Option<String> {
        Some(value.to_string())
    }

    fn accepts(&self) -> String {
        format!("whole number from {} to {}", self.0.start(), self.0.end())
    }

    fn schema(&self) -> Value {
        json!({ "type": "integer", "minimum": self.0.start(), "maximum": self.0.end() })
    }
}

impl Time {
    fn bounds(&self) -> String {
        format!("from {} to {}", duration::format(*self.0.start()), duration::format(*self.0.end()))
    }
}

impl Leaf for Time {
    type Value = Duration;

    fn parse(&self, value: &DeValue<'_>) -> Result<Duration, String> {
        let text = string(value)?;
        let length = duration::parse(text)?;
        let fits = self.0.contains(&length);
        fits.then_some(length).ok_or_else(|| format!("\"{text}\" is not {}", self.bounds()))
    }

    fn show(&self, value: &Duration) -> Option<String> {
        Some(write_time(*value))
    }

    fn accepts(&self) -> String {
        format!("time {}", self.bounds())
    }

    fn schema(&self) -> Value {
        let millis = |length: &Duration| u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        let (least, most) = (millis(self.0.start()), millis(self.0.end()));
        let units = duration::UNITS.iter().filter(|(_, unit)| *unit <= most);
        let alternatives: Vec<String> = units
            .map(|(name, unit)| pattern::range(least.div_ceil(*unit).max(1), most / unit) + name)
            .collect();
        let pattern = pattern::whole(&format!(r"\+?({})", alternatives.join("|")));
        json!({ "type": "string", "pattern": pattern })
    }
}

/// What a quantity counts.
pub trait Units: Leaf {
    /// What is accepted beside other things, as a regular expression; and as a number.
    fn pattern(&self) -> (String, Value);
    /// The value in units.
    fn units(value: Self::Value) -> u64;
    /// The value as TOML.
    fn write(units: u64) -> String;
}

impl Leaf for Bytes {
    type Value = u64;

    fn parse(&self, value: &DeValue<'_>) -> Result<u64, String> {
        // As many write it, and no Kubernetes quantity means anything else by it.
        let text =
            value.as_str().and_then(|text| text.strip_suffix('B')).filter(|t| t.ends_with('i'));
        let bytes = match text {
            Some(text) => parsed(text, Quantity::units)?,
            None => quantity(value, Quantity::units)?,
        };
        if bytes < self.least {
            return Err(self.less.to_owned());
        }
        if 0 < bytes && bytes < MIB {
            return Err(format!("is {bytes} bytes; write a unit, such as 512Mi or 12Gi"));
        }
        if self.whole_mib && !bytes.is_multiple_of(MIB) {
            let more = bytes.div_ceil(MIB);
            return Err(format!("{bytes} bytes is not a whole number of MiB; use {more}Mi"));
        }
        Ok(bytes)
    }

    fn show(&self, value: &u64) -> Option<String> {
        Some(write_bytes(*value))
    }

    fn accepts(&self) -> String {
        let unit = if self.whole_mib { "whole MiB" } else { "bytes" };
        match self.least {
            0 => format!("quantity, {unit}"),
            1 => format!("quantity, {unit}, more than 0"),
            least => {
                let least = write_bytes(least);
                format!("quantity, {unit}, at least `{}`", least.trim_matches('"'))
            }
        }
    }

    fn schema(&self) -> Value {
        let (pattern, mut schema) = self.pattern();
        schema["type"] = json!(["string", "number"]);
        schema["pattern"] = pattern::whole(&pattern).into();
        schema
    }
}

impl Units for Bytes {
    fn pattern(&self) -> (String, Value) {
        let (number, mut bound) = match self.least.checked_sub(1) {
            None => (format!(r"(\+?{}|-(0+\.?0*|\.0+))", pattern::NUMBER), json!({ "minimum": 0 })),
            Some(less) => {
                (format!(r"\+?{}", pattern::POSITIVE), json!({ "exclusiveMinimum": less }))
            }
        };
        if self.whole_mib {
            bound["multipleOf"] = MIB.into();
        }
        (number + pattern::SUFFIX, bound)
    }

    fn units(value: u64) -> u64 {
        value
    }

    fn write(units: u64) -> String {
        write_bytes(units)
    }
}

impl Leaf for Cores {
    type Value = u32;

    fn parse(&self, value: &DeValue<'_>) -> Result<u32, String> {
        let millis = match value.as_str() {
            Some(text) if text.ends_with('%') => u64::from(percent(text)? / (WHOLE_PERCENT / 1000)),
            _ => quantity(value, Quantity::millis)?,
        };
        u32::try_from(millis).ok().filter(|millis| (1..=1000).contains(millis)).ok_or_else(|| {
            "must be at least 0.1% and at most 100% of a GPU; without a percent sign it counts whole \
             GPUs: a quarter is \"25%\", \"250m\" or 0.25"
                .to_owned()
        })
    }

    fn show(&self, value: &u32) -> Option<String> {
        Some(write_cores((*value).into()))
    }

    fn accepts(&self) -> String {
        "percentage; or quantity, GPUs, more than 0 and at most 1".to_owned()
    }

    fn schema(&self) -> Value {
        let (pattern, mut schema) = self.pattern();
        schema["type"] = json!(["string", "number"]);
        schema["pattern"] = pattern::whole(&format!("{pattern}|{}", pattern::percent())).into();
        schema
    }
}

impl Units for Cores {
    fn pattern(&self) -> (String, Value) {
        (pattern::part(1), json!({ "exclusiveMinimum": 0, "maximum": 1 }))
    }

    fn units(value: u32) -> u64 {
        value.into()
    }

    fn write(units: u64) -> String {
        write_cores(units)
    }
}

impl Leaf for Money {
    type Value = u64;

    fn parse(&self, value: &DeValue<'_>) -> Result<u64, String> {
        quantity(value, Quantity::millis)
    }

    fn show(&self, value: &u64) -> Option<String> {
        let (whole, rest) = (value / 1000, value % 1000);
        let text = format!("{whole}.{rest:03}");
        Some(text.trim_end_matches('0').trim_end_matches('.').to_owned())
    }

    fn accepts(&self) -> String {
        "number, not negative; what is finer than a thousandth is rounded up".to_owned()
    }

    fn schema(&self) -> Value {
        let (pattern, mut schema) = bytes(0, "").pattern();
        schema["type"] = json!(["string", "number"]);
        // Money has no bytes.
        schema["pattern"] = pattern::whole(&pattern.replace("iB?", "i")).into();
        schema
    }
}

impl<L: Leaf> Leaf for Auto<L> {
    type Value = Option<L::Value>;

    fn parse(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        match value.as_str() {
            Some("auto") => Ok(None),
            _ => self.0.parse(value).map(Some).map_err(|why| format!("{why}, or \"auto\"")),
        }
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        value.as_ref().map_or_else(|| Some(write_string("auto")), |value| self.0.show(value))
    }

    fn accepts(&self) -> String {
        format!("`auto`; or {}", self.0.accepts())
    }

    fn schema(&self) -> Value {
        let mut schema = self.0.schema();
        let pattern = schema["pattern"].as_str().map(|pattern| format!("^auto$|{pattern}"));
        schema["pattern"] = pattern.into();
        schema
    }
}

impl<L: Units> Leaf for Shared<L> {
    type Value = Amount;

    fn parse(&self, value: &DeValue<'_>) -> Result<Amount, String> {
        match value.as_str() {
            Some("auto") => Ok(Amount::Auto),
            Some(text) if text.ends_with('%') => percent(text).map(Amount::Percent),
            _ => match self.0.parse(value) {
                Ok(value) => Ok(Amount::Exact(L::units(value))),
                Err(why) => Err(format!("{why}, a percentage such as \"25%\", or \"auto\"")),
            },
        }
    }

    fn show(&self, value: &Amount) -> Option<String> {
        Some(match value {
            Amount::Auto => write_string("auto"),
            Amount::Percent(part) => write_string(&format_percent((*part).into())),
            Amount::Exact(units) => L::write(*units),
        })
    }

    fn accepts(&self) -> String {
        let units = self.0.accepts();
        let units = units.strip_prefix("percentage; or ").unwrap_or(&units).to_owned();
        format!("`auto`; or percentage; or {units}")
    }

    fn schema(&self) -> Value {
        let (pattern, mut schema) = self.0.pattern();
        let any = format!("auto|{pattern}|{}", pattern::percent());
        schema["type"] = json!(["string", "number"]);
        schema["pattern"] = pattern::whole(&any).into();
        schema
    }
}

fn quantity(
    value: &DeValue<'_>,
    read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
) -> Result<u64, String> {
    let text = match value {
        DeValue::String(text) => text.as_ref(),
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
        DeValue::Float(float) => float.as_str(),
        other => return Err(wrong_type("a quantity", other)),
    };
    parsed(text, read)
}

fn parsed(
    text: &str,
    read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
) -> Result<u64, String> {
    Quantity::parse(text).and_then(read).map_err(|error| error.to_string())
}

/// A percentage, in thousandths of a percent.
fn percent(text: &str) -> Result<u32, String> {
    let number = text.trim_end_matches('%').trim_end();
    match Quantity::parse(number).and_then(Quantity::millis).map(u32::try_from) {
        Ok(Ok(part @ 1..=WHOLE_PERCENT)) => Ok(part),
        _ => Err("a percentage must be more than 0% and at most 100%".to_owned()),
    }
}

/// Bytes, with the largest suffix that says them exactly.
fn write_bytes(bytes: u64) -> String {
    let suffixes = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fits = |(bits, _): &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *bits;
    match suffixes.iter().find(fits) {
        Some((bits, suffix)) => write_string(&format!("{}{suffix}", bytes >> bits)),
        None => bytes.to_string(),
    }
}

/// A share of a GPU's time, of thousandths.
fn write_cores(millis: u64) -> String {
    write_string(&format_cores(millis))
}

/// A length of time.
fn write_time(length: Duration) -> String {
    write_string(&duration::format(length))
}
