//! The configuration is a tree of tables, and each key is declared once, in `tables/`:
//!
//! ```text
//! /// How long a tenant's lease of the GPU lasts while others wait.
//! quantum: Duration = millis(5), lease_time(), AtOnce;
//! ```
//!
//! The declaration gives the documentation, the name (or `as "name"` where the field has another), the
//! type, the default, the [form](Form) (what may be written, unit and range) and when a change
//! takes effect. All else follows from it:
//!
//! | Follows | Where |
//! |---|---|
//! | the field, its rustdoc, `Default` | [`table!`] |
//! | reading, with every fault at its line and key | [`read`], [`Form`] |
//! | `config.toml`, `docs/configuration.md` | [`super::keys`] |
//! | the schema, of which the chart's `values.schema.json` is made | [`super::keys::schema`] |
//! | what differs between two configurations, and what of it waits for a restart | [`super::keys::differences`] |
//!
//! What must hold between keys is code: [`super::between`].
//!
//! **The schema and the reader agree.** The schema accepts every value that the reader accepts. It refuses
//! what the reader refuses, but for what takes arithmetic on a quantity (more than 2⁶³ − 1, less than
//! `1Mi` or `4Mi` in a string, parts of a MiB, a sum of shares) and what is between keys. A test asks both about values
//! of every key. The chart's templates do that arithmetic, with the schema's `exclusiveMinimum` and `multipleOf`; they
//! refuse a fraction of a byte where whole MiB are wanted, which the reader rounds up.
//!
//! Serde does not serve here: it stops at the first fault, and knows no lines, units or ranges.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::form::{Form, Leaf, Place, write_string, wrong_type};
use crate::keys::{Row, Shown, Takes};
use crate::parse::Report;

/// One key of a table; what it does goes through the field that has its value.
pub struct Key<T> {
    pub(super) name: &'static str,
    pub(super) doc: &'static str,
    takes: Takes,
    /// The problem with a table that lacks it; `None` where it may be left out.
    missing: Option<&'static str>,
    accepts: String,
    schema: Box<dyn Fn() -> Value>,
    read: Box<dyn Fn(Place<'_, '_>, &mut T, &mut Report)>,
    pub(super) values: Box<dyn Fn(&T, &str, &mut Vec<Shown>)>,
    keep: Box<dyn Fn(&mut T, &T)>,
    pub(super) rows: Option<fn(&str, &mut Vec<Row>)>,
}

impl<T: 'static> Key<T> {
    pub(super) fn new<F: Clone + 'static>(
        (name, doc): (&'static str, &'static str),
        (takes, missing): (Takes, Option<&'static str>),
        form: impl Into<Form<F>>,
        get: fn(&T) -> &F,
        get_mut: fn(&mut T) -> &mut F,
    ) -> Self {
        let Form { accepts, schema, read, values, keep, rows } = form.into();
        let keep = move |to: &mut T, from: &T| match keep {
            Some(keep) => keep(get_mut(to), get(from)),
            None if takes == Takes::Restart => get_mut(to).clone_from(get(from)),
            None => {}
        };
        Key {
            name,
            doc: doc.trim(),
            takes,
            missing,
            accepts,
            schema,
            read: Box::new(move |at, to, report| read(at, get_mut(to), report)),
            values: Box::new(move |table, key, found| values(get(table), key, takes, found)),
            keep: Box::new(keep),
            rows,
        }
    }
}

pub trait Table: Clone + Default + 'static {
    /// In the order of `config.toml`.
    fn keys() -> Vec<Key<Self>>;
}

/// Reads every key of a table over what `to` has.
pub(super) fn read<T: Table>(key: &str, table: &DeTable<'_>, to: &mut T, report: &mut Report) {
    let declared = T::keys();
    for one in &declared {
        let key = join(key, one.name);
        match table.get(one.name) {
            Some(value) => {
                report.stands(&key, value.span().start);
                (one.read)(Place { key: &key, value }, to, report);
            }
            None => one.missing.into_iter().for_each(|message| report.missing(&key, message)),
        }
    }
    report.unknown(key, table, &declared.iter().map(|one| one.name).collect());
}

pub(super) fn values<T: Table>(table: &T, key: &str, found: &mut Vec<Shown>) {
    T::keys().iter().for_each(|one| (one.values)(table, &join(key, one.name), found));
}

/// See [`super::keys::keep`].
pub(super) fn keep<T: Table>(to: &mut T, from: &T) {
    T::keys().iter().for_each(|one| (one.keep)(to, from));
}

/// The default of a key that is one value, as TOML.
fn default<T: Table>(key: &Key<T>) -> Option<String> {
    let mut found = Vec::new();
    (key.values)(&T::default(), key.name, &mut found);
    let own = found.into_iter().find(|shown| shown.key == key.name);
    own.filter(|_| key.missing.is_none()).map(|shown| shown.text)
}

