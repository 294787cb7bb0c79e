//! Turns text into a [`Config`], and finds all faults of the text.
//!
//! **Once and certain.** A fault is noted where it is, and its consequences are not. Of a text that is not TOML the first
//! error alone is said, because it may change the meaning of what follows; what must hold between keys is asked only where
//! all values are right.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use tessera_model::printable;
use toml::de::DeTable;

use super::table::{join, read};
use super::{Config, Source, between};

/// What the text says over the defaults, and all that is wrong with it. Where something is, the
/// configuration is what could be read, good for nothing but to find files by.
pub(super) fn parse(text: &str, file: Option<&Path>) -> (Config, Vec<Problem>) {
    let mut report = Report::new(text, file);
    let mut config = Config::default();
    let (root, errors) = DeTable::parse_recoverable(text);
    read("", root.get_ref(), &mut config, &mut report);
    if let Some(error) = errors.first() {
        report.problems.clear();
        let start = error.span().map_or(0, |span| span.start);
        report.fault("", start, error.message());
    }
    let Report { mut problems, source, .. } = report;
    let config = Config { source, ..config };
    if problems.is_empty() {
        problems = between::check(&config);
    }
    problems.sort_by_key(Problem::place);
    (config, problems)
}

/// What was found so far: where each key stands, and the faults.
pub(super) struct Report {
    ends: Vec<usize>,
    problems: Vec<Problem>,
    source: Source,
}

impl Report {
    fn new(text: &str, file: Option<&Path>) -> Self {
        Report {
            ends: text.match_indices('\n').map(|(end, _)| end).collect(),
            problems: Vec::new(),
            source: Source { file: file.map(Path::to_owned), ..Source::default() },
        }
    }

    fn line(&self, offset: usize) -> usize {
        self.ends.partition_point(|end| *end < offset) + 1
    }

    /// Notes a problem with a value that begins at `offset`.
    pub(super) fn fault(&mut self, key: &str, offset: usize, message: &str) {
        self.problems.push(Problem::new(key, Some(self.line(offset)), message));
    }

    pub(super) fn missing(&mut self, key: &str, message: &str) {
        self.problems.push(self.source.problem(key, message.to_owned()));
    }

    /// Notes where a declared key is set: its value begins at `offset`.
    pub(super) fn stands(&mut self, key: &str, offset: usize) {
        self.source.lines.insert(key.to_owned(), self.line(offset));
    }

    pub(super) fn unknown(&mut self, at: &str, table: &DeTable<'_>, known: &BTreeSet<&str>) {
        let mut unknown: Vec<(usize, &str)> = table
            .iter()
            .map(|(key, _)| (key.span().start, key.get_ref().as_ref()))
            .filter(|(_, name)| !known.contains(name))
            .collect();
        unknown.sort_unstable();
        for (i, (start, name)) in unknown.into_iter().enumerate() {
            // What is meant by one takes a look at all that are known; more are not shown.
            let meant = if i < MOST_PROBLEMS { nearest(name, known) } else { None };
            let message = match meant {
                Some(known) => format!("unknown key; did you mean `{known}`?"),
                None if i >= MOST_PROBLEMS => "unknown key".to_owned(),
                None => {
                    let known = known.iter().copied().collect::<Vec<_>>().join(", ");
                    format!("unknown key; known here: {known}")
                }
            };
            self.fault(&join(at, name), start, &message);
        }
    }
}

/// The known key that a mistyped one most likely means.
fn nearest<'k>(name: &str, known: &BTreeSet<&'k str>) -> Option<&'k str> {
    known
        .iter()
        .map(|candidate| (strsim::levenshtein(name, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 2.max(candidate.len() / 3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Most problems of one configuration that an error lists; it gives the number of the others.
pub const MOST_PROBLEMS: usize = 50;
/// What is wrong with a file that this user may not read.
pub(super) const FORBIDDEN: &str = "permission denied: this user may not read the file; try again with sudo, or name with \
                                    --config a copy that this user may read";
/// Most bytes of a key, and of a message, in an error.
const KEY: usize = 160;
const MESSAGE: usize = 1200;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted key; empty for a syntax error.
    pub key: String,
    /// Line in the file, from 1; `None` where the default is at fault.
    pub line: Option<usize>,
    pub message: String,
}

/// Everything that is wrong with a configuration. Commands that meet it exit 64 (`EX_USAGE`), but see
/// [`ConfigError::is_forbidden`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    pub file: Option<PathBuf>,
    pub problems: Vec<Problem>,
}

impl Problem {
    /// A problem with `key`; of what is too long to be read, the beginning and the end.
    pub fn new(key: &str, line: Option<usize>, message: &str) -> Self {
        let key = printable::brief(key, KEY).into_owned();
        let message = printable::brief(message, MESSAGE).into_owned();
        Problem { key, line, message }
    }

    /// By which they are listed: syntax errors, which have no key, before all others.
    pub fn place(&self) -> (bool, Option<usize>) {
        (!self.key.is_empty(), self.line)
    }
}

/// What a person is shown of problems: the first by line, and how many others there are.
pub fn shown(problems: &[Problem]) -> Vec<Problem> {
    let mut first: Vec<&Problem> = problems.iter().collect();
    first.sort_by_key(|problem| problem.place());
    let mut shown: Vec<Problem> = first.into_iter().take(MOST_PROBLEMS).cloned().collect();
    if let Some(more @ 1..) = problems.len().checked_sub(MOST_PROBLEMS) {
        let problems = if more == 1 { "problem" } else { "problems" };
        shown.push(Problem::new("", None, &format!("and {more} more {problems}")));
    }
    shown
}

impl ConfigError {
    /// Whether the file is there and this user may not read it. Commands that meet it exit 77 (`EX_NOPERM`).
    pub fn is_forbidden(&self) -> bool {
        self.problems.iter().any(|problem| problem.message == FORBIDDEN)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self
            .file
            .as_deref()
            .map_or_else(|| "built-in configuration".to_owned(), |file| file.display().to_string());
        for (i, problem) in shown(&self.problems).iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{file}")?;
            if let Some(line) = problem.line {
                write!(f, ":{line}")?;
            }
            write!(f, ": ")?;
            if !problem.key.is_empty() {
                write!(f, "{}: ", printable::line(&problem.key))?;
            }
            write!(f, "{}", printable::line(&problem.message))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
