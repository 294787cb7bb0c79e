//! The audit trail in the ledger's file: appending to it, what is dropped, and reading it back.
//!
//! Which lines of the audit trail a reader needs, judged by their bytes: a search takes a tenth of what decoding does.
//!
//! A filter may take a line too many, and never takes one too few. Lines are written by serde_json without spaces,
//! beginning with the time and the allocation; a string without escapes stands in its line as it is. A line that
//! begins otherwise, or has an escape anywhere, is taken whatever it says.

use std::ops::RangeInclusive;

use aho_corasick::AhoCorasick;
use redb::{ReadTransaction, ReadableTable, ReadableTableMetadata, TableError, WriteTransaction};
use tessera_model::audit::Event;

use super::store::encode;
use super::{
    HISTORY, HISTORY_KEPT, INCIDENTS, INCIDENTS_KEPT, INCIDENTS_KEPT_EACH, META, META_SEQUENCE,
};

/// The audit trail as it was at one moment. Reading it does not delay writers.
pub struct Trail(pub(super) ReadTransaction);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    pub events: Vec<Event>,
    /// When the oldest line that is kept was written, Unix milliseconds; taken or not.
    pub since_unix_ms: Option<i64>,
    /// Lines that are kept, taken or not.
    pub kept: usize,
    /// Lines that had to be decoded: the work that this took.
    pub decoded: usize,
}

/// Writes lines behind those that there are, and drops the oldest beyond what is kept.
pub(super) fn append(write: &WriteTransaction, events: &[Event]) -> Result<(), redb::Error> {
    if events.is_empty() {
        return Ok(());
    }
    let mut meta = write.open_table(META)?;
    let mut history = write.open_table(HISTORY)?;
    // The former is not known to older versions, which go on by the latter.
    let counted = meta.get(META_SEQUENCE)?.map_or(0, |n| n.value());
    let found = history.last()?.map_or(0, |(key, _)| key.value().saturating_add(1));
    let mut next = counted.max(found);
    for event in events {
        let line = encode(&event.clone().bounded())?;
        if event.what.is_tenants() {
            append_incident(write, event, next, &line)?;
        } else {
            history.insert(next, line.as_slice())?;
        }
        next += 1;
    }
    meta.insert(META_SEQUENCE, next)?;
    while history.len()? > HISTORY_KEPT {
        history.pop_first()?;
    }
    Ok(())
}

fn append_incident(
    write: &WriteTransaction,
    event: &Event,
    sequence: u64,
    line: &[u8],
) -> Result<(), redb::Error> {
    let mut incidents = write.open_table(INCIDENTS)?;
    let (generation, kind) = (event.generation, event.what.into_str());
    incidents.insert((generation, kind, sequence), line)?;
    let of_its_kind = (generation, kind, 0)..=(generation, kind, u64::MAX);
    let mut kept: Vec<u64> = Vec::new();
    for entry in incidents.range(of_its_kind)? {
        kept.push(entry?.0.value().2);
    }
    let each = usize::try_from(INCIDENTS_KEPT_EACH).unwrap_or(usize::MAX);
    for oldest in kept.iter().take(kept.len().saturating_sub(each)) {
        incidents.remove((generation, kind, *oldest))?;
    }
    if incidents.len()? > INCIDENTS_KEPT {
        // An eighth at once: finding the oldest takes a look at all.
        let mut all: Vec<u64> = Vec::new();
        for entry in incidents.iter()? {
            all.push(entry?.0.value().2);
        }
        all.sort_unstable();
        let from = all[all.len() / 8];
        incidents.retain(|(_, _, sequence), _| sequence >= from)?;
    }
    Ok(())
}

impl Trail {
    /// The lines that `filter` takes, and perhaps others. Decodes no others. A line that another version wrote and this
    /// one cannot read is left out. Blocking.
    pub fn read(&self, filter: &Filter) -> Result<Lines, redb::Error> {
        let mut lines = Lines::default();
        let mut taken: Vec<(u64, Event)> = Vec::new();
        let mut oldest: Option<u64> = None;
        walk(&self.0, |sequence, line| {
            lines.kept += 1;
            if oldest.is_none_or(|oldest| sequence < oldest)
                && let Some(at_unix_ms) = at_unix_ms(line)
            {
                (oldest, lines.since_unix_ms) = (Some(sequence), Some(at_unix_ms));
            }
            if filter.takes(line) {
                lines.decoded += 1;
                taken.extend(serde_json::from_slice(line).ok().map(|event| (sequence, event)));
            }
        })?;
        taken.sort_by_key(|(sequence, _)| *sequence);
        lines.events = taken.into_iter().map(|(_, event)| event).collect();
        Ok(lines)
    }

    /// Reads every line and makes nothing of it: what is damaged shows.
    pub(super) fn touch(&self) -> Result<(), redb::Error> {
        walk(&self.0, |_, _| {})
    }
}

fn walk(read: &ReadTransaction, mut visit: impl FnMut(u64, &[u8])) -> Result<(), redb::Error> {
    for entry in read.open_table(HISTORY)?.iter()? {
        let (sequence, line) = entry?;
        visit(sequence.value(), line.value());
    }
    let incidents = match read.open_table(INCIDENTS) {
        // Of an older version.
        Err(TableError::TableDoesNotExist(_)) => return Ok(()),
        table => table?,
    };
    for entry in incidents.iter()? {
        let (key, line) = entry?;
        visit(key.value().2, line.value());
    }
    Ok(())
}

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
