//! A trace of what the arbiter does: from the policy's notes to intervals that can be drawn.
//!
//! [`Tracing`] is the asker's hold on it: while there is one, the arbiter notes what happens. It ends with the asker,
//! however that goes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, sync_channel};

use nix::sys::eventfd::EventFd;

use super::policy::{Cause, Event, GateState, GpuIndex, Mask, Note, Share, TenantId, Why, each};
use super::thread::Order;
use super::{PATIENCE, reactor};

/// Why there is no trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The thread does not answer.
    #[error("the arbiter does not answer; its log says more")]
    Silent,
    /// There is one trace at a time.
    #[error("another traces this node already: wait until that has ended")]
    Busy,
}

/// What an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The tenant waited for a lease.
    Wait,
    /// It held one: what its gate said first, and why it was closed, if it was.
    Lease(Option<GateState>, Option<Why>),
    /// Closed, until nothing was in flight or the deadline had passed.
    Drain,
    /// It did not drain in time.
    Late,
    /// It has drained, too late.
    LateDrained,
    /// Its share has changed.
    Share(Share),
    /// The GPU was idle while somebody wanted it.
    Idle(Cause),
}

/// An interval or an instant on one GPU, in nanoseconds from the trace's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The GPU.
    pub gpu: GpuIndex,
    /// The tenant; `None` for the GPU's own.
    pub tenant: Option<TenantId>,
    /// When it began.
    pub from: u64,
    /// How long it lasted; `None` for an instant.
    pub ns: Option<u64>,
    /// What.
    pub kind: Kind,
}

/// What was traced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// How long, nanoseconds.
    pub ns: u64,
    /// Events that the ring had no room for: the oldest. Items begin after them.
    pub lost: u64,
    /// The items, in the order in which they ended.
    pub items: Vec<Item>,
    /// Allocations.
    pub tenants: BTreeMap<TenantId, String>,
    /// UUIDs.
    pub gpus: BTreeMap<GpuIndex, String>,
}

/// What the thread keeps while somebody traces.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) at: u64,
    pub(super) standing: Vec<Event>,
    /// Of all that were there meanwhile.
    pub(super) tenants: BTreeMap<TenantId, String>,
    pub(super) gpus: BTreeMap<GpuIndex, String>,
}

/// Notes as they are handed to the asker, whose thread makes items of them.
#[derive(Debug)]
pub(super) struct Noted {
    pub(super) begun: Begun,
    pub(super) until: u64,
    pub(super) lost: u64,
    pub(super) events: Vec<Event>,
}

impl Noted {
    fn recording(self) -> Recording {
        let Noted { begun, until, lost, events } = self;
        let Begun { at, mut standing, tenants, gpus } = begun;
        let mut from = at;
        if let (1.., Some(first)) = (lost, events.first()) {
            // What stood at the beginning says nothing of a later one.
            standing.clear();
            from = first.at;
        }
        let mut items = items(standing.iter().chain(&events), from, until);
        for item in &mut items {
            item.from = item.from.saturating_sub(at);
        }
        Recording { ns: until.saturating_sub(at), lost, items, tenants, gpus }
    }
}

/// A trace that goes on. Dropping it ends it.
#[derive(Debug)]
pub struct Tracing {
    orders: Sender<Order>,
    waker: Arc<EventFd>,
    pub(super) is_begun: bool,
}

impl Tracing {
    /// # Errors
    /// See [`TraceError`].
    pub(super) fn begin(orders: Sender<Order>, waker: Arc<EventFd>) -> Result<Self, TraceError> {
        let (answer, begun) = sync_channel(1);
        let trace = Tracing { orders: orders.clone(), waker: Arc::clone(&waker), is_begun: false };
        send(&orders, &waker, Order::BeginTrace(trace, answer));
        begun.recv_timeout(PATIENCE).map_err(|_| TraceError::Silent)?
    }

    /// Ends it. It waits for the arbiter's thread, for a second at most.
    ///
    /// # Errors
    /// See [`TraceError`].
    pub fn end(mut self) -> Result<Recording, TraceError> {
        self.is_begun = false;
        let (answer, noted) = sync_channel(1);
        send(&self.orders, &self.waker, Order::EndTrace(Some(answer)));
        noted.recv_timeout(PATIENCE).map(Noted::recording).map_err(|_| TraceError::Silent)
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        if self.is_begun {
            send(&self.orders, &self.waker, Order::EndTrace(None));
        }
    }
}

/// The asker, who waits for the beginning.
pub(super) type TraceAnswer = SyncSender<Result<Tracing, TraceError>>;

fn send(orders: &Sender<Order>, waker: &EventFd, order: Order) {
    if orders.send(order).is_ok() {
        reactor::wake(waker);
    }
}

/// A tenant as its events tell.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    gpus: Mask,
    wants: bool,
    /// Since when it waits; `None` where it does not, or has a lease.
    waits: Option<u64>,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, Default)]
