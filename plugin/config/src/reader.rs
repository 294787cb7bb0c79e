//! Reads TOML key by key and keeps going after a mistake, so that all of them are told at once.

use std::collections::{BTreeMap, BTreeSet};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::layout::{Amount, WHOLE_PERCENT};
use super::problem::Problems;
use super::{MOST_PROBLEMS, Problem};
use tessera_model::quantity::{Quantity, QuantityError};

/// What was found so far.
pub(super) struct Report<'i> {
    text: &'i str,
    /// Line ends before each [`STRIDE`] bytes.
    ends: Vec<usize>,
    pub(super) problems: Problems,
    pub(super) lines: BTreeMap<String, usize>,
}

/// Bytes of the text that are looked through for one line's number.
const STRIDE: usize = 1024;

impl<'i> Report<'i> {
    pub(super) fn new(text: &'i str) -> Self {
        let count = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte == b'\n').count();
        let ends = text.as_bytes().chunks(STRIDE).scan(0, |sum, chunk| {
            let before = *sum;
            *sum += count(chunk);
            Some(before)
        });
        let ends = ends.collect();
        Report { text, ends, problems: Problems::default(), lines: BTreeMap::new() }
    }

    pub(super) fn line(&self, offset: usize) -> usize {
        let offset = offset.min(self.text.len());
        let begin = (offset / STRIDE).min(self.ends.len().saturating_sub(1));
        let rest = &self.text.as_bytes()[begin * STRIDE..offset];
        let ends = rest.iter().filter(|&&byte| byte == b'\n').count();
        self.ends.get(begin).unwrap_or(&0) + ends + 1
    }

    pub(super) fn problem(&mut self, key: &str, line: Option<usize>, message: impl Into<String>) {
        self.problems.push(Problem::new(key, line, &message.into()));
    }
}

/// One table, being read. Keys nobody asked for are problems when it is dropped through
/// [`Section::finish`].
pub(super) struct Section<'a, 'i> {
    path: String,
    table: Option<&'a DeTable<'i>>,
    known: BTreeSet<&'static str>,
}

impl<'a, 'i> Section<'a, 'i> {
    pub(super) fn root(table: &'a DeTable<'i>) -> Self {
        Section { path: String::new(), table: Some(table), known: BTreeSet::new() }
    }

    /// Its dotted name.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// A problem with one of its keys: at the key's line, or where the table begins.
    pub(super) fn problem(&self, report: &mut Report<'_>, key: &str, message: impl Into<String>) {
        let full = self.join(key);
        let line = report.lines.get(&full).or_else(|| report.lines.get(&self.path)).copied();
        report.problem(&full, line, message);
    }

