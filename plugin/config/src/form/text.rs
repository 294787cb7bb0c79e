//! Strings: words of which there are a few, paths, and what has a grammar of its own.

use std::path::PathBuf;

use serde_json::{Value, json};
use toml::de::DeValue;

use super::{Leaf, string};

/// A value for which the file has a few words.
pub trait Words: Copy + PartialEq + 'static {
    /// Each with its word.
    const WORDS: &'static [(&'static str, Self)];
}

/// The words in quotation marks.
pub(crate) fn quoted<T: Words>() -> String {
    let words = T::WORDS.iter().map(|(word, _)| format!("\"{word}\""));
    words.collect::<Vec<_>>().join(", ")
}

/// One of the words.
pub(crate) fn word<T: Words>() -> Leaf<T> {
    let parse = |value: &DeValue<'_>| {
        let text = string(value)?;
        let found = T::WORDS.iter().find(|(word, _)| *word == text);
        let found = found.map(|(_, value)| *value);
        found.ok_or_else(|| format!("\"{text}\" is none of {}", quoted::<T>()))
    };
    let schema = || {
        let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).collect();
        json!({ "enum": words })
    };
    let show = |value: &T| {
        let found = T::WORDS.iter().find(|(_, known)| known == value);
        found.map(|(word, _)| write_string(word)).unwrap_or_default()
    };
    Leaf::new(quoted::<T>().replace('"', "`"), schema, parse, show)
}

/// What may be left out, and is `None` then.
pub(crate) fn given<T: 'static>(leaf: Leaf<T>) -> Leaf<Option<T>> {
    let Leaf { accepts, schema, parse, show } = leaf;
    Leaf {
        accepts,
        schema,
        parse: Box::new(move |value| parse(value).map(Some)),
        show: Box::new(move |value| show(value.as_ref()?)),
    }
}

/// A string: what `read` makes of it, what makes a string of that again, what it may be in words and as schema.
pub(crate) fn parsed<T: 'static>(
    read: fn(&str) -> Result<T, String>,
    show: fn(&T) -> String,
    accepts: &str,
    schema: fn() -> Value,
) -> Leaf<T> {
    let schema = move || {
        let mut schema = schema();
        schema["type"] = "string".into();
        schema
    };
    let parse = move |value: &DeValue<'_>| read(string(value)?);
    Leaf::new(accepts, schema, parse, move |value| write_string(&show(value)))
}

/// A path that does not depend on where the plugin was started.
pub(crate) fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let message = || format!("\"{text}\" must be an absolute path");
    path.is_absolute().then_some(path).ok_or_else(message)
}

/// An absolute path.
pub(crate) fn path() -> Leaf<PathBuf> {
    let show = |path: &PathBuf| path.display().to_string();
    parsed(absolute, show, "absolute path", || json!({ "pattern": "^/" }))
}

/// An absolute path; an empty string is `None`.
pub(crate) fn optional_path() -> Leaf<Option<PathBuf>> {
    parsed(
        |text| if text.is_empty() { Ok(None) } else { absolute(text).map(Some) },
        |path| path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        "absolute path, or empty",
        || json!({ "pattern": "^$|^/" }),
    )
}

/// A string as TOML.
pub(crate) fn write_string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