enum Phase {
    #[default]
    Out,
    Held(u64, Option<GateState>),
    Draining(u64),
    Late,
}

/// Intervals and instants of these events, which lie between `from` and `until`. What stands at the beginning or the
/// end is cut there.
#[must_use]
pub fn items<'a>(events: impl IntoIterator<Item = &'a Event>, from: u64, until: u64) -> Vec<Item> {
    let mut drawn = Drawn { items: Vec::new(), from };
    let mut tenants: BTreeMap<TenantId, State> = BTreeMap::new();
    for event in events {
        let (at, note) = (event.at.max(from), event.note);
        let Some(id) = event.tenant else {
            if let Note::Idle { cause, ns } = note {
                drawn.interval(event.gpus, None, at.saturating_sub(ns), at, Kind::Idle(cause));
            }
            continue;
        };
        let state = tenants.entry(id).or_insert_with(|| State {
            // Events before this one were lost.
            phase: match note {
                Note::Closed(Why::Found) => Phase::Out,
                Note::Closed(_) => Phase::Held(from, None),
                Note::Late | Note::Ended => Phase::Draining(from),
                _ => Phase::Out,
            },
            ..State::default()
        });
        state.gpus = event.gpus;
        match note {
            Note::Waits => {
                state.wants = true;
                if matches!(state.phase, Phase::Out | Phase::Late) {
                    state.waits = Some(at);
                }
            }
            Note::Granted(gate) => {
                drawn.wait(id, state, at);
                state.wants = false;
                state.phase = Phase::Held(at, Some(gate));
            }
            Note::Closed(why) => {
                drawn.lease(id, state, at, Some(why));
                state.phase = Phase::Draining(at);
            }
            Note::Late => {
                drawn.lease(id, state, at, None);
                drawn.instant(id, state.gpus, at, Kind::Late);
                (state.phase, state.waits) = (Phase::Late, state.wants.then_some(at));
            }
            Note::Ended => {
                if matches!(state.phase, Phase::Late) {
                    drawn.instant(id, state.gpus, at, Kind::LateDrained);
                }
                drawn.lease(id, state, at, None);
                state.phase = Phase::Out;
                if state.wants {
                    state.waits.get_or_insert(at);
                }
            }
            Note::Gone => {
                drawn.wait(id, state, at);
                state.wants = false;
            }
            Note::Share(share) => drawn.instant(id, state.gpus, at, Kind::Share(share)),
            Note::Idle { .. } => {}
        }
    }
    for (id, state) in &mut tenants {
        drawn.wait(*id, state, until);
        drawn.lease(*id, state, until, None);
    }
    drawn.items
}

struct Drawn {
    items: Vec<Item>,
    from: u64,
}

impl Drawn {
    fn wait(&mut self, id: TenantId, state: &mut State, at: u64) {
        if let Some(since) = state.waits.take() {
            self.interval(state.gpus, Some(id), since, at, Kind::Wait);
        }
    }

    /// What of a lease ends now: its open part, or its drain.
    fn lease(&mut self, id: TenantId, state: &State, at: u64, why: Option<Why>) {
        match state.phase {
            Phase::Held(since, gate) => {
                self.interval(state.gpus, Some(id), since, at, Kind::Lease(gate, why));
            }
            Phase::Draining(since) => {
                self.interval(state.gpus, Some(id), since, at, Kind::Drain);
            }
            Phase::Out | Phase::Late => {}
        }
    }

    fn interval(&mut self, gpus: Mask, tenant: Option<TenantId>, from: u64, to: u64, kind: Kind) {
        let from = from.max(self.from);
        let ns = Some(to.saturating_sub(from));
        self.items.extend(indexes(gpus).map(|gpu| Item { gpu, tenant, from, ns, kind }));
    }

    fn instant(&mut self, id: TenantId, gpus: Mask, at: u64, kind: Kind) {
        let item = |gpu| Item { gpu, tenant: Some(id), from: at, ns: None, kind };
        self.items.extend(indexes(gpus).map(item));
    }
}

fn indexes(gpus: Mask) -> impl Iterator<Item = GpuIndex> {
    each(gpus).filter_map(|gpu| GpuIndex::try_from(gpu).ok())
}

#[cfg(test)]
mod tests {
    use tessera_config::Leases;

    use super::*;
    use crate::Arbiter;

    #[test]
    fn there_is_one_trace_at_a_time_and_an_asker_that_is_gone_makes_room() {
        let arbiter = Arbiter::start(&Leases::default()).unwrap();
        let tracing = arbiter.trace().unwrap();
        assert_eq!(arbiter.trace().map(|_| ()), Err(TraceError::Busy));
        // As where the connection of the asker breaks.
        drop(tracing);
        let recording = arbiter.trace().unwrap().end().unwrap();
        assert_eq!((recording.lost, recording.items.len()), (0, 0));
        let gone = arbiter.trace().unwrap();
        arbiter.stop();
        assert_eq!(gone.end(), Err(TraceError::Silent));
    }
}
