//! The findings while a file is read: where each key stands, and its faults.
//!
//! **Once and certain.** A fault is noted where it is, and its consequences are not: a check between keys
//! uses only keys that could be read. After a syntax error, nothing is reported that the error may have
//! caused; see [`parse`](super::parse).

use std::collections::{BTreeMap, BTreeSet};

use toml::de::DeTable;

use super::MOST_PROBLEMS;
use super::problem::Problems;
use super::steps;
use super::table::join;

/// What was found so far.
pub(super) struct Report<'i> {
    text: &'i str,
    /// Line ends before each [`STRIDE`] bytes.
    ends: Vec<usize>,
    pub(super) problems: Problems,
    pub(super) lines: BTreeMap<String, usize>,
    /// Keys with a problem in them, of those that are declared.
    bad: BTreeSet<String>,
    /// Whether the text has syntax errors, so that what is missing may be there.
    pub(super) broken: bool,
    /// The line from which on keys may be misread.
    pub(super) doubtful: Option<usize>,
}

/// Bytes of the text that are looked through for one line's number.
const STRIDE: usize = 1024;

impl<'i> Report<'i> {
    pub(super) fn new(text: &'i str) -> Self {
        steps::count(text.len());
        let count = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte == b'\n').count();
        let ends = text.as_bytes().chunks(STRIDE).scan(0, |sum, chunk| {
            let before = *sum;
            *sum += count(chunk);
            Some(before)
        });
        Report {
            text,
            ends: ends.collect(),
            problems: Problems::default(),
            lines: BTreeMap::new(),
            bad: BTreeSet::new(),
            broken: false,
            doubtful: None,
        }
    }

    pub(super) fn line(&self, offset: usize) -> usize {
        let offset = offset.min(self.text.len());
        let begin = (offset / STRIDE).min(self.ends.len().saturating_sub(1));
        let rest = &self.text.as_bytes()[begin * STRIDE..offset];
        steps::count(rest.len());
        let ends = rest.iter().filter(|&&byte| byte == b'\n').count();
        self.ends.get(begin).unwrap_or(&0) + ends + 1
    }

    /// Notes a problem with a value that begins at `offset`.
    pub(super) fn fault(&mut self, key: &str, offset: usize, message: &str) {
        self.problem(key, Some(self.line(offset)), message);
    }

    /// Notes that a table has not the key that it needs.
    pub(super) fn missing(&mut self, key: &str, message: &str) {
        if !self.broken {
            self.problem(key, line_of(&self.lines, key), message);
        }
    }

    fn problem(&mut self, key: &str, line: Option<usize>, message: &str) {
        if self.doubtful.is_none_or(|from| line.is_some_and(|line| line < from)) {
            self.problems.push(key, line, message);
        }
    }

    /// Reads a declared key, whose value begins at `offset`, with `read`.
    pub(super) fn within(&mut self, key: &str, offset: usize, read: impl FnOnce(&mut Self)) {
        let line = self.line(offset);
        self.lines.insert(key.to_owned(), line);
        let before = self.problems.count();
        read(self);
        if self.problems.count() > before {
            self.bad.insert(key.to_owned());
        }
    }

    /// Notes every key of a table that is not declared.
    pub(super) fn unknown(&mut self, at: &str, table: &DeTable<'_>, known: &BTreeSet<&str>) {
        steps::count(table.len());
        let mut unknown: Vec<(usize, &str)> = table
            .iter()
            .map(|(key, _)| (key.span().start, key.get_ref().as_ref()))
            .filter(|(_, name)| !known.contains(name))
            .collect();
        // Only those are looked at that can be said.
        if unknown.len() > MOST_PROBLEMS {
            unknown.select_nth_unstable(MOST_PROBLEMS);
            self.problems.and_more(unknown.len() - MOST_PROBLEMS);
            unknown.truncate(MOST_PROBLEMS);
        }
        for (start, name) in unknown {
            let message = match nearest(name, known) {
                Some(known) => format!("unknown key; did you mean `{known}`?"),
                None => {
                    let known = known.iter().copied().collect::<Vec<_>>().join(", ");
                    format!("unknown key; known here: {known}")
                }
            };
            self.fault(&join(at, name), start, &message);
        }
    }
}

/// A table whose keys were read, to check what must hold between them.
pub struct Checks<'r, 'i> {
    pub(super) at: &'r str,
    pub(super) report: &'r mut Report<'i>,
}

impl Checks<'_, '_> {
    /// Whether these keys of the table are known to be what the file says, or their defaults.
    pub(super) fn are_sound(&self, keys: &[&str]) -> bool {
        keys.iter().map(|key| join(self.at, key)).all(|key| {
            !self.report.bad.contains(&key)
                && (!self.report.broken || self.report.lines.contains_key(&key))
        })
    }

    /// Notes a problem with one of the table's keys: at the key's line, or where its table begins.
    pub(super) fn problem(&mut self, key: &str, message: &str) {
        let key = join(self.at, key);
        let line = line_of(&self.report.lines, &key);
        self.report.problem(&key, line, message);
    }
}

/// Where a key was set; for one that was not, where the table that it belongs into begins.
pub(super) fn line_of(lines: &BTreeMap<String, usize>, key: &str) -> Option<usize> {
    let table = || key.rsplit_once('.').and_then(|(table, _)| lines.get(table));
    lines.get(key).or_else(table).copied()
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
    steps::count(a.len() * b.len());
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
