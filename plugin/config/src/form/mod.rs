//! What may be written for a key. One file per kind of value; [`super::table`] has the contract.

mod compound;
mod number;
mod text;

use serde_json::Value;
use toml::de::DeValue;

use super::parse::Report;
use super::table::{Form, Place};

pub(super) use compound::{Mapping, list, section, tables};
pub use number::Amount;
pub(super) use number::{WHOLE_PERCENT, amount, auto, boolean, bytes, cores, money, time, whole};
pub(super) use text::{Parsed, Words, absolute, given, optional_path, parsed, path, quoted, word};

/// A value of one piece: it is right or wrong as a whole.
pub trait Leaf {
    type Value: Clone;

    /// The value, or what is wrong and what to do.
    fn parse(&self, value: &DeValue<'_>) -> Result<Self::Value, String>;
    /// See [`Form::show`].
    fn show(&self, value: &Self::Value) -> Option<String>;
    /// See [`Form::accepts`].
    fn accepts(&self) -> String;
    /// See [`Form::schema`].
    fn schema(&self) -> Value;
}

impl<L: Leaf> Form for L {
    type Value = L::Value;

    fn read(&self, at: Place<'_, '_>, to: &mut Self::Value, report: &mut Report) {
        match self.parse(at.value.get_ref()) {
            Ok(value) => *to = value,
            Err(message) => report.fault(at.key, at.value.span().start, &message),
        }
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        Leaf::show(self, value)
    }

    fn accepts(&self) -> String {
        Leaf::accepts(self)
    }

    fn schema(&self) -> Value {
        Leaf::schema(self)
    }
}

fn wrong_type(want: &str, found: &DeValue<'_>) -> String {
    format!("must be {want}, not {}", found.type_str())
}

fn string<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| wrong_type("a string", value))
}
