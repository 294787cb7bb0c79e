//! What may be written for a key of one value, and what it is then; [`super::table`] has tables and lists of values, and
//! says what follows from a form.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use strum::VariantArray;
use tessera_model::duration;
use tessera_model::percent::{format_cores, format_percent};
use tessera_model::quantity::{Quantity, QuantityError};
use toml::Spanned;
use toml::de::DeValue;

use crate::keys::{Row, Shown, Takes};
use crate::parse::Report;
use crate::{MIB, grammar};

/// A value in the file, with its dotted key.
#[derive(Clone, Copy)]
pub struct Place<'a, 'i> {
    pub(super) key: &'a str,
    pub(super) value: &'a Spanned<DeValue<'i>>,
}

/// What may be written for a key, and what it is then.
pub struct Form<T> {
    pub(super) accepts: String,
    /// The same as JSON Schema (draft 7).
    pub(super) schema: Box<dyn Fn() -> Value>,
    /// Reads what stands at a place; what is wrong there is noted, and the value stays as far as that goes.
    pub(super) read: Box<dyn Fn(Place<'_, '_>, &mut T, &mut Report)>,
    /// The values to compare and their keys: one, unless the value is a table.
    pub(super) values: Box<dyn Fn(&T, &str, Takes, &mut Vec<Shown>)>,
    /// What [`super::keys::keep`] does with a table of declared keys.
    pub(super) keep: Option<fn(&mut T, &T)>,
    /// The rows of the reference of such a table, or of a list of them.
    pub(super) rows: Option<fn(&str, &mut Vec<Row>)>,
}

/// A value of one piece: it is right or wrong as a whole.
pub struct Leaf<T> {
    accepts: String,
    pub(super) schema: Box<dyn Fn() -> Value>,
    pub(super) parse: Box<dyn Fn(&DeValue<'_>) -> Result<T, String>>,
    /// The value as TOML; `None` for one that is not written.
    pub(super) show: Box<dyn Fn(&T) -> Option<String>>,
}

impl<T: 'static> Leaf<T> {
    fn new(
        accepts: impl Into<String>,
        schema: impl Fn() -> Value + 'static,
        parse: impl Fn(&DeValue<'_>) -> Result<T, String> + 'static,
        show: impl Fn(&T) -> String + 'static,
    ) -> Self {
        Leaf {
            accepts: accepts.into(),
            schema: Box::new(schema),
            parse: Box::new(parse),
            show: Box::new(move |value| Some(show(value))),
        }
    }
}

impl<T: 'static> From<Leaf<T>> for Form<T> {
    fn from(leaf: Leaf<T>) -> Self {
        let Leaf { accepts, schema, parse, show } = leaf;
        let read = move |at: Place<'_, '_>, to: &mut T, report: &mut Report| match parse(
            at.value.get_ref(),
        ) {
            Ok(value) => *to = value,
            Err(message) => report.fault(at.key, at.value.span().start, &message),
        };
        let values = move |value: &T, key: &str, takes, found: &mut Vec<Shown>| {
            found.extend(show(value).map(|text| Shown { key: key.to_owned(), text, takes }));
        };
        let (read, values) = (Box::new(read), Box::new(values));
        Form { accepts, schema, read, values, keep: None, rows: None }
    }
}

pub(crate) fn wrong_type(want: &str, found: &DeValue<'_>) -> String {
    format!("must be {want}, not {}", found.type_str())
}

fn string<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| wrong_type("a string", value))
}

pub const WHOLE_PERCENT: u32 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// What the others leave, evenly.
    Auto,
    /// Thousandths of a percent of the whole.
    Percent(u32),
    Exact(u64),
}

