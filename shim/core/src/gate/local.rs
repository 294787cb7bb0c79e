//! The gate's state in a process.

use super::capture::Captures;
use super::link::{Joined, Link};
use super::nap::{Lateness, Overslept};
use super::progress::Progress;
use super::streams::{Noted, Streams};
use super::tickets::Tickets;
use super::window::{Estimate, Limits};
use crate::session::Kept;
use crate::spin::Spin;
use crate::state::Process;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use tessera_region::flight::FlightPage;
use tessera_region::layout::{GATE_CLOSED, gate_word};

/// The page of a process that nobody asks about what is in flight, or has no memory for one.
static UNSEEN: FlightPage = FlightPage::unseen();

/// See the module.
#[derive(Debug)]
pub struct Local {
    /// The tenant's gate in the quota page.
    page: *const AtomicU32,
    /// The gate that launches look at: the page's, or `own`.
    current: AtomicPtr<AtomicU32>,
    /// The gate that this process opens and closes itself while the arbiter is silent.
    pub(super) own: AtomicU32,
    /// Whether the helper runs ([`UNBOUND`], …).
    pub(super) bound: AtomicU32,
    /// Held while that is decided: whether a helper could be started, once that was tried.
    pub(super) binding: Spin<Option<bool>>,
    pub(super) link: Link,
    /// Those to the gates of its other shares.
    pub(super) joined: Joined,
    /// Held over calls of the driver that may wait: see [`Streams`].
    pub(super) streams: Spin<Streams>,
    pub(super) noted: Spin<Noted>,
    pub(super) captures: Captures,
    /// Contexts being destroyed.
    pub(super) going: AtomicU32,
    /// What is in flight, and who waits: [`Self::flight`], and its memfd.
    flight: AtomicPtr<FlightPage>,
    pub(super) flight_file: Spin<Option<Kept>>,
    /// Of those who wait at a closed gate, those that may be let pass one by one.
    pub(super) tickets: Tickets,
    pub(super) progress: Progress,
    /// Held by the thread that polls at a closed gate.
    pub(super) awake: Spin<()>,
    /// The closed gate word for which `want` was said.
    pub(super) wanted: AtomicU32,
    /// The closed gate word at which nothing can be queued ahead.
    pub(super) not_ahead: AtomicU32,
    /// The process is ending: the helper calls the driver no more.
    pub(super) parked: AtomicBool,
    /// Times that the application waited for the GPU while others waited for the tenant. Wraps.
    pub(super) synchronised: AtomicU32,
    /// Operations that were admitted and are known to be complete, or take no room in the window. Wraps.
    pub(super) completed: AtomicU64,
    /// The graphs among those admitted, and among those complete. Wrap.
    pub(super) graphs_issued: AtomicU32,
    pub(super) graphs_completed: AtomicU32,
    /// [`Limits`]
    single: AtomicU32,
    graph: AtomicU32,
    least: AtomicU32,
    pub(super) batch: AtomicU32,
    pub(super) estimate: Spin<Estimate>,
    /// When something was first handed to the driver since the gate opened (0: nothing was), and when
    /// something was last found complete, microseconds. Under the lock of `streams`.
    begun_us: AtomicU32,
    ended_us: AtomicU32,
    /// By how much the helper's sleeps end late.
    pub(super) lateness: Lateness,
    /// And those of threads that wait for room.
    pub(super) overslept: Overslept,
}

// SAFETY: `page` points to a word of the quota page, which stays mapped; the rest is `Sync`.
unsafe impl Sync for Local {}
// SAFETY: as above.
unsafe impl Send for Local {}

/// Nothing has been launched, or compute is not limited.
pub(super) const UNBOUND: u32 = 0;
/// No arbiter has been seen; the helper, if there can be one, looks out for it.
pub(super) const WATCHED: u32 = 1;
/// The arbiter has been notified, and the helper runs.
pub(super) const BOUND: u32 = 2;
/// The arbiter has been notified; there can be no helper: no threads in this process.
pub(super) const ALONE: u32 = 3;

impl Local {
    pub(crate) fn new(page: *const AtomicU32) -> Self {
        Self {
            page,
            current: AtomicPtr::new(page.cast_mut()),
            own: AtomicU32::new(gate_word(0, GATE_CLOSED)),
            bound: AtomicU32::new(UNBOUND),
            binding: Spin::new(None),
            link: Link::default(),
            joined: Joined::default(),
            streams: Spin::default(),
            noted: Spin::default(),
            captures: Captures::default(),
            going: AtomicU32::new(0),
            flight: AtomicPtr::new((&raw const UNSEEN).cast_mut()),
            flight_file: Spin::new(None),
            tickets: Tickets::default(),
            progress: Progress::default(),
            awake: Spin::new(()),
            wanted: AtomicU32::new(0),
            not_ahead: AtomicU32::new(0),
            parked: AtomicBool::new(false),
            synchronised: AtomicU32::new(0),
            completed: AtomicU64::new(0),
            graphs_issued: AtomicU32::new(0),
            graphs_completed: AtomicU32::new(0),
            single: AtomicU32::new(Limits::NARROWEST.single),
            graph: AtomicU32::new(Limits::NARROWEST.graph),
            least: AtomicU32::new(Limits::NARROWEST.least),
            batch: AtomicU32::new(Limits::NARROWEST.batch),
            estimate: Spin::new(Estimate::new()),
            begun_us: AtomicU32::new(0),
            ended_us: AtomicU32::new(0),
            lateness: Lateness::new(),
            overslept: Overslept::new(),
        }
    }