    /// Whether the file says anything of a key.
    pub(super) fn names(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    fn join(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn get(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
    ) -> Option<&'a Spanned<DeValue<'i>>> {
        self.known.insert(key);
        let value = self.table?.get(key)?;
        let line = report.line(value.span().start);
        report.lines.insert(self.join(key), line);
        Some(value)
    }

    /// Converts the value of `key`, or notes why it can't be.
    fn convert<T>(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        convert: impl FnOnce(&'a DeValue<'i>) -> Result<T, String>,
    ) -> Option<T> {
        let value = self.get(report, key)?;
        match convert(value.get_ref()) {
            Ok(value) => Some(value),
            Err(message) => {
                let line = report.line(value.span().start);
                report.problem(&self.join(key), Some(line), message);
                None
            }
        }
    }

    /// A sub-table; an absent one reads as empty.
    pub(super) fn section(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
    ) -> Section<'a, 'i> {
        let table = self.convert(report, key, |value| match value {
            DeValue::Table(table) => Ok(table),
            other => Err(wrong_type("a table", other)),
        });
        Section { path: self.join(key), table, known: BTreeSet::new() }
    }

    /// The tables of an array of tables.
    pub(super) fn sections(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
    ) -> Option<Vec<Section<'a, 'i>>> {
        let path = self.join(key);
        let mut starts = Vec::new();
        let sections: Option<Vec<_>> = self.convert(report, key, |value| {
            let array = value.as_array().ok_or_else(|| wrong_type("an array of tables", value))?;
            array
                .iter()
                .enumerate()
                .map(|(i, entry)| match entry.get_ref() {
                    DeValue::Table(table) => {
                        starts.push((format!("{path}[{i}]"), entry.span().start));
                        Ok(Section {
                            path: format!("{path}[{i}]"),
                            table: Some(table),
                            known: BTreeSet::new(),
                        })
                    }
                    other => Err(wrong_type("an array of tables", other)),
                })
                .collect()
        });
        for (path, start) in starts {
            let line = report.line(start);
            report.lines.insert(path, line);
        }
        sections
    }

    pub(super) fn string(&mut self, report: &mut Report<'_>, key: &'static str) -> Option<String> {
        self.convert(report, key, |value| string(value).map(str::to_owned))
    }

    pub(super) fn bool(&mut self, report: &mut Report<'_>, key: &'static str) -> Option<bool> {
        self.convert(report, key, |value| {
            value.as_bool().ok_or_else(|| wrong_type("true or false", value))
        })
    }

    pub(super) fn strings(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
    ) -> Option<Vec<String>> {
        self.convert(report, key, |value| {
            let array = value.as_array().ok_or_else(|| wrong_type("an array of strings", value))?;
            array.iter().map(|entry| string(entry.get_ref()).map(str::to_owned)).collect()
        })
    }

    /// Every key of the table with its string.
    pub(super) fn string_map(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
    ) -> Option<BTreeMap<String, String>> {
        self.convert(report, key, |value| {
            let table = value.as_table().ok_or_else(|| wrong_type("a table of strings", value))?;
            table
                .iter()
                .map(|(name, entry)| {
                    let name = name.get_ref();
                    string(entry.get_ref())
                        .map(|text| (name.to_string(), text.to_owned()))
                        .map_err(|message| format!("{name}: {message}"))
                })
                .collect()
        })
    }

    /// One of the words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Option<T> {
        self.convert(report, key, |value| choose(string(value)?, words))
    }

    /// A list of the words.
    pub(super) fn choices<T: Copy>(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Option<Vec<T>> {
        self.convert(report, key, |value| {
            let array = value.as_array().ok_or_else(|| wrong_type("an array of strings", value))?;
            array.iter().map(|entry| choose(string(entry.get_ref())?, words)).collect()
        })
    }

    /// A whole number.
    pub(super) fn integer(&mut self, report: &mut Report<'_>, key: &'static str) -> Option<u64> {
        self.convert(report, key, |value| {
            let integer = value.as_integer().ok_or_else(|| wrong_type("a whole number", value))?;
            u64::from_str_radix(integer.as_str(), integer.radix())
                .map_err(|_| "must be a whole number, not negative".to_owned())
        })
    }

    /// A Kubernetes quantity, as a string or a plain number.
    pub(super) fn quantity(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
    ) -> Option<u64> {
        self.convert(report, key, |value| quantity(value, read))
    }

    /// `"auto"` (inner `None`) or a quantity.
    pub(super) fn quantity_or_auto(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
    ) -> Option<Option<u64>> {
        self.convert(report, key, |value| match value.as_str() {
            Some("auto") => Ok(None),
            _ => quantity(value, read).map(Some).map_err(|why| format!("{why}, or \"auto\"")),
        })
    }

    /// `"auto"`, a percentage, or a quantity.
    pub(super) fn amount(
        &mut self,
        report: &mut Report<'_>,
        key: &'static str,
        read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
    ) -> Option<Amount> {
        self.convert(report, key, |value| match value.as_str() {
            Some("auto") => Ok(Amount::Auto),
            Some(text) if text.ends_with('%') => percent(text.trim_end_matches('%')),
            _ => quantity(value, read)
                .map(Amount::Exact)
                .map_err(|why| format!("{why}, a percentage such as \"25%\", or \"auto\"")),
        })
    }

    /// Notes every key that nobody asked for.
    pub(super) fn finish(self, report: &mut Report<'_>) {
        let keys = self.table.into_iter().flatten().map(|(key, _)| key);
        let mut unknown: Vec<(usize, &str)> = keys
            .map(|key| (key.span().start, key.get_ref().as_ref()))
            .filter(|(_, name)| !self.known.contains(name))
            .collect();
        // Only those are looked at that can be told.
        if unknown.len() > MOST_PROBLEMS {
            unknown.select_nth_unstable(MOST_PROBLEMS);
            report.problems.and_more(unknown.len() - MOST_PROBLEMS);
            unknown.truncate(MOST_PROBLEMS);
        }
        unknown.sort_unstable();
        for (start, name) in unknown {
            let line = report.line(start);
            let message = match nearest(name, &self.known) {
                Some(known) => format!("unknown key; did you mean `{known}`?"),
                None => {
                    let known = self.known.iter().copied().collect::<Vec<_>>().join(", ");
                    format!("unknown key; known here: {known}")
                }
            };
            report.problem(&self.join(name), Some(line), message);
        }
    }
}

fn wrong_type(want: &str, found: &DeValue<'_>) -> String {
    format!("must be {want}, not {}", found.type_str())
}

fn string<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| wrong_type("a string", value))
}

fn choose<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        let words = words.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>();
        format!("\"{text}\" is none of {}", words.join(", "))
    })
}

fn quantity(
    value: &DeValue<'_>,
    read: impl FnOnce(Quantity) -> Result<u64, QuantityError>,
) -> Result<u64, String> {
    let text = match value {
        DeValue::String(text) => text.as_ref(),
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
        DeValue::Float(float) => float.as_str(),
        other => return Err(wrong_type("a quantity", other)),
    };
    Quantity::parse(text).and_then(read).map_err(|error| error.to_string())
}

/// The number before a percent sign.
fn percent(number: &str) -> Result<Amount, String> {
    let part = Quantity::parse(number.trim_end()).and_then(Quantity::millis);
    match part.map(u32::try_from) {
        Ok(Ok(part @ 1..=WHOLE_PERCENT)) => Ok(Amount::Percent(part)),
        _ => Err("a percentage must be more than 0% and at most 100%".to_owned()),
    }
}

/// The known key that a mistyped one most likely means.
fn nearest<'k>(name: &str, known: &BTreeSet<&'k str>) -> Option<&'k str> {
    // A name that is longer by so much means none of them.
    let longest = known.iter().map(|candidate| candidate.len() + 2.max(candidate.len() / 3)).max();
    known
        .iter()
        .filter(|_| longest.is_some_and(|longest| name.len() <= longest))
        .map(|candidate| (distance(name, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 2.max(candidate.len() / 3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substitute = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
