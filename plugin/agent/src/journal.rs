//! The durable side: the ledger's one writer and the audit trail.
//!
//! Containers can cause some lines as often as they like. These are drawn together: of each kind and
//! allocation the first is written at once, what follows at most once in [`QUIET`], counted. So a
//! hostile container costs a line a minute and kind, which drops nothing but lines of its own; see
//! [`tessera_store::INCIDENTS_KEPT_EACH`].

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::lock_order::{LEAF, WRITER};
use tessera_model::audit::Event;
use tessera_store::{Change, CommitError, Commits, Ledger, Listener, Trail};
use tessera_system::locks::{Ranked, RankedGuard};

#[derive(Debug)]
pub struct Journal {
    writer: Ranked<Writer>,
    pending: Ranked<Pending>,
    pub commits: Arc<Commits>,
}

#[derive(Debug)]
pub(crate) struct Writer {
    pub ledger: Ledger,
    pub generation: u64,
}

impl Writer {
    /// Writes lines of the audit trail now. A disk that refuses is reported in the log and delays nothing else.
    pub(crate) fn note(&mut self, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        if let Err(error) = self.ledger.commit(&Change { events, ..Change::default() }) {
            warn!(%error, "the event is not recorded");
        }
    }
}

/// How long lines of one kind and allocation are drawn together.
const QUIET: Duration = Duration::from_secs(60);

/// Whose lines are drawn together: allocation or GPU, generation, and kind.
type Key = (String, u64, &'static str);

#[derive(Debug, Default)]
struct Pending(BTreeMap<Key, (Instant, Option<Event>)>);

impl Pending {
    fn take(&mut self, event: Event, now: Instant) -> Option<Event> {
        if !event.what.is_tenants() {
            return Some(event);
        }
        let id = event.id.as_ref().map(ToString::to_string);
        let about = id.or_else(|| event.gpu.clone()).unwrap_or_default();
        let key = (about, event.generation, event.what.into_str());
        match self.0.get_mut(&key) {
            Some((written, waiting)) => {
                let event = match waiting.take() {
                    Some(before) => event.after(&before),
                    None => event,
                };
                if now.saturating_duration_since(*written) < QUIET {
                    *waiting = Some(event);
                    return None;
                }
                *written = now;
                Some(event)
            }
            None => {
                self.0.insert(key, (now, None));
                Some(event)
            }
        }
    }

    /// What has waited long enough; with `all`, whatever waits. What is quiet is forgotten.
    fn due(&mut self, all: bool, now: Instant) -> Vec<Event> {
        let mut due = Vec::new();
        self.0.retain(|_, (written, waiting)| {
            let quiet = now.saturating_duration_since(*written) >= QUIET;
            if (quiet || all)
                && let Some(event) = waiting.take()
            {
                due.push(event);
                *written = now;
                return true;
            }
            !quiet
        });
        due
    }
}

impl Journal {
    pub(crate) fn new(ledger: Ledger, generation: u64) -> Self {
        let commits = ledger.commits();
        Journal {
            writer: Ranked::new(WRITER, Writer { ledger, generation }),
            pending: Ranked::new(LEAF, Pending::default()),
            commits,
        }
    }

    /// The writer. Its holder may wait for the disk: only on blocking threads.
    pub(crate) fn writer(&self) -> RankedGuard<'_, Writer> {
        self.writer.lock()
    }

    /// From now on `listener` is given each line of the audit trail that is written. Blocking.
    pub fn set_listener(&self, listener: Listener) {
        self.writer().ledger.set_listener(listener);
    }

    /// Writes lines to the audit trail: at once, or where a container can cause it and there was one
    /// of its kind a moment ago, drawn together with others later. Blocking: it waits for the disk.
    pub fn audit(&self, events: impl IntoIterator<Item = Event>) {
        let now = Instant::now();
        let mut pending = self.pending.lock();
        let due: Vec<_> = events.into_iter().filter_map(|event| pending.take(event, now)).collect();
        drop(pending);
        self.write(due);
    }

    pub fn waiting_events(&self) -> Vec<Event> {
        self.pending.lock().0.values().filter_map(|(_, waiting)| waiting.clone()).collect()
    }

    /// Writes what [`Journal::audit`] keeps back and is due; with `all`, because the plugin ends, whatever it keeps.
    /// Blocking.
    pub fn flush_audit(&self, all: bool) {
        let due = self.pending.lock().due(all, Instant::now());
        self.write(due);
    }

    fn write(&self, events: Vec<Event>) {
        // Not to wait for the disk with nothing to say.
        if !events.is_empty() {
            self.writer().note(events);
        }
    }

    /// Writes what is kept back, and lets go of the file for the next plugin. Blocking.
    pub(crate) fn close(&self) {
        self.flush_audit(true);
        self.writer().ledger.close();
    }

    /// The audit trail as it is now. Allocate and other writers need not wait until it is read.
    pub fn trail(&self) -> Result<Trail, CommitError> {
        self.writer().ledger.trail()
    }

    /// Reads of the audit trail as it is now, as often as `read` likes; Allocate and other writers need not wait
    /// until it is done. Lines that wait to be drawn together are not in it yet. Blocking.
    pub fn read_trail<T, E: Display>(
        &self,
        read: impl FnOnce(&Trail) -> Result<T, E>,
    ) -> Result<T, CommitError> {
        let trail = self.trail()?;
        read(&trail).map_err(|error| self.writer().ledger.failed(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::audit::What;

    fn refused(id: &str) -> Event {
        let what = What::RefusedMemory { bytes: 5, charged_bytes: 0, limit_bytes: 9 };
        Event { id: AllocationId::parse(&id.repeat(32)), ..Event::of_node(what, 0) }
    }

    #[test]
    fn what_a_container_causes_is_drawn_together_and_nothing_is_lost() {
        let mut pending = Pending::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut written = 0;
        for second in 0..600 {
            for _ in 0..10 {
                written += pending.take(refused("a"), at(second)).map_or(0, |event| event.times);
            }
            assert!(pending.due(false, at(second)).is_empty(), "the newest line took it along");
        }
        let lines = pending.due(true, at(600));
        assert_eq!(written + lines.iter().map(|event| event.times).sum::<u64>(), 6000);
    }

    #[test]
    fn a_container_keeps_no_other_from_being_written() {
        let mut pending = Pending::default();
        let now = Instant::now();
        assert!(pending.take(refused("a"), now).is_some());
        assert!(pending.take(refused("a"), now).is_none());
        assert!(pending.take(refused("b"), now).is_some());
        let tampered = What::Tampered { what: "usage page".into() };
        let tampered = Event { what: tampered, ..refused("a") };
        assert!(pending.take(tampered, now).is_some());
        for _ in 0..3 {
            assert!(pending.take(Event::of_node(What::Cordoned, 0), now).is_some());
        }
    }

    #[test]
    fn what_waits_is_written_when_it_is_due() {
        let mut pending = Pending::default();
        let now = Instant::now();
        let _ = pending.take(refused("a"), now);
        let _ = pending.take(refused("a"), now + Duration::from_secs(1));
        let _ = pending.take(refused("a"), now + Duration::from_secs(2));
        assert!(pending.due(false, now + Duration::from_secs(59)).is_empty());
        let due = pending.due(false, now + QUIET);
        assert_eq!(due.iter().map(|event| event.times).collect::<Vec<_>>(), [2]);
        assert!(pending.due(true, now + QUIET).is_empty());
        assert!(pending.due(false, now + 2 * QUIET).is_empty() && pending.0.is_empty());
    }
}
