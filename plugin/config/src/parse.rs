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

/// The known key that a mistyped one most likely means.
fn nearest<'k>(name: &str, known: &BTreeSet<&'k str>) -> Option<&'k str> {
    known
        .iter()
        .map(|candidate| (strsim::levenshtein(name, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 2.max(candidate.len() / 3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// What is wrong with a file that this user may not read.
pub(super) const FORBIDDEN: &str = "permission denied: this user may not read the file; try again with sudo, or name with \
                                    --config a copy that this user may read";

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
    pub fn new(key: &str, line: Option<usize>, message: &str) -> Self {
        Problem { key: key.to_owned(), line, message: message.to_owned() }
    }

    /// By which they are listed: syntax errors, which have no key, before all others.
    pub fn place(&self) -> (bool, Option<usize>) {
        (!self.key.is_empty(), self.line)
    }
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
        for (i, problem) in self.problems.iter().enumerate() {
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
