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
//! | reading, with every fault at its line and key | [`read`], [`Form::read`] |
//! | `config.toml`, `docs/configuration.md` | [`super::keys`] |
//! | the schema, of which the chart's `values.schema.json` is made | [`super::keys::schema`] |
//! | what differs between two configurations, and what of it waits for a restart | [`super::keys::differences`] |
//!
//! What must hold between keys is code: [`Table::check`].
//!
//! **The schema and the reader agree.** The schema accepts every value that the reader accepts. It refuses
//! what the reader refuses, but for what takes arithmetic on a quantity (more than 2⁶³ − 1, less than
//! `1Mi` or `4Mi` in a string, parts of a MiB, a sum of shares) and what is between keys. A test asks both about values
//! of every key. The chart's templates do that arithmetic, with the schema's `exclusiveMinimum` and `multipleOf`; they
//! refuse a fraction of a byte where whole MiB are wanted, which the reader rounds up.
//!
//! Serde does not serve here: it stops at the first fault, and knows no lines, units or ranges.

use serde_json::{Map, Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{Row, Shown, Takes};
use super::parse::{Checks, Report};

/// One key of a table.
pub struct Key<T: 'static> {
    /// As in the file.
    pub(super) name: &'static str,
    /// What it means, in Markdown, line by line.
    pub(super) doc: &'static [&'static str],
    pub(super) takes: Takes,
    /// The problem with a table that lacks it; `None` where it may be left out.
    pub(super) missing: Option<&'static str>,
    pub(super) field: &'static dyn Field<T>,
}

/// A table of the file.
pub trait Table: Clone + Default + 'static {
    /// In the order of `config.toml`.
    const KEYS: &'static [Key<Self>];

    /// Notes what does not hold between keys.
    fn check(&self, _: &mut Checks<'_>) {}
}

/// A value in the file, with its dotted key.
#[derive(Clone, Copy)]
pub struct Place<'a, 'i> {
    pub(super) key: &'a str,
    pub(super) value: &'a Spanned<DeValue<'i>>,
}

/// What may be written for a key, and what it is then.
pub trait Form {
    /// The value.
    type Value: Clone;

    /// Reads what stands at a place; what is wrong there is noted, and `to` stays as far as that goes.
    fn read(&self, at: Place<'_, '_>, to: &mut Self::Value, report: &mut Report);

    /// The value as TOML; `None` for one that is not written.
    fn show(&self, value: &Self::Value) -> Option<String>;

    /// The values to compare and their keys: one, unless the value is a table.
    fn values(&self, value: &Self::Value, key: &str, takes: Takes, found: &mut Vec<Shown>) {
        let key = key.to_owned();
        found.extend(self.show(value).map(|text| Shown { key, text, takes }));
    }

    /// Gives `to` what `from` has of keys whose change takes a restart.
    fn keep(&self, to: &mut Self::Value, from: &Self::Value, takes: Takes) {
        if takes == Takes::Restart {
            to.clone_from(from);
        }
    }

    /// What may be written, in Markdown.
    fn accepts(&self) -> String;

    /// What may be written, as JSON Schema (draft 7).
    fn schema(&self) -> Value;

    /// The rows of the reference: this one, or those of the keys of a table.
    fn rows(&self, row: Row, found: &mut Vec<Row>) {
        found.push(row);
    }
}

/// One field of a table, whatever its form.
pub trait Field<T> {
    /// See [`Form::read`].
    fn read(&self, at: Place<'_, '_>, to: &mut T, report: &mut Report);
    /// See [`Form::values`].
    fn values(&self, table: &T, key: &str, takes: Takes, found: &mut Vec<Shown>);
    /// See [`Form::keep`].
    fn keep(&self, to: &mut T, from: &T, takes: Takes);
    /// See [`Form::schema`].
    fn schema(&self) -> Value;
    /// See [`Form::rows`].
    fn rows(&self, default: &T, row: Row, found: &mut Vec<Row>);
}

/// A form, and the field that has its value.
pub struct Lens<T, F: Form> {
    pub(super) form: F,
    pub(super) get: fn(&T) -> &F::Value,
    pub(super) get_mut: fn(&mut T) -> &mut F::Value,
}

impl<T, F: Form> Field<T> for Lens<T, F> {
    fn read(&self, at: Place<'_, '_>, to: &mut T, report: &mut Report) {
        self.form.read(at, (self.get_mut)(to), report);
    }

