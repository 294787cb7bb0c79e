//! Strings: words of which there are a few, paths, and what has a grammar of its own.

use std::marker::PhantomData;
use std::path::PathBuf;

use serde_json::{Value, json};
use toml::de::DeValue;

use super::{Leaf, string};

/// A value for which the file has a few words.
pub trait Words: Copy + PartialEq + 'static {
    /// Each with its word.
    const WORDS: &'static [(&'static str, Self)];
}

/// One of the words.
pub struct Word<T>(PhantomData<T>);

/// What may be left out, and is `None` then.
pub struct Given<F>(F);

/// An absolute path.
pub struct Path;

/// An absolute path; an empty string is `None`.
pub struct OptionalPath;

/// A string that a function reads.
pub struct Parsed<T: 'static> {
    read: fn(&str) -> Result<T, String>,
    show: fn(&T) -> String,
    accepts: &'static str,
    schema: fn() -> Value,
}

pub(crate) const fn word<T: Words>() -> Word<T> {
    Word(PhantomData)
}

pub(crate) const fn given<F>(form: F) -> Given<F> {
    Given(form)
}

pub(crate) const fn path() -> Path {
    Path
}

pub(crate) const fn optional_path() -> OptionalPath {
    OptionalPath
}

/// A string: what `read` makes of it, what makes a string of that again, what it may be in words and as schema.
pub(crate) const fn parsed<T>(
    read: fn(&str) -> Result<T, String>,
    show: fn(&T) -> String,
    accepts: &'static str,
    schema: fn() -> Value,
) -> Parsed<T> {
    Parsed { read, show, accepts, schema }
}

/// The words in quotation marks.
pub(crate) fn quoted<T: Words>() -> String {
    let words = T::WORDS.iter().map(|(word, _)| format!("\"{word}\""));
    words.collect::<Vec<_>>().join(", ")
}

impl<T: Words> Leaf for Word<T> {
    type Value = T;

    fn parse(&self, value: &DeValue<'_>) -> Result<T, String> {
        let text = string(value)?;
        let found = T::WORDS.iter().find(|(word, _)| *word == text);
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| format!("\"{text}\" is none of {}", quoted::<T>()))
    }

    fn show(&self, value: &T) -> Option<String> {
        let found = T::WORDS.iter().find(|(_, known)| known == value);
        found.map(|(word, _)| write_string(word))
    }

    fn accepts(&self) -> String {
        quoted::<T>().replace('"', "`")
    }

    fn schema(&self) -> Value {
        let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).collect();
        json!({ "enum": words })
    }
}

impl<F: Leaf> Leaf for Given<F> {
    type Value = Option<F::Value>;

    fn parse(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        self.0.parse(value).map(Some)
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        self.0.show(value.as_ref()?)
    }

    fn accepts(&self) -> String {
        self.0.accepts()
    }

    fn schema(&self) -> Value {
        self.0.schema()
    }
}

/// A path that does not depend on where the plugin was started.
pub(crate) fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let message = || format!("\"{text}\" must be an absolute path");
    path.is_absolute().then_some(path).ok_or_else(message)
}

impl Leaf for Path {
    type Value = PathBuf;

    fn parse(&self, value: &DeValue<'_>) -> Result<PathBuf, String> {
        absolute(string(value)?)
    }

    fn show(&self, value: &PathBuf) -> Option<String> {
        Some(write_path(Some(value)))
    }

    fn accepts(&self) -> String {
        "absolute path".to_owned()
    }

    fn schema(&self) -> Value {
        json!({ "type": "string", "pattern": "^/" })
    }
}

impl Leaf for OptionalPath {
    type Value = Option<PathBuf>;

    fn parse(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        let text = string(value)?;
        if text.is_empty() { Ok(None) } else { absolute(text).map(Some) }
    }

    fn show(&self, value: &Self::Value) -> Option<String> {
        Some(write_path(value.as_deref()))
    }

    fn accepts(&self) -> String {
        "absolute path, or empty".to_owned()
    }

    fn schema(&self) -> Value {
        json!({ "type": "string", "pattern": "^$|^/" })
    }
}

impl<T: Clone> Leaf for Parsed<T> {
    type Value = T;

    fn parse(&self, value: &DeValue<'_>) -> Result<T, String> {
        (self.read)(string(value)?)
    }

    fn show(&self, value: &T) -> Option<String> {
        Some(write_string(&(self.show)(value)))
    }

    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }

    fn schema(&self) -> Value {
        let mut schema = (self.schema)();
        schema["type"] = "string".into();
        schema
    }
}

/// A string as TOML.
pub(crate) fn write_string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A path; an empty string where there is none.
pub(crate) fn write_path(path: Option<&std::path::Path>) -> String {
    write_string(&path.map(|path| path.display().to_string()).unwrap_or_default())
}
