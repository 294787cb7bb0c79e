//! Values of several pieces, in each of which something may be wrong: lists, maps and tables.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use super::text::write_string;
use super::{Form, Leaf, Place, wrong_type};
use crate::keys::{Shown, Takes};
use crate::parse::Report;
use crate::table::{self, Table};

/// The entries of an array; notes if it is none, or empty where `empty` says what is wrong with that.
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

fn array(items: Value, empty: Option<&str>) -> Value {
    json!({ "type": "array", "minItems": usize::from(empty.is_some()), "items": items })
}

/// A list of values.
pub(crate) fn list<T: 'static>(entry: Leaf<T>, accepts: &str) -> Form<Vec<T>> {
    values(entry, accepts, None)
}

/// A list that must not be empty, and what is wrong with one that is.
pub(crate) fn filled<T: 'static>(
    entry: Leaf<T>,
    accepts: &str,
    empty: &'static str,
) -> Form<Vec<T>> {
    values(entry, accepts, Some(empty))
}

fn values<T: 'static>(entry: Leaf<T>, accepts: &str, empty: Option<&'static str>) -> Form<Vec<T>> {
    let Leaf { schema, parse, show, .. } = entry;
    let read = move |at: Place<'_, '_>, to: &mut Vec<T>, report: &mut Report| {
        let Some(entries) = entries(at, "an array of strings", empty, report) else { return };
        to.clear();
        for (i, entry) in entries.iter().enumerate() {
            match parse(entry.get_ref()) {
                Ok(value) => to.push(value),
                Err(why) => {
                    let message = format!("entry {}: {why}", i + 1);
                    report.fault(at.key, entry.span().start, &message);
                }
            }
        }
    };
    let values = move |all: &Vec<T>, key: &str, takes, found: &mut Vec<Shown>| {
        let entries: Vec<String> = all.iter().filter_map(&show).collect();
        let text = format!("[{}]", entries.join(", "));
        found.push(Shown { key: key.to_owned(), text, takes });
    };
    Form {
        accepts: accepts.to_owned(),
        schema: Box::new(move || array(schema(), empty)),
        read: Box::new(read),
        values: Box::new(values),
        keep: None,
        rows: None,
    }
}

/// A table whose keys are the user's, read by `key`, which takes what the regular expression `keys` says; they come over
/// those that are there. `wrong` says what is wrong with the value of a key. `each` has the entries compared one by one.
pub(crate) fn mapping<K: Ord + ToString + 'static, T: 'static>(
    (key, keys): (fn(&str) -> Result<K, String>, &'static str),
    entry: Leaf<T>,
    wrong: fn(&str, &str) -> String,
    accepts: &str,
    each: bool,
) -> Form<BTreeMap<K, T>> {
    let Leaf { schema, parse, show, .. } = entry;
    let read = move |at: Place<'_, '_>, to: &mut BTreeMap<K, T>, report: &mut Report| {
        let value = at.value.get_ref();
        let Some(table) = value.as_table() else {
            return report.fault(at.key, at.value.span().start, &wrong_type("a table", value));
        };
        for (name, entry) in table {
            let (text, start) = (name.get_ref(), name.span().start);
            match (key(text), parse(entry.get_ref())) {
                (Ok(key), Ok(value)) => drop(to.insert(key, value)),
                (Err(message), _) => report.fault(at.key, start, &message),
                (_, Err(why)) => report.fault(at.key, start, &wrong(text, &why)),
            }
        }
    };
    let values = move |all: &BTreeMap<K, T>, key: &str, takes, found: &mut Vec<Shown>| {
        let entries = all.iter().filter_map(|(name, value)| Some((name.to_string(), show(value)?)));
        if each {
            let entry = |(name, text): (String, String)| {
                let key = table::join(key, &name);
                Shown { key, text, takes }
            };
            return found.extend(entries.map(entry));
        }
        let entry = |(name, text): (String, String)| format!("{} = {text}", write_string(&name));
        let entries: Vec<String> = entries.map(entry).collect();
        let text = match entries.as_slice() {
            [] => "{}".to_owned(),
            entries => format!("{{ {} }}", entries.join(", ")),
        };
        found.push(Shown { key: key.to_owned(), text, takes });
    };
    let schema = move || {
        json!({
            "type": "object",
            "propertyNames": { "pattern": keys },
            "additionalProperties": schema(),
        })
    };
    Form {
        accepts: accepts.to_owned(),
        schema: Box::new(schema),
        read: Box::new(read),
        values: Box::new(values),
        keep: None,
        rows: None,
    }
}

/// A table of declared keys.
pub(crate) fn section<T: Table>() -> Form<T> {
    let read = |at: Place<'_, '_>, to: &mut T, report: &mut Report| match at.value.get_ref() {
        DeValue::Table(found) => table::read(at.key, found, to, report),
        other => report.fault(at.key, at.value.span().start, &wrong_type("a table", other)),
    };
    Form {
        accepts: "table".to_owned(),
        schema: Box::new(table::schema::<T>),
        read: Box::new(read),
        values: Box::new(|value, key, _, found| table::values(value, key, found)),
        keep: Some(table::keep::<T>),
        rows: Some(table::rows::<T>),
    }
}

/// A list of tables of declared keys; `empty`: what is wrong with one without any, if anything is.
pub(crate) fn tables<T: Table>(empty: Option<&'static str>) -> Form<Vec<T>> {
    let read = move |at: Place<'_, '_>, to: &mut Vec<T>, report: &mut Report| {
        let Some(entries) = entries(at, "an array of tables", empty, report) else { return };
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
    };
    let values = |all: &Vec<T>, key: &str, _, found: &mut Vec<Shown>| {
        for (i, one) in all.iter().enumerate() {
            table::values(one, &format!("{key}[{i}]"), found);
        }
    };
    let names: Vec<&str> = T::keys().iter().map(|key| key.name).collect();
    Form {
        accepts: format!("list of `{{ {} }}`", names.join(", ")),
        schema: Box::new(move || array(table::schema::<T>(), empty)),
        read: Box::new(read),
        values: Box::new(values),
        keep: None,
        rows: Some(|key, found| table::rows::<T>(&format!("{key}[]"), found)),
    }
}

/// A list of tables that is one value, to be compared and documented as a whole.
pub(crate) fn inline<T: Table>() -> Form<Vec<T>> {
    let values = |all: &Vec<T>, key: &str, takes: Takes, found: &mut Vec<Shown>| {
        let shown = |one: &T| {
            let mut keys = Vec::new();
            table::values(one, "", &mut keys);
            let keys: Vec<String> =
                keys.iter().map(|Shown { key, text, .. }| format!("{key} = {text}")).collect();
            format!("{{ {} }}", keys.join(", "))
        };
        let tables: Vec<String> = all.iter().map(shown).collect();
        let text = format!("[{}]", tables.join(", "));
        found.push(Shown { key: key.to_owned(), text, takes });
    };
    Form { values: Box::new(values), rows: None, ..tables(None) }
}
