//! Problems of a configuration: as much of each as helps, and the first ones of many.

use std::fmt;
use std::path::PathBuf;

use tessera_model::printable;

/// Most problems of one configuration that an error lists; it gives the number of the others.
pub const MOST_PROBLEMS: usize = 50;
/// Most bytes of a key, and of a message, in an error.
const KEY: usize = 160;
const MESSAGE: usize = 1200;

/// One thing wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted key; empty for a syntax error.
    pub key: String,
    /// Line in the file, from 1; `None` where the default is at fault.
    pub line: Option<usize>,
    /// What is wrong and what to do.
    pub message: String,
    /// How many problems this one stands for that are not listed; 0 for one of its own.
    pub others: usize,
}

/// Everything that is wrong with a configuration. Commands that meet it exit 64 (`EX_USAGE`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    /// The file, if one was read.
    pub file: Option<PathBuf>,
    /// At least one.
    pub problems: Vec<Problem>,
}

impl Problem {
    /// A problem with `key`; of what is too long to be read, the beginning and the end.
    pub fn new(key: &str, line: Option<usize>, message: &str) -> Self {
        let key = printable::brief(key, KEY).into_owned();
        let message = printable::brief(message, MESSAGE).into_owned();
        Problem { key, line, message, others: 0 }
    }

    /// Stands for `count` more.
    fn more(count: usize) -> Self {
        let problems = if count == 1 { "problem" } else { "problems" };
        let message = format!("and {count} more {problems}");
        Problem { others: count, ..Problem::new("", None, &message) }
    }
}

/// Problems as they are found.
#[derive(Debug, Default)]
pub(super) struct Problems {
    all: Vec<Problem>,
    more: usize,
}

impl Problems {
    /// Notes one.
    pub(super) fn push(&mut self, key: &str, line: Option<usize>, message: &str) {
        self.all.push(Problem::new(key, line, message));
    }

    /// How many were noted.
    pub(super) fn count(&self) -> usize {
        self.all.len() + self.more
    }

    /// Counts what need not be looked at.
    pub(super) fn and_more(&mut self, count: usize) {
        self.more += count;
    }

    /// The first by line, and how many others there are; syntax errors, which have no key, before all others.
    pub(super) fn finish(self) -> Vec<Problem> {
        let Problems { mut all, mut more } = self;
        all.sort_by_key(|problem| (!problem.key.is_empty(), problem.line));
        more += all.len().saturating_sub(MOST_PROBLEMS);
        all.truncate(MOST_PROBLEMS);
        if more > 0 {
            all.push(Problem::more(more));
        }
        all
    }
}

/// Of too many problems the first by line, and how many others there are; all of few, as they are.
pub fn first(all: Vec<Problem>) -> Vec<Problem> {
    if all.len() <= MOST_PROBLEMS { all } else { Problems { all, more: 0 }.finish() }
}

/// Two lists, each of which may end with how many it leaves out, as one that does.
pub fn together(some: Vec<Problem>, more: Vec<Problem>) -> Vec<Problem> {
    if more.is_empty() {
        return some;
    }
    let (all, rest): (Vec<_>, Vec<_>) =
        some.into_iter().chain(more).partition(|problem| problem.others == 0);
    let more = rest.iter().map(|problem| problem.others).sum();
    Problems { all, more }.finish()
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
mod tests {
    use super::*;

    #[test]
    fn lists_that_leave_some_out_are_joined_and_the_number_of_others_is_last() {
        let list = |count: usize, from: usize| {
            let one = |n: usize| Problem::new("key", Some(from + n), "is wrong");
            first((0..count).map(one).collect())
        };
        for (some, more) in [(60, 3), (60, 70), (2, 70), (40, 20)] {
            let joined = together(list(some, 1), list(more, 1000));
            assert_eq!(joined.len(), MOST_PROBLEMS + 1, "{some} and {more}");
            let (last, listed) = joined.split_last().unwrap();
            assert_eq!(last.others, some + more - MOST_PROBLEMS, "{some} and {more}");
            assert!(listed.is_sorted_by_key(|problem| problem.line), "{some} and {more}");
        }
        assert_eq!(together(list(3, 1), Vec::new()), list(3, 1));
        assert_eq!(together(list(3, 1), list(2, 9)).len(), 5);
    }

    #[test]
    fn of_many_the_first_by_line_are_kept_and_the_others_counted() {
        let at = |line: usize| Problem::new("key", Some(line), "is wrong");
        for all in [(1..=1000).collect::<Vec<_>>(), (1..=1000).rev().collect()] {
            let shown = first(all.into_iter().map(at).collect());
            assert_eq!(shown.len(), MOST_PROBLEMS + 1);
            assert!((1..=MOST_PROBLEMS).eq(shown.iter().filter_map(|problem| problem.line)));
            let error = ConfigError { file: None, problems: shown }.to_string();
            assert!(error.ends_with(": and 950 more problems"), "{error}");
        }
        assert_eq!(first((1..=50).map(at).collect()).len(), 50);
        assert_eq!(first((1..=51).map(at).collect())[50].message, "and 1 more problem");
    }

    #[test]
    fn names_and_messages_are_bounded_and_keep_their_ends() {
        let long = "x".repeat(1 << 20);
        let problem = Problem::new(&long, None, &format!("\"{long}\" is not good; do better"));
        assert!(problem.key.len() <= KEY && problem.message.len() <= MESSAGE);
        assert!(problem.message.starts_with("\"xx"), "{}", problem.message);
        assert!(problem.message.ends_with("\" is not good; do better"), "{}", problem.message);
    }
}