impl Amount {
    /// Of `whole` bytes, rounded down; `None` for [`Amount::Auto`].
    pub fn of(self, whole: u64) -> Option<u64> {
        match self {
            Amount::Auto => None,
            Amount::Exact(bytes) => Some(bytes),
            Amount::Percent(part) => {
                let bytes = u128::from(whole) * u128::from(part) / u128::from(WHOLE_PERCENT);
                // At most 100 %, so it fits.
                Some(u64::try_from(bytes).unwrap_or(u64::MAX))
            }
        }
    }
}

pub(crate) fn boolean() -> Leaf<bool> {
    let parse =
        |value: &DeValue<'_>| value.as_bool().ok_or_else(|| wrong_type("true or false", value));
    Leaf::new("`true`, `false`", || json!({ "type": "boolean" }), parse, bool::to_string)
}

pub(crate) fn whole(range: RangeInclusive<u32>) -> Leaf<u32> {
    let (least, most) = (*range.start(), *range.end());
    let parse = move |value: &DeValue<'_>| {
        let integer = value.as_integer().ok_or_else(|| wrong_type("a whole number", value))?;
        let number = u64::from_str_radix(integer.as_str(), integer.radix())
            .map_err(|_| "must be a whole number, not negative".to_owned())?;
        let fits = u32::try_from(number).ok().filter(|number| range.contains(number));
        fits.ok_or_else(|| format!("must be from {least} to {most}"))
    };
    let schema = move || json!({ "type": "integer", "minimum": least, "maximum": most });
    Leaf::new(format!("whole number from {least} to {most}"), schema, parse, u32::to_string)
}

pub(crate) fn time(least: Duration, most: Duration) -> Leaf<Duration> {
    let bounds = format!("from {} to {}", duration::format(least), duration::format(most));
    let accepts = format!("time {bounds}");
    let parse = move |value: &DeValue<'_>| {
        let text = string(value)?;
        let length = duration::parse(text)?;
        let fits = (least..=most).contains(&length);
        fits.then_some(length).ok_or_else(|| format!("\"{text}\" is not {bounds}"))
    };
    let schema = move || {
        let millis = |length: Duration| u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        let (least, most) = (millis(least), millis(most));
        let units = duration::UNITS.iter().filter(|(_, unit)| *unit <= most);
        let alternatives: Vec<String> = units
            .map(|(name, unit)| grammar::range(least.div_ceil(*unit).max(1), most / unit) + name)
            .collect();
        let pattern = grammar::whole(&format!(r"\+?({})", alternatives.join("|")));
        json!({ "type": "string", "pattern": pattern })
    };
    Leaf::new(accepts, schema, parse, |length| write_string(&duration::format(*length)))
}

/// An amount of memory, and what is wrong with less than `least`.
pub(crate) fn bytes(least: u64, less: &'static str) -> Leaf<u64> {
    let accepts = match least {
        0 => "quantity, bytes".to_owned(),
        1 => "quantity, bytes, more than 0".to_owned(),
        least => {
            format!("quantity, bytes, at least `{}`", write_bytes(least).trim_matches('"'))
        }
    };
    let parse = move |value: &DeValue<'_>| read_bytes(value, least, less);
    Leaf::new(accepts, move || quantity_or(bytes_pattern(least), ""), parse, |b| write_bytes(*b))
}

/// As [`bytes`], in multiples of a MiB alone.
pub(crate) fn whole_mib(least: u64, less: &'static str) -> Leaf<u64> {
    let Leaf { accepts, schema, parse, show } = bytes(least, less);
    let schema = move || {
        let mut schema = schema();
        schema["multipleOf"] = MIB.into();
        schema
    };
    let parse = move |value: &DeValue<'_>| match parse(value)? {
        bytes if bytes.is_multiple_of(MIB) => Ok(bytes),
        bytes => {
            let more = bytes.div_ceil(MIB);
            Err(format!("{bytes} bytes is not a whole number of MiB; use {more}Mi"))
        }
    };
    let accepts = accepts.replace("bytes", "whole MiB");
    Leaf { accepts, schema: Box::new(schema), parse: Box::new(parse), show }
}

