//! Values of several pieces, in each of which something may be wrong: lists, maps and tables.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use super::text::write_string;
use super::{Leaf, wrong_type};
use crate::keys::{Row, Shown, Takes};
use crate::parse::Report;
use crate::table::{self, Form, Place, Table};

/// A list of values.
pub struct List<F> {
    entry: F,
    /// What is wrong with an empty one, if anything is.
    empty: Option<&'static str>,
    accepts: &'static str,
}

/// A table whose keys are the user's; they come over those that are there.
pub struct Mapping<K: 'static, F> {
    key: fn(&str) -> Result<K, String>,
    entry: F,
    /// What is wrong with the value of a key.
    wrong: fn(&str, &str) -> String,
    accepts: &'static str,
    /// What a key may be, as a regular expression.
    keys: &'static str,
    /// Whether each entry is compared by itself.
    each: bool,
}

/// A table of declared keys.
pub struct Section<T>(PhantomData<T>);

/// A list of tables of declared keys.
pub struct Tables<T> {
    of: PhantomData<T>,
    /// What is wrong with an empty one, if anything is.
    empty: Option<&'static str>,
    /// Whether the list is one value, to be compared and documented as a whole.
    inline: bool,
}

pub(crate) const fn list<F>(entry: F, accepts: &'static str) -> List<F> {
    List { entry, empty: None, accepts }
}

pub(crate) const fn section<T: Table>() -> Section<T> {
    Section(PhantomData)
}

pub(crate) const fn tables<T: Table>() -> Tables<T> {
    Tables { of: PhantomData, empty: None, inline: false }
}

impl<F> List<F> {
    pub(crate) const fn not_empty(mut self, message: &'static str) -> Self {
        self.empty = Some(message);
        self
    }
}

impl<T> Tables<T> {
    pub(crate) const fn not_empty(mut self, message: &'static str) -> Self {
        self.empty = Some(message);
        self
    }

    pub(crate) const fn inline(mut self) -> Self {
        self.inline = true;
        self
    }
}

impl<K, F> Mapping<K, F> {
    /// `keys` is what `key` takes, as a regular expression.
    pub(crate) const fn new(
        key: fn(&str) -> Result<K, String>,
        keys: &'static str,
        entry: F,
        wrong: fn(&str, &str) -> String,
        accepts: &'static str,
    ) -> Self {
        Mapping { key, entry, wrong, accepts, keys, each: false }
    }

    /// Has each entry compared by itself.
    pub(crate) const fn each(mut self) -> Self {
        self.each = true;
        self
    }
}

/// The entries of an array; notes if it is none, or empty where it must not be.
fn entries<'a, 'i>(
    at: Place<'a, 'i>,
    want: &str,
    empty: Option<&str>,
    report: &mut Report,
) -> Option<&'a [Spanned<DeValue<'i>>]> {
    let start = at.value.span().start;
    match (at.value.get_ref().as_array(), empty) {
        (None, _) => report.fault(at.key, start, &wrong_type(want, at.value.get_ref())),
        (Some(array), Some(message)) if array.is_empty() => report.fault(at.key, start, message),
        (Some(array), _) => return Some(array),
    }
    None
}

impl<F: Leaf> Form for List<F> {
    type Value = Vec<F::Value>;

    fn read(&self, at: Place<'_, '_>, to: &mut Self::Value, report: &mut Report) {
        let Some(entries) = entries(at, "an array of strings", self.empty, report) else { return };
        to.clear();
        for (i, entry) in entries.iter().enumerate() {
            match self.entry.parse(entry.get_ref()) {
                Ok(value) => to.push(value),
                Err(why) => {
                    let message = format!("entry {}: {why}", i + 1);
                    report.fault(at.key, entry.span().start, &message);
                }
            }
        }
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        let entries: Vec<String> = value.iter().filter_map(|one| self.entry.show(one)).collect();
        Some(format!("[{}]", entries.join(", ")))
    }

    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }

    fn schema(&self) -> Value {
        let least = usize::from(self.empty.is_some());
        json!({ "type": "array", "minItems": least, "items": self.entry.schema() })
    }
}

impl<K: Ord + Clone + ToString, F: Leaf> Form for Mapping<K, F> {
    type Value = BTreeMap<K, F::Value>;

