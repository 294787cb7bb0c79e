//! The audit trail in the ledger's file: appending to it, what is dropped, and reading it back.

use redb::{ReadTransaction, ReadableTable, ReadableTableMetadata, TableError, WriteTransaction};

use super::filter::{self, Filter};
use super::store::encode;
use super::{
    HISTORY, HISTORY_KEPT, INCIDENTS, INCIDENTS_KEPT, INCIDENTS_KEPT_EACH, META, META_SEQUENCE,
};
use tessera_model::audit::Event;

/// The audit trail as it was at one moment. Reading it does not delay writers.
pub struct Trail(pub(super) ReadTransaction);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Oldest first, in the order in which they were written.
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
    let (generation, kind) = (event.generation, event.what.name());
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
                && let Some(at_unix_ms) = filter::at_unix_ms(line)
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