fn read_bytes(value: &DeValue<'_>, least: u64, less: &str) -> Result<u64, String> {
    // As many write it, and no Kubernetes quantity means anything else by it.
    let text = value.as_str().and_then(|text| text.strip_suffix('B')).filter(|t| t.ends_with('i'));
    let bytes = match text {
        Some(text) => read_text(text, Quantity::units)?,
        None => quantity(value, Quantity::units)?,
    };
    if bytes < least {
        return Err(less.to_owned());
    }
    if 0 < bytes && bytes < MIB {
        return Err(format!("is {bytes} bytes; write a unit, such as 512Mi or 12Gi"));
    }
    Ok(bytes)
}

pub(crate) fn cores() -> Leaf<u32> {
    let accepts = "percentage; or quantity, GPUs, more than 0 and at most 1";
    let schema = || {
        let bound = json!({ "exclusiveMinimum": 0, "maximum": 1 });
        quantity_or((grammar::part(1), bound), &format!("|{}", grammar::percent()))
    };
    let show = |millis: &u32| write_string(&format_cores(u64::from(*millis)));
    Leaf::new(accepts, schema, read_cores, show)
}

fn read_cores(value: &DeValue<'_>) -> Result<u32, String> {
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

/// An amount of money, thousandths of its currency.
pub(crate) fn money() -> Leaf<u64> {
    let schema = || {
        let (pattern, bound) = bytes_pattern(0);
        // Money has no bytes.
        quantity_or((pattern.replace("iB?", "i"), bound), "")
    };
    let show = |value: &u64| {
        let (whole, rest) = (value / 1000, value % 1000);
        let text = format!("{whole}.{rest:03}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    let accepts = "number, not negative; what is finer than a thousandth is rounded up";
    Leaf::new(accepts, schema, |value| quantity(value, Quantity::millis), show)
}

/// `"auto"`, which is `None`, or what the other form takes.
pub(crate) fn auto<T: 'static>(leaf: Leaf<T>) -> Leaf<Option<T>> {
    let Leaf { accepts, schema, parse, show } = leaf;
    let schema = move || {
        let mut schema = schema();
        let pattern = schema["pattern"].as_str().map(|pattern| format!("^auto$|{pattern}"));
        schema["pattern"] = pattern.into();
        schema
    };
    let parse = move |value: &DeValue<'_>| match value.as_str() {
        Some("auto") => Ok(None),
        _ => parse(value).map(Some).map_err(|why| format!("{why}, or \"auto\"")),
    };
    Leaf {
        accepts: format!("`auto`; or {accepts}"),
        schema: Box::new(schema),
        parse: Box::new(parse),
        show: Box::new(move |value| match value {
            Some(value) => show(value),
            None => Some(write_string("auto")),
        }),
    }
}

/// `"auto"`, a percentage of a GPU's memory, or bytes, and what is wrong with none.
pub(crate) fn part_of_memory(none: &'static str) -> Leaf<Amount> {
    let parse = move |value: &DeValue<'_>| match value.as_str() {
        Some("auto") => Ok(Amount::Auto),
        Some(text) if text.ends_with('%') => percent(text).map(Amount::Percent),
        _ => read_bytes(value, 1, none)
            .map(Amount::Exact)
            .map_err(|why| format!("{why}, a percentage such as \"25%\", or \"auto\"")),
    };
    let schema = || {
        let (pattern, bound) = bytes_pattern(1);
        quantity_or((format!("auto|{pattern}"), bound), &format!("|{}", grammar::percent()))
    };
    let show = |amount: &Amount| match *amount {
        Amount::Auto => write_string("auto"),
        Amount::Percent(part) => write_string(&format_percent(part.into())),
        Amount::Exact(bytes) => write_bytes(bytes),
    };
    let accepts = "`auto`; or percentage; or quantity, bytes, more than 0";
    Leaf::new(accepts, schema, parse, show)
}

