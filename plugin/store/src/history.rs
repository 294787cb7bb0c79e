//! The audit trail in the ledger's file: appending to it, what is dropped, and reading it back.

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
    /// When the oldest line was written, Unix milliseconds.
    pub since_unix_ms: Option<i64>,
    /// Lines that are kept, readable or not.
    pub kept: usize,
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
    /// All lines, in the order in which they were written. One that another version wrote and this one cannot read is
    /// left out. Blocking.
    pub fn read(&self) -> Result<Lines, redb::Error> {
        let mut kept = 0;
        let mut found: Vec<(u64, Event)> = Vec::new();
        walk(&self.0, |sequence, line| {
            kept += 1;
            found.extend(serde_json::from_slice(line).ok().map(|event| (sequence, event)));
        })?;
        found.sort_by_key(|(sequence, _)| *sequence);
        let events: Vec<Event> = found.into_iter().map(|(_, event)| event).collect();
        Ok(Lines { since_unix_ms: events.first().map(|event| event.at_unix_ms), events, kept })
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