    /// For [`crate::records::Owner`].
    pub(crate) fn current(&self) -> &AtomicPtr<AtomicU32> {
        &self.current
    }

    /// The gate that counts now.
    pub(super) fn gate(&self) -> &AtomicU32 {
        // SAFETY: `page` or `own`, both of which live as long as the process.
        unsafe { &*self.current.load(Ordering::Relaxed) }
    }

    /// The gate in the quota page.
    pub(super) fn page(&self) -> &AtomicU32 {
        // SAFETY: a word of the quota page, which stays mapped for the life of the process.
        unsafe { &*self.page }
    }

    /// Whether this process rations itself.
    pub(super) fn is_own(&self) -> bool {
        ptr::eq(self.current.load(Ordering::Relaxed), &raw const self.own)
    }

    /// Whether somebody moves the gate.
    #[inline]
    pub(super) fn is_bound(&self) -> bool {
        self.bound.load(Ordering::Acquire) == BOUND
    }

    /// Whether a helper drains, or will when somebody moves the gate.
    pub(super) fn is_watched(&self) -> bool {
        matches!(self.bound.load(Ordering::Acquire), WATCHED | BOUND)
    }

    /// Has all launches look at `word` from now on; those under way are in flight.
    pub(super) fn look_at(&self, process: &Process, word: &AtomicU32) {
        process.records.redirect(&self.current, word.as_ptr().cast(), process.has_membarrier);
    }

    /// What an operation usually takes, microseconds; 0 where nobody knows.
    pub(super) fn expected_us(&self) -> u32 {
        self.estimate.lock().usual_us()
    }

    /// Something was handed to the driver at `since_us`.
    pub(super) fn begin_use(&self, since_us: u32) {
        if self.begun_us.load(Ordering::Relaxed) == 0 {
            self.begun_us.store(since_us.max(1), Ordering::Relaxed);
            self.ended_us.store(since_us, Ordering::Relaxed);
            self.flight().begun_us.store(since_us.max(1), Ordering::Relaxed);
        }
    }

    /// What was in flight was complete at `now_us`.
    pub(super) fn end_use(&self, now_us: u32) {
        self.ended_us.store(now_us, Ordering::Relaxed);
    }

    /// From the first to the last of it, nanoseconds; and starts again.
    pub(super) fn take_use_ns(&self) -> u64 {
        self.flight().begun_us.store(0, Ordering::Relaxed);
        match self.begun_us.swap(0, Ordering::Relaxed) {
            0 => 0,
            begun => {
                let begun = self.since_opened(begun);
                let used_us = self.ended_us.load(Ordering::Relaxed).wrapping_sub(begun);
                // The end may have been guessed to lie before the beginning.
                if used_us > u32::MAX / 2 { 0 } else { u64::from(used_us) * 1_000 }
            }
        }
    }

    /// `us`, or when the gate opened, if that was later: what was queued ahead did not run before.
    pub(super) fn since_opened(&self, us: u32) -> u32 {
        let opened_us = self.flight().opened_us.load(Ordering::Relaxed);
        let is_later = opened_us.wrapping_sub(us).cast_signed() > 0;
        if opened_us != 0 && is_later { opened_us } else { us }
    }

    pub(super) fn set_limits(&self, limits: Limits) {
        self.single.store(limits.single, Ordering::Relaxed);
        self.graph.store(limits.graph, Ordering::Relaxed);
        self.least.store(limits.least, Ordering::Relaxed);
        self.batch.store(limits.batch, Ordering::Relaxed);
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            single: self.single.load(Ordering::Relaxed),
            graph: self.graph.load(Ordering::Relaxed),
            least: self.least.load(Ordering::Relaxed),
            batch: self.batch.load(Ordering::Relaxed),
        }
    }

    /// The page of this process's flight.
    #[inline]
    pub(super) fn flight(&self) -> &'static FlightPage {
        // SAFETY: `UNSEEN`, or a page that is never unmapped. Acquire: pairs with the Release in `show_flight`.
        unsafe { &*self.flight.load(Ordering::Acquire) }
    }

    /// Counts in `page` from now on, before anything was counted.
    pub(super) fn show_flight(&self, page: &'static FlightPage) {
        self.completed.store(0, Ordering::Relaxed);
        self.flight.store(ptr::from_ref(page).cast_mut(), Ordering::Release);
    }

    /// So many operations are complete, of which so many have written no word.
    pub(super) fn complete(&self, operations: u32, settled: u32) {
        self.completed.fetch_add(operations.into(), Ordering::Relaxed);
        if settled != 0 {
            self.flight().settled.fetch_add(settled.into(), Ordering::Release);
        }
    }

    /// So many operations were admitted, and all are complete.
    pub(super) fn make_room(&self, admitted: u64) {
        let graphs = self.graphs_issued.load(Ordering::Relaxed);
        self.graphs_completed.store(graphs, Ordering::Relaxed);
        self.completed.store(admitted, Ordering::Relaxed);
    }
}