/// The schema of a quantity, a string of this pattern or a number within this bound, or another string.
fn quantity_or((pattern, mut schema): (String, Value), other: &str) -> Value {
    schema["type"] = json!(["string", "number"]);
    schema["pattern"] = grammar::whole(&format!("{pattern}{other}")).into();
    schema
}

fn bytes_pattern(least: u64) -> (String, Value) {
    let (number, bound) = match least.checked_sub(1) {
        None => (format!(r"(\+?{}|-(0+\.?0*|\.0+))", grammar::NUMBER), json!({ "minimum": 0 })),
        Some(less) => (format!(r"\+?{}", grammar::POSITIVE), json!({ "exclusiveMinimum": less })),
    };
    (number + grammar::SUFFIX, bound)
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
    read_text(text, read)
}

fn read_text(
    text: &str,
    read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
) -> Result<u64, String> {
    Quantity::parse(text).and_then(read).map_err(|error| error.to_string())
}

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

/// A value for which the file has a few words.
pub trait Words: VariantArray + Into<&'static str> + Copy {}

impl<T: VariantArray + Into<&'static str> + Copy> Words for T {}

fn words<T: Words>() -> impl Iterator<Item = (&'static str, T)> {
    T::VARIANTS.iter().map(|value| ((*value).into(), *value))
}

fn quoted<T: Words>() -> String {
    let words = words::<T>().map(|(word, _)| format!("\"{word}\""));
    words.collect::<Vec<_>>().join(", ")
}

pub(crate) fn word<T: Words>() -> Leaf<T> {
    let parse = |value: &DeValue<'_>| {
        let text = string(value)?;
        let found = words::<T>().find(|(word, _)| *word == text).map(|(_, value)| value);
        found.ok_or_else(|| format!("\"{text}\" is none of {}", quoted::<T>()))
    };
    let schema = || {
        let words: Vec<&str> = words::<T>().map(|(word, _)| word).collect();
        json!({ "enum": words })
    };
    let show = |value: &T| write_string((*value).into());
    Leaf::new(quoted::<T>().replace('"', "`"), schema, parse, show)
}

/// What may be left out, and is `None` then.
pub(crate) fn given<T: 'static>(leaf: Leaf<T>) -> Leaf<Option<T>> {
    let Leaf { accepts, schema, parse, show } = leaf;
    Leaf {
        accepts,
        schema,
        parse: Box::new(move |value| parse(value).map(Some)),
        show: Box::new(move |value| show(value.as_ref()?)),
    }
}

/// A string: what `read` makes of it, what makes a string of that again, what it may be in words and as schema.
pub(crate) fn parsed<T: 'static>(
    read: fn(&str) -> Result<T, String>,
    show: fn(&T) -> String,
    accepts: &str,
    schema: fn() -> Value,
) -> Leaf<T> {
    let schema = move || {
        let mut schema = schema();
        schema["type"] = "string".into();
        schema
    };
    let parse = move |value: &DeValue<'_>| read(string(value)?);
    Leaf::new(accepts, schema, parse, move |value| write_string(&show(value)))
}

/// A path that does not depend on where the plugin was started.
pub(crate) fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let message = || format!("\"{text}\" must be an absolute path");
    path.is_absolute().then_some(path).ok_or_else(message)
}

pub(crate) fn path() -> Leaf<PathBuf> {
    let show = |path: &PathBuf| path.display().to_string();
    parsed(absolute, show, "absolute path", || json!({ "pattern": "^/" }))
}

/// An absolute path; an empty string is `None`.
pub(crate) fn optional_path() -> Leaf<Option<PathBuf>> {
    parsed(
        |text| if text.is_empty() { Ok(None) } else { absolute(text).map(Some) },
        |path| path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        "absolute path, or empty",
        || json!({ "pattern": "^$|^/" }),
    )
}

pub(crate) fn write_string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