    fn read(&self, at: Place<'_, '_>, to: &mut Self::Value, report: &mut Report) {
        let value = at.value.get_ref();
        let Some(table) = value.as_table() else {
            return report.fault(at.key, at.value.span().start, &wrong_type("a table", value));
        };
        for (name, entry) in table {
            let (text, start) = (name.get_ref(), name.span().start);
            match ((self.key)(text), self.entry.parse(entry.get_ref())) {
                (Ok(key), Ok(value)) => drop(to.insert(key, value)),
                (Err(message), _) => report.fault(at.key, start, &message),
                (_, Err(why)) => report.fault(at.key, start, &(self.wrong)(text, &why)),
            }
        }
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        let entry = |(key, value): (&K, &F::Value)| {
            let key = write_string(&key.to_string());
            Some(format!("{key} = {}", self.entry.show(value)?))
        };
        let entries: Vec<String> = value.iter().filter_map(entry).collect();
        match (self.each, entries.as_slice()) {
            (true, _) => None,
            (false, []) => Some("{}".to_owned()),
            (false, entries) => Some(format!("{{ {} }}", entries.join(", "))),
        }
    }

    fn values(&self, value: &Self::Value, key: &str, takes: Takes, found: &mut Vec<Shown>) {
        if let Some(text) = self.show(value) {
            return found.push(Shown { key: key.to_owned(), text, takes });
        }
        let entry = |(name, value): (&K, &F::Value)| {
            let (key, text) = (table::join(key, &name.to_string()), self.entry.show(value)?);
            Some(Shown { key, text, takes })
        };
        found.extend(value.iter().filter_map(entry));
    }

    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }

    fn schema(&self) -> Value {
        json!({
            "type": "object",
            "propertyNames": { "pattern": self.keys },
            "additionalProperties": self.entry.schema(),
        })
    }
}

impl<T: Table> Form for Section<T> {
    type Value = T;

    fn read(&self, at: Place<'_, '_>, to: &mut T, report: &mut Report) {
        match at.value.get_ref() {
            DeValue::Table(found) => table::read(at.key, found, to, report),
            other => report.fault(at.key, at.value.span().start, &wrong_type("a table", other)),
        }
    }

    fn show(&self, _: &T) -> Option<String> {
        None
    }

    fn values(&self, value: &T, key: &str, _: Takes, found: &mut Vec<Shown>) {
        table::values(value, key, found);
    }

    fn keep(&self, to: &mut T, from: &T, _: Takes) {
        table::keep(to, from);
    }

    fn accepts(&self) -> String {
        "table".to_owned()
    }

    fn schema(&self) -> Value {
        table::schema::<T>()
    }

    fn rows(&self, row: Row, found: &mut Vec<Row>) {
        table::rows::<T>(&row.key, found);
    }
}

impl<T: Table> Form for Tables<T> {
    type Value = Vec<T>;

    fn read(&self, at: Place<'_, '_>, to: &mut Vec<T>, report: &mut Report) {
        let Some(entries) = entries(at, "an array of tables", self.empty, report) else { return };
        to.clear();
        for (i, entry) in entries.iter().enumerate() {
            let (key, start) = (format!("{}[{i}]", at.key), entry.span().start);
            match entry.get_ref() {
                DeValue::Table(found) => {
                    let mut value = T::default();
                    report.within(&key, start, |report| {
                        table::read(&key, found, &mut value, report);
                    });
                    to.push(value);
                }
                other => report.fault(&key, start, &wrong_type("a table", other)),
            }
        }
    }

    fn show(&self, value: &Vec<T>) -> Option<String> {
        let shown = |one: &T| {
            let mut keys = Vec::new();
            table::values(one, "", &mut keys);
            let keys: Vec<String> =
                keys.iter().map(|Shown { key, text, .. }| format!("{key} = {text}")).collect();
            format!("{{ {} }}", keys.join(", "))
        };
        let tables: Vec<String> = value.iter().map(shown).collect();
        self.inline.then(|| format!("[{}]", tables.join(", ")))
    }

    fn values(&self, value: &Vec<T>, key: &str, takes: Takes, found: &mut Vec<Shown>) {
        match self.show(value) {
            Some(text) => found.push(Shown { key: key.to_owned(), text, takes }),
            None => {
                for (i, one) in value.iter().enumerate() {
                    table::values(one, &format!("{key}[{i}]"), found);
                }
            }
        }
    }

    fn accepts(&self) -> String {
        let keys: Vec<&str> = T::KEYS.iter().map(|key| key.name).collect();
        format!("list of `{{ {} }}`", keys.join(", "))
    }

    fn schema(&self) -> Value {
        let least = usize::from(self.empty.is_some());
        json!({ "type": "array", "minItems": least, "items": table::schema::<T>() })
    }

    fn rows(&self, row: Row, found: &mut Vec<Row>) {
        match self.inline {
            true => found.push(row),
            false => table::rows::<T>(&format!("{}[]", row.key), found),
        }
    }
}
