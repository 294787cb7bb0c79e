//! Every key of the configuration in one table: what it may be, what it means, and when a change of it
//! takes effect. The reference in `docs/configuration.md`, `tessera config plan` and a reload of a running
//! plugin all go by it.

mod delivery;
mod layouts;
mod node;
mod reference;
mod sharing;
pub mod toml;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::Config;
pub use reference::reference;

/// One key.
#[derive(Debug)]
pub struct Key {
    /// Dotted; `[]` stands for each entry of an array of tables.
    pub name: &'static str,
    /// What may be written.
    pub form: &'static str,
    /// When a change takes effect.
    pub takes: Takes,
    /// What it means, in Markdown.
    pub meaning: &'static str,
    show: Show,
}

/// How a key's values are shown, as TOML.
#[derive(Debug)]
enum Show {
    One(fn(&Config) -> String),
    /// With the keys as they are in the file.
    Each(fn(&Config) -> Vec<(String, String)>),
}

/// When a change of a key takes effect.
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// As soon as the file is read, for everybody.
    AtOnce,
    /// As soon as the file is read, for whoever comes: what runs keeps what it was given until its pod
    /// ends.
    NewPods,
    /// When the plugin starts the next time. Until then the value before holds, which this copies from the
    /// second to the first.
    Restart(fn(&mut Config, &Config)),
}

impl Takes {
    /// In words.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Takes::AtOnce => "at once",
            Takes::NewPods => "for new pods",
            Takes::Restart(_) => "after a restart",
        }
    }
}

/// All keys, in the order of `config.toml`.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    [sharing::KEYS, layouts::KEYS, sharing::COMPUTE, node::HEALTH, delivery::KEYS, node::KEYS]
        .into_iter()
        .flatten()
}

/// A key whose value differs between two configurations.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The key, as in the file.
    pub key: String,
    /// Its values as TOML; `None` where there is no such entry.
    pub before: Option<String>,
    /// See `before`.
    pub after: Option<String>,
    /// When the change takes effect.
    pub takes: Takes,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".to_owned());
        write!(f, "{}: {} → {}", self.key, value(&self.before), value(&self.after))
    }
}

impl Key {
    /// Its values, with the keys as they are in a file.
    #[must_use]
    pub fn values(&self, config: &Config) -> BTreeMap<String, String> {
        match self.show {
            Show::One(show) => BTreeMap::from([(self.name.to_owned(), show(config))]),
            Show::Each(show) => show(config).into_iter().collect(),
        }
    }

    /// Its default as TOML; `None` where there is none.
    #[must_use]
    pub fn default(&self) -> Option<String> {
        match self.show {
            Show::One(show) => Some(show(&Config::default())),
            Show::Each(_) => None,
        }
    }

    fn differences(&self, before: &Config, after: &Config) -> Vec<Difference> {
        let (before, after) = (self.values(before), self.values(after));
        let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let differs = |key: &&String| before.get(*key) != after.get(*key);
        let difference = |key: &String| Difference {
            key: key.clone(),
            before: before.get(key).cloned(),
            after: after.get(key).cloned(),
            takes: self.takes,
        };
        keys.into_iter().filter(differs).map(difference).collect()
    }
}

/// What differs, in the table's order.
#[must_use]
pub fn differences(before: &Config, after: &Config) -> Vec<Difference> {
    keys().flat_map(|key| key.differences(before, after)).collect()
}

/// Gives `config` the values that `running` has of all keys that take a restart.
pub fn keep(config: &mut Config, running: &Config) {
    for key in keys() {
        if let Takes::Restart(keep) = key.takes {
            keep(config, running);
        }
    }
}

const fn one(
    name: &'static str,
    form: &'static str,
    takes: Takes,
    show: fn(&Config) -> String,
    meaning: &'static str,
) -> Key {
    Key { name, form, takes, meaning, show: Show::One(show) }
}

const fn each(
    name: &'static str,
    form: &'static str,
    takes: Takes,
    show: fn(&Config) -> Vec<(String, String)>,
    meaning: &'static str,
) -> Key {
    Key { name, form, takes, meaning, show: Show::Each(show) }
}

#[cfg(test)]
mod tests;
