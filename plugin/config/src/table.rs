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
use toml::de::DeTable;

use super::form::{Form, Place};
use super::keys::{Row, Shown, Takes};
use super::parse::{Checks, Report};

/// One key of a table; what it does goes through the field that has its value.
pub struct Key<T> {
    /// As in the file.
    pub(super) name: &'static str,
    /// What it means, in Markdown.
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

/// A table of the file.
pub trait Table: Clone + Default + 'static {
    /// In the order of `config.toml`.
    fn keys() -> Vec<Key<Self>>;

    /// Notes what does not hold between keys.
    fn check(&self, _: &mut Checks<'_>) {}
}

/// Reads a table over what `to` has: every key, and what must hold between them.
pub(super) fn read<T: Table>(key: &str, table: &DeTable<'_>, to: &mut T, report: &mut Report) {
    let declared = T::keys();
    for one in &declared {
        let key = join(key, one.name);
        match table.get(one.name) {
            Some(value) => report.within(&key, value.span().start, |report| {
                (one.read)(Place { key: &key, value }, to, report);
            }),
            None => one.missing.into_iter().for_each(|message| report.problem(&key, message)),
        }
    }
    report.unknown(key, table, &declared.iter().map(|one| one.name).collect());
    to.check(&mut Checks { at: key, report });
}

/// The values of a table, by dotted keys.
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

/// The rows of the reference of a table.
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

            $(fn check(&self, checks: &mut $crate::parse::Checks<'_>) {
                $check(self, checks);
            })?
        }
    };
}

pub(super) use {either, table};