/// See [`super::keys::schema`].
pub(super) fn schema<T: Table>() -> Value {
    let keys = T::keys();
    let property = |key: &Key<T>| {
        let mut schema = (key.schema)();
        schema["description"] = plain(key.doc).into();
        if let Some(text) = default(key)
            && let Ok(mut file) =
                toml::from_str::<Map<String, Value>>(&format!("{} = {text}", key.name))
        {
            schema["default"] = file[key.name].take();
        }
        (key.name.to_owned(), schema)
    };
    let properties: Map<String, Value> = keys.iter().map(property).collect();
    let mut schema =
        json!({ "type": "object", "additionalProperties": false, "properties": properties });
    let required = keys.iter().filter(|key| key.missing.is_some()).map(|key| key.name);
    let required: Vec<&str> = required.collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

pub(super) fn rows<T: Table>(at: &str, found: &mut Vec<Row>) {
    for one in T::keys() {
        let (key, default) = (join(at, one.name), default(&one));
        if let Some(rows) = one.rows {
            rows(&key, found);
            continue;
        }
        let Key { doc, takes, missing, accepts, .. } = one;
        let (doc, required) = (doc.to_owned(), missing.is_some());
        found.push(Row { key, accepts, default, required, takes, doc });
    }
}

pub(super) fn join(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// Markdown as plain text: a link becomes its target, from the root of the repository, behind its words where these are
/// more than the target's name.
pub(super) fn plain(markdown: &str) -> String {
    let mut text = markdown.trim().to_owned();
    while let Some((before, (name, (target, after)))) =
        text.split_once('[').and_then(|(before, rest)| {
            let (name, rest) = rest.split_once("](")?;
            Some((before, (name, rest.split_once(')')?)))
        })
    {
        let page = target.split('#').next().unwrap_or(target);
        let page = page.strip_prefix("../").map_or_else(|| format!("docs/{page}"), str::to_owned);
        let words = if page.ends_with(name) { page } else { format!("{name} ({page})") };
        text = format!("{before}{words}{after}");
    }
    text
}

/// The first of two, or the only one.
macro_rules! either {
    (($($first:tt)+) ($($second:tt)+)) => { $($first)+ };
    (($($only:tt)+)) => { $($only)+ };
}

/// Declares a table; the module has an example, and [`super::Config`] says what each is about. After `+`, a field that is
/// no key.
macro_rules! table {
    ($(#[$about:meta])* pub struct $Table:ident {$(
        $(#[doc = $doc:literal])+
        $field:ident $(as $name:literal)?: $Type:ty = $default:expr, $form:expr
            $(, $takes:ident)? $(, required $missing:expr)?;
    )+ $(+ $(#[doc = $extra_doc:literal])+ $extra:ident: $Extra:ty;)*}) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $Table {
            $($(#[doc = $doc])+ pub $field: $Type,)+
            $($(#[doc = $extra_doc])+ pub $extra: $Extra,)*
        }

        impl Default for $Table {
            fn default() -> Self {
                $Table { $($field: $default,)+ $($extra: Default::default(),)* }
            }
        }

        impl $crate::table::Table for $Table {
            fn keys() -> Vec<$crate::table::Key<Self>> {
                use $crate::keys::Takes;
                vec![$(
                    $crate::table::Key::new(
                        (
                            $crate::table::either!($(($name))? (stringify!($field))),
                            concat!($($doc),+),
                        ),
                        (
                            $crate::table::either!($((Takes::$takes))? (Takes::AtOnce)),
                            $crate::table::either!($((Some($missing)))? (None)),
                        ),
                        $form,
                        |table: &Self| &table.$field,
                        |table: &mut Self| &mut table.$field,
                    ),
                )+]
            }
        }
    };
}

pub(super) use {either, table};

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

/// A list of values; `empty`: what is wrong with one without any, if anything is.
pub(crate) fn list<T: 'static>(
    entry: Leaf<T>,
    accepts: &str,
    empty: Option<&'static str>,
) -> Form<Vec<T>> {
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
/// those that are there. `each` has the entries compared one by one.
pub(crate) fn mapping<K: Ord + ToString + 'static, T: 'static>(
    (key, keys): (fn(&str) -> Result<K, String>, &'static str),
    entry: Leaf<T>,
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
                (_, Err(why)) => report.fault(at.key, start, &format!("{text}: {why}")),
            }
        }
    };
    let values = move |all: &BTreeMap<K, T>, key: &str, takes, found: &mut Vec<Shown>| {
        let entries = all.iter().filter_map(|(name, value)| Some((name.to_string(), show(value)?)));
        if each {
            let entry = |(name, text): (String, String)| {
                let key = join(key, &name);
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
        DeValue::Table(found) => read(at.key, found, to, report),
        other => report.fault(at.key, at.value.span().start, &wrong_type("a table", other)),
    };
    Form {
        accepts: "table".to_owned(),
        schema: Box::new(schema::<T>),
        read: Box::new(read),
        values: Box::new(|value, key, _, found| values(value, key, found)),
        keep: Some(keep::<T>),
        rows: Some(rows::<T>),
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
                    report.stands(&key, start);
                    read(&key, found, &mut value, report);
                    to.push(value);
                }
                other => report.fault(&key, start, &wrong_type("a table", other)),
            }
        }
    };
    let values = |all: &Vec<T>, key: &str, _, found: &mut Vec<Shown>| {
        for (i, one) in all.iter().enumerate() {
            values(one, &format!("{key}[{i}]"), found);
        }
    };
    let names: Vec<&str> = T::keys().iter().map(|key| key.name).collect();
    Form {
        accepts: format!("list of `{{ {} }}`", names.join(", ")),
        schema: Box::new(move || array(schema::<T>(), empty)),
        read: Box::new(read),
        values: Box::new(values),
        keep: None,
        rows: Some(|key, found| rows::<T>(&format!("{key}[]"), found)),
    }
}

/// A list of tables that is one value, to be compared and documented as a whole.
pub(crate) fn inline<T: Table>() -> Form<Vec<T>> {
    let values = |all: &Vec<T>, key: &str, takes: Takes, found: &mut Vec<Shown>| {
        let shown = |one: &T| {
            let mut keys = Vec::new();
            values(one, "", &mut keys);
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
