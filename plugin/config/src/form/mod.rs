//! What may be written for a key, and what it is then. One file per kind of value; [`super::table`] says what follows
//! from a form.

mod compound;
mod number;
mod text;

use serde_json::Value;
use toml::Spanned;
use toml::de::DeValue;

use super::keys::{Row, Shown, Takes};
use super::parse::Report;

pub(super) use compound::{filled, inline, list, mapping, section, tables};
pub use number::Amount;
pub(super) use number::{
    WHOLE_PERCENT, auto, boolean, bytes, cores, money, part_of_memory, part_of_time, time, whole,
    whole_mib,
};
pub(super) use text::{Words, absolute, given, optional_path, parsed, path, quoted, word};

/// A value in the file, with its dotted key.
#[derive(Clone, Copy)]
pub struct Place<'a, 'i> {
    pub(super) key: &'a str,
    pub(super) value: &'a Spanned<DeValue<'i>>,
}

/// What may be written for a key, and what it is then.
pub struct Form<T> {
    /// What may be written, in Markdown.
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
    schema: Box<dyn Fn() -> Value>,
    /// The value, or what is wrong and what to do.
    parse: Box<dyn Fn(&DeValue<'_>) -> Result<T, String>>,
    /// The value as TOML; `None` for one that is not written.
    show: Box<dyn Fn(&T) -> Option<String>>,
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

fn wrong_type(want: &str, found: &DeValue<'_>) -> String {
    format!("must be {want}, not {}", found.type_str())
}

fn string<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| wrong_type("a string", value))
}
