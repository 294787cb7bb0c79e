//! Which lines of the audit trail a reader needs, judged by their bytes: a search takes a tenth of what decoding does.
//!
//! A filter may take a line too many, and never takes one too few. Lines are written by serde_json without spaces,
//! beginning with the time and the allocation; a string without escapes stands in its line as it is. A line that
//! begins otherwise, or has an escape anywhere, is taken whatever it says.

use std::ops::RangeInclusive;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder};

#[derive(Clone, Debug)]
pub struct Filter {
    /// `None`: whatever a line says.
    words: Option<AhoCorasick>,
    without_allocation: bool,
    /// Unix milliseconds.
    written: RangeInclusive<i64>,
}

impl Filter {
    pub fn all() -> Self {
        Filter { words: None, without_allocation: false, written: i64::MIN..=i64::MAX }
    }

    /// Lines with any of these in a string of theirs; a word may begin and end with the string's quotation marks.
    pub fn mentioning<W: AsRef<[u8]>>(words: impl IntoIterator<Item = W>) -> Self {
        Filter { words: AhoCorasick::new(words).ok(), ..Filter::all() }
    }

    /// As [`Filter::mentioning`], with ASCII letters of either case.
    pub fn like<W: AsRef<[u8]>>(words: impl IntoIterator<Item = W>) -> Self {
        let search = AhoCorasickBuilder::new().ascii_case_insensitive(true).build(words);
        Filter { words: search.ok(), ..Filter::all() }
    }

    /// Also those that are of no allocation, but of a GPU or the node.
    pub fn or_without_allocation(self) -> Self {
        Filter { without_allocation: true, ..self }
    }

    /// Of these alone those that say that they are of this time, Unix milliseconds.
    pub fn written(self, written: RangeInclusive<i64>) -> Self {
        Filter { written, ..self }
    }

    pub(super) fn takes(&self, line: &[u8]) -> bool {
        let Some(words) = &self.words else { return self.is_of_its_time(line) };
        self.is_of_its_time(line)
            && (words.is_match(line)
                || line.contains(&b'\\')
                || self.without_allocation && head(line).is_none_or(|head| !head.has_allocation))
    }

    fn is_of_its_time(&self, line: &[u8]) -> bool {
        head(line).is_none_or(|head| self.written.contains(&head.at_unix_ms))
    }
}

struct Head {
    at_unix_ms: i64,
    has_allocation: bool,
}

fn head(line: &[u8]) -> Option<Head> {
    let rest = line.strip_prefix(br#"{"at_unix_ms":"#)?;
    let end = rest.iter().position(|&byte| byte == b',')?;
    let (number, rest) = rest.split_at(end);
    let at_unix_ms = std::str::from_utf8(number).ok()?.parse().ok()?;
    Some(Head { at_unix_ms, has_allocation: rest.starts_with(br#","id":""#) })
}

/// When a line was written, where it says so as every version does.
pub(super) fn at_unix_ms(line: &[u8]) -> Option<i64> {
    head(line).map(|head| head.at_unix_ms)
}
