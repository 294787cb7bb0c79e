//! What the policy notes for a trace: in a ring of bounded size, and only while somebody asks for it.

use std::collections::VecDeque;

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

/// The last events, as many as there is room for, the oldest first. It allocates once.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    events: VecDeque<Event>,
    room: usize,
    /// Events that made room.
    lost: u64,
}

impl Policy {
    /// Begins to note, in a ring with room for so many events. Returns what stands now as events of this moment.
    pub fn begin_notes(&mut self, now: u64, room: usize) -> Vec<Event> {
        self.pass_idle(now);
        self.notes = Some(Ring { events: VecDeque::with_capacity(room), room, lost: 0 });
        self.standing(now)
    }

    /// Notes nothing more. The events since the beginning, and how many of them the ring had no room for. Then the others
    /// begin with what a tenant of which nothing else is left has been doing since.
    pub fn end_notes(&mut self, now: u64) -> (u64, Vec<Event>) {
        self.pass_idle(now);
        let Some(Ring { events, lost, .. }) = self.notes.take() else { return (0, Vec::new()) };
        let mut events = Vec::from(events);
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
            if ring.events.len() == ring.room {
                ring.events.pop_front();
                ring.lost += 1;
            }
            ring.events.push_back(event);
        }
    }
}