    fn values(&self, table: &T, key: &str, takes: Takes, found: &mut Vec<Shown>) {
        self.form.values((self.get)(table), key, takes, found);
    }

    fn keep(&self, to: &mut T, from: &T, takes: Takes) {
        self.form.keep((self.get_mut)(to), (self.get)(from), takes);
    }

    fn schema(&self) -> Value {
        self.form.schema()
    }

    fn rows(&self, default: &T, row: Row, found: &mut Vec<Row>) {
        let (accepts, shown) = (self.form.accepts(), self.form.show((self.get)(default)));
        let default = shown.filter(|_| !row.required);
        self.form.rows(Row { accepts, default, ..row }, found);
    }
}

/// Reads a table over what `to` has: every key, and what must hold between them.
pub(super) fn read<T: Table>(key: &str, table: &DeTable<'_>, to: &mut T, report: &mut Report) {
    for declared in T::KEYS {
        let key = join(key, declared.name);
        match table.get(declared.name) {
            Some(value) => report.within(&key, value.span().start, |report| {
                declared.field.read(Place { key: &key, value }, to, report);
            }),
            None => declared.missing.into_iter().for_each(|message| report.problem(&key, message)),
        }
    }
    report.unknown(key, table, &T::KEYS.iter().map(|key| key.name).collect());
    to.check(&mut Checks { at: key, report });
}

/// The values of a table, by dotted keys.
pub(super) fn values<T: Table>(table: &T, key: &str, found: &mut Vec<Shown>) {
    for declared in T::KEYS {
        declared.field.values(table, &join(key, declared.name), declared.takes, found);
    }
}

/// See [`Form::keep`].
pub(super) fn keep<T: Table>(to: &mut T, from: &T) {
    T::KEYS.iter().for_each(|key| key.field.keep(to, from, key.takes));
}

/// See [`Form::schema`].
pub(super) fn schema<T: Table>() -> Value {
    let default = T::default();
    let property = |key: &Key<T>| {
        let mut schema = key.field.schema();
        schema["description"] = plain(&key.doc.join("")).into();
        let mut rows = Vec::new();
        let (name, required) = (key.name.to_owned(), key.missing.is_some());
        key.field.rows(&default, Row { key: name, required, ..Row::default() }, &mut rows);
        // A table has rows with longer names.
        if let [Row { key: name, default: Some(text), .. }] = rows.as_slice()
            && name == key.name
            && let Ok(mut file) = toml::from_str::<Map<String, Value>>(&format!("{name} = {text}"))
        {
            schema["default"] = file[name].take();
        }
        (key.name.to_owned(), schema)
    };
    let properties: Map<String, Value> = T::KEYS.iter().map(property).collect();
    let mut schema =
        json!({ "type": "object", "additionalProperties": false, "properties": properties });
    let required = T::KEYS.iter().filter(|key| key.missing.is_some()).map(|key| key.name);
    let required: Vec<&str> = required.collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// See [`Form::rows`].
pub(super) fn rows<T: Table>(key: &str, found: &mut Vec<Row>) {
    let default = T::default();
    for declared in T::KEYS {
        let row = Row {
            key: join(key, declared.name),
            doc: declared.doc.join("").trim().to_owned(),
            takes: declared.takes,
            required: declared.missing.is_some(),
            ..Row::default()
        };
        declared.field.rows(&default, row, found);
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

/// Declares a table; the module has an example. After the name, the function that checks what must hold
/// between keys; after `+`, a field that is no key.
macro_rules! table {
    ($(#[$about:meta])* pub struct $Table:ident $(: $check:path)? {$(
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
            const KEYS: &'static [$crate::table::Key<Self>] = &[$(
                $crate::table::Key {
                    name: $crate::table::either!($(($name))? (stringify!($field))),
                    doc: &[$($doc),+],
                    takes: $crate::table::either!(
                        $(($crate::keys::Takes::$takes))?
                        ($crate::keys::Takes::AtOnce)
                    ),
                    missing: $crate::table::either!($((Some($missing)))? (None)),
                    field: &$crate::table::Lens {
                        form: $form,
                        get: |table: &Self| &table.$field,
                        get_mut: |table: &mut Self| &mut table.$field,
                    },
                },
            )+];

            $(fn check(&self, checks: &mut $crate::parse::Checks<'_>) {
                $check(self, checks);
            })?
        }
    };
}

pub(super) use {either, table};
