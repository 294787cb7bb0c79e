//! What the policy notes for a trace: in a ring of bounded size, and only while somebody asks for it.

use super::Policy;
use super::idle::Cause;
use super::settle::Mask;
use super::tenant::{Phase, Slot};
use super::types::{GateState, Share, TenantId};
use strum::IntoStaticStr;

/// Events that the ring of a trace holds: some 4 MiB, and 10 s of three GPUs with 400 hand-overs a second.
pub const RING: usize = 1 << 16;

/// Why a gate was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Why {
    /// The holder said that it was idle.
    Idle,
    /// Its quantum was over and another came first.
    Quantum,
    /// Another was owed time.
    Owed,
    /// Its cap was used up.
    Cap,
    /// It was alone, and another came.
    Newcomer,
    /// It was found to drain: when the trace began, or as an arbiter before this one left it.
    Found,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// The tenant's launch waits; while it drains, for what comes then.
    Waits,
    /// It got the lease, and its gate says this.
    Granted(GateState),
    /// Its gate was closed.
    Closed(Why),
    /// It has not drained in time: others may run beside it.
    Late,
    /// It has nothing in flight any more, or is gone.
    Ended,
    /// It wants nothing more: its processes are gone, or it has left.
    Gone,
    /// Its share has changed.
    Share(Share),
    /// The GPU was idle for so long up to now while somebody wanted it; of no tenant.
    Idle {
        /// Why.
        cause: Cause,
        /// For how long, nanoseconds.
        ns: u64,
    },
}

/// A note with its time and its subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, nanoseconds.
    pub at: u64,
    /// Whose; `None` for a GPU's own.
    pub tenant: Option<TenantId>,
    /// On which GPUs, a bit each.
    pub gpus: u128,
    /// What.
    pub note: Note,
}

/// The last events, as many as fit. Each has a number, from 0 on. It allocates once.
#[derive(Clone, Debug)]
pub struct Ring {
    events: Vec<Event>,
    room: usize,
    next: u64,
}

impl Ring {
    /// With room for so many events, at least one.
    #[must_use]
    pub fn new(room: usize) -> Self {
        let room = room.max(1);
        Ring { events: Vec::with_capacity(room), room, next: 0 }
    }

    /// Adds an event; the oldest makes room for it.
    pub fn push(&mut self, event: Event) {
        if self.events.len() < self.room {
            self.events.push(event);
        } else {
            let at = self.place(self.next);
            self.events[at] = event;
        }
        self.next += 1;
    }

    /// The number of the event that comes next.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The events from this number on, the oldest first, and how many of them were overwritten.
    #[must_use]
    pub fn since(&self, number: u64) -> (u64, Vec<Event>) {
        let oldest = self.next - self.events.len() as u64;
        let from = number.max(oldest).min(self.next);
        let events = (from..self.next).map(|number| self.events[self.place(number)]).collect();
        (from.saturating_sub(number), events)
    }

    fn place(&self, number: u64) -> usize {
        usize::try_from(number % self.room as u64).unwrap_or(0)
    }
}

impl Policy {
    /// Begins to note, in a ring with room for so many events, unless it does so already. Returns the number of the
    /// next event, and what stands now as events of this moment.
    pub fn begin_notes(&mut self, now: u64, room: usize) -> (u64, Vec<Event>) {
        self.pass_idle(now);
        let next = self.notes.get_or_insert_with(|| Box::new(Ring::new(room))).next();
        (next, self.standing(now))
    }

    /// The events from this number on, and how many of them were overwritten. Then the others begin with what a tenant
    /// of which nothing else is left has been doing since.
    #[must_use]
    pub fn notes_since(&mut self, now: u64, number: u64) -> (u64, Vec<Event>) {
        self.pass_idle(now);
        let Some(ring) = &self.notes else { return (0, Vec::new()) };
        let (lost, mut events) = ring.since(number);
        if let (1.., Some(first)) = (lost, events.first().map(|event| event.at)) {
            let mut standing = self.standing(first);
            standing.retain(|one| events.iter().all(|event| event.tenant != one.tenant));
            events.splice(0..0, standing);
        }
        (lost, events)
    }

    /// What tenants do now, as events of `at`.
    fn standing(&self, at: u64) -> Vec<Event> {
        let mut standing = Vec::new();
        for slot in 0..self.tenants.len() {
            let Some(tenant) = &self.tenants[slot] else { continue };
            let phase = match tenant.phase {
                Phase::Out => None,
                Phase::Held(lease) => Some(Note::Granted(lease.state)),
                Phase::Draining { .. } => Some(Note::Closed(Why::Found)),
                Phase::Late { .. } => Some(Note::Late),
            };
            let waits = tenant.wanting.then_some(Note::Waits);
            let (id, gpus) = (tenant.id, self.mask_of(slot));
            let event = |note| Event { at, tenant: Some(id), gpus, note };
            standing.extend(phase.into_iter().chain(waits).map(event));
        }
        standing
    }

    /// Notes nothing more.
    pub fn end_notes(&mut self) {
        self.notes = None;
    }

    pub(super) fn note(&mut self, at: u64, slot: Slot, note: Note) {
        if self.notes.is_none() {
            return;
        }
        let gpus = self.mask_of(slot);
        let tenant = self.tenants[slot].as_ref().map(|tenant| tenant.id);
        self.note_event(Event { at, tenant, gpus, note });
    }

    pub(super) fn note_gpu(&mut self, at: u64, gpu: usize, note: Note) {
        let gpus: Mask = 1 << gpu;
        self.note_event(Event { at, tenant: None, gpus, note });
    }

    fn note_event(&mut self, event: Event) {
        if let Some(ring) = &mut self.notes {
            ring.push(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(at: u64) -> Event {
        Event { at, tenant: Some(TenantId(1)), gpus: 1, note: Note::Waits }
    }

    proptest! {
        #[test]
        fn a_ring_keeps_the_last_events_in_their_order_and_says_how_many_it_lost(
            room in 0_usize..9,
            pushed in 0_u64..40,
            from in 0_u64..45,
        ) {
            let mut ring = Ring::new(room);
            let allocated = ring.events.capacity();
            (0..pushed).for_each(|at| ring.push(event(at)));
            prop_assert_eq!(ring.next(), pushed);
            prop_assert_eq!(ring.events.capacity(), allocated, "it allocates once");
            let (lost, kept) = ring.since(from);
            let first = from.max(pushed.saturating_sub(room.max(1) as u64)).min(pushed);
            let numbers: Vec<u64> = kept.iter().map(|event| event.at).collect();
            prop_assert_eq!(numbers, (first..pushed).collect::<Vec<_>>());
            prop_assert_eq!(lost, first.saturating_sub(from));
        }
    }
}
