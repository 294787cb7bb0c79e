//! What follows from the declarations of all keys: the reference in `docs/configuration.md`, `config.toml`, the
//! schema, and what differs between two configurations and when that takes effect.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use crate::{Config, table};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takes {
    /// As soon as the file is read, for everybody.
    #[default]
    AtOnce,
    /// As soon as the file is read, for new pods: a running one keeps what it was given until its pod
    /// ends.
    NewPods,
    /// When the plugin starts the next time. Until then the value before holds.
    Restart,
}

impl Takes {
    pub fn text(self) -> &'static str {
        match self {
            Takes::AtOnce => "at once",
            Takes::NewPods => "for new pods",
            Takes::Restart => "after a restart",
        }
    }
}

/// One key, as it is documented.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Dotted; `[]` stands for each entry of an array of tables.
    pub key: String,
    pub accepts: String,
    /// The default as TOML; `None` where there is none.
    pub default: Option<String>,
    pub required: bool,
    pub takes: Takes,
    pub doc: String,
}

pub fn rows() -> Vec<Row> {
    let mut found = Vec::new();
    table::rows::<Config>("", &mut found);
    found
}

/// What a file may say, as JSON Schema (draft 7). [`super::table`] says what it does not know.
pub fn schema() -> Value {
    let mut schema = table::schema::<Config>();
    schema["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    schema["title"] = "Configuration of Tessera".into();
    schema
}

/// A key whose value differs between two configurations.
#[derive(Clone, Debug)]
pub struct Difference {
    pub key: String,
    /// Its values as TOML; `None` where there is no such entry.
    pub before: Option<String>,
    pub after: Option<String>,
    pub takes: Takes,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".to_owned());
        write!(f, "{}: {} → {}", self.key, value(&self.before), value(&self.after))
    }
}

/// A value, as it could stand in a file.
#[derive(Clone, Debug)]
pub struct Shown {
    /// With indexes of arrays.
    pub(super) key: String,
    pub(super) text: String,
    pub(super) takes: Takes,
}

/// What differs, in the order of `config.toml`; what is gone comes last.
pub fn differences(before: &Config, after: &Config) -> Vec<Difference> {
    let values = |config: &Config| {
        let mut found = Vec::new();
        table::values(config, "", &mut found);
        found
    };
    let texts = |all: &[Shown]| -> BTreeMap<String, String> {
        all.iter().map(|shown| (shown.key.clone(), shown.text.clone())).collect()
    };
    let (before, after) = (values(before), values(after));
    let (old, new) = (texts(&before), texts(&after));
    let gone = before.into_iter().filter(|shown| !new.contains_key(&shown.key));
    let difference = |shown: Shown| Difference {
        before: old.get(&shown.key).cloned(),
        after: new.get(&shown.key).cloned(),
        key: shown.key,
        takes: shown.takes,
    };
    let all = after.into_iter().chain(gone).map(difference);
    all.filter(|difference| difference.before != difference.after).collect()
}

/// Gives `config` the values that `running` has of all keys that take a restart.
pub fn keep(config: &mut Config, running: &Config) {
    table::keep(config, running);
}

/// `config.toml`: every key with its default and what it means. A test writes it, and holds it to the declarations.
pub const COMMENTED: &str = include_str!("../../../config.toml");
/// `docs/configuration.md`, the reference of all keys, likewise.
pub const REFERENCE: &str = include_str!("../../../docs/configuration.md");

#[cfg(test)]
mod tests;
