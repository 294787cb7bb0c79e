//! Events that more than one process may record and wait for.
//!
//! The last record is one word, a channel and an operation of it, so a kill tears nothing. Numbers
//! of operations go on when a channel gets another owner, so a record whose process is gone reads as
//! complete, as the work of a process that is gone is.

use crate::layout::{Event, MAX_EVENTS, Shared};
use crate::session::Session;
use std::sync::atomic::Ordering;

/// Names an event, for other processes too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId {
    pub index: u32,
    /// Which life of it.
    pub generation: u64,
}

/// Bits of a record's word that hold the operation's number; one more than the channel is above.
const SEQ_BITS: u32 = 48;

fn used(shared: &Shared) -> &[Event] {
    &shared.events[..(shared.events_used.load(Ordering::Acquire) as usize).min(MAX_EVENTS)]
}

fn owner(slot: usize) -> Option<u32> {
    u32::try_from(slot + 1).ok()
}

/// A slot's process is gone, or a new one begins: its events are nobody's. Under the lock.
pub(crate) fn forget_owner(shared: &Shared, slot: usize) {
    for event in used(shared) {
        if Some(event.owner.load(Ordering::Relaxed)) == owner(slot) {
            event.owner.store(0, Ordering::Release);
        }
    }
}

impl Session {
    /// A new event, never recorded; no slot or no event is free: `None`.
    pub fn create_event(&self, gpu: usize) -> Option<EventId> {
        let owner = owner(self.slot()?)?;
        let shared = self.shared();
        let _locked = self.lock();
        let free = |e: &Event| e.owner.load(Ordering::Relaxed) == 0;
        let at = shared.events.iter().position(free)?;
        let (event, index) = (&shared.events[at], u32::try_from(at).ok()?);
        let generation = event.generation.fetch_add(1, Ordering::Relaxed) + 1;
        event.gpu.store(u32::try_from(gpu).ok()?, Ordering::Relaxed);
        event.last.store(0, Ordering::Relaxed);
        shared.events_used.fetch_max(index + 1, Ordering::AcqRel);
        // Release: publishes the fields.
        event.owner.store(owner, Ordering::Release);
        Some(EventId { index, generation })
    }

    pub fn destroy_event(&self, id: EventId) {
        let _locked = self.lock();
        if let Some(event) = self.event(id) {
            event.owner.store(0, Ordering::Release);
        }
    }

    /// The unit of the context that the event was made in; it is gone: `None`.
    pub fn event_gpu(&self, id: EventId) -> Option<usize> {
        self.event(id).map(|event| event.gpu.load(Ordering::Relaxed) as usize)
    }

    /// Operation `seq` of `channel` records the event.
    pub fn record_event(&self, id: EventId, channel: u32, seq: u64) {
        if let Some(event) = self.event(id) {
            // Release: the operation was submitted before.
            event.last.store((u64::from(channel) + 1) << SEQ_BITS | seq, Ordering::Release);
        }
    }

    /// The channel and operation of its last record; never recorded, or gone: `None`.
    pub fn recorded_event(&self, id: EventId) -> Option<(u32, u64)> {
        let word = self.event(id)?.last.load(Ordering::Acquire);
        let channel = u32::try_from(word >> SEQ_BITS).ok()?.checked_sub(1)?;
        Some((channel, word & ((1 << SEQ_BITS) - 1)))
    }

    fn event(&self, id: EventId) -> Option<&'static Event> {
        let event = self.shared().events.get(id.index as usize)?;
        let alive = event.owner.load(Ordering::Acquire) != 0;
        (alive && event.generation.load(Ordering::Relaxed) == id.generation).then_some(event)
    }
}
