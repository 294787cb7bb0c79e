//! The gate's state in a process.

use super::capture::Captures;
use super::joined::Joined;
use super::link::Link;
use super::nap::Lateness;
use super::progress::Progress;
use super::streams::{Noted, Streams};
use super::tickets::Tickets;
use super::window::{Estimate, Limits};
use crate::spin::Spin;
use crate::state::Process;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use tessera_region::layout::{GATE_CLOSED, gate_word};

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
    /// Held while that is decided.
    pub(super) binding: Spin<Helper>,
    pub(super) link: Link,
    /// Those to the gates of its other shares.
    pub(super) joined: Joined,
    /// Held over calls of the driver that may wait: see [`Streams`].
    pub(super) streams: Spin<Streams>,
    pub(super) noted: Spin<Noted>,
    pub(super) captures: Captures,
    /// Contexts being destroyed.
    pub(super) going: AtomicU32,
    /// Threads that wait at a closed gate.
    pub(super) waiting: AtomicU32,
    /// Threads that wait at an open one for room in the window.
    pub(super) roomless: AtomicU32,
    /// Those of the first that may be let pass one by one.
    pub(super) tickets: Tickets,
    pub(super) progress: Progress,
    /// The closed gate word for which `want` was said.
    pub(super) wanted: AtomicU32,
    /// The closed gate word for which `drained` was said.
    pub(super) drained: AtomicU32,
    /// The process is ending: the helper calls the driver no more.
    pub(super) parked: AtomicBool,
    /// Times that the application waited for the GPU while others waited for the tenant. Wraps.
    pub(super) synchronised: AtomicU32,
    /// Operations admitted at an open gate, and those of them known to be complete. Wrap.
    pub(super) issued: AtomicU32,
    pub(super) completed: AtomicU32,
    /// The graphs among them.
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

/// Whether there is a helper thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Helper {
    Unasked,
    Runs,
    Impossible,
}

impl Local {
    pub(crate) const fn new(page: *const AtomicU32) -> Self {
        Self {
            page,
            current: AtomicPtr::new(page.cast_mut()),
            own: AtomicU32::new(gate_word(0, GATE_CLOSED)),
            bound: AtomicU32::new(UNBOUND),
            binding: Spin::new(Helper::Unasked),
            link: Link::new(),
            joined: Joined::new(),
            streams: Spin::new(Streams::new()),
            noted: Spin::new(Noted::new()),
            captures: Captures::new(),
            going: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            roomless: AtomicU32::new(0),
            tickets: Tickets::new(),
            progress: Progress::new(),
            wanted: AtomicU32::new(0),
            drained: AtomicU32::new(0),
            parked: AtomicBool::new(false),
            synchronised: AtomicU32::new(0),
            issued: AtomicU32::new(0),
            completed: AtomicU32::new(0),
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
        }
    }

    /// What was in flight was complete at `now_us`.
    pub(super) fn end_use(&self, now_us: u32) {
        self.ended_us.store(now_us, Ordering::Relaxed);
    }

    /// From the first to the last of it, nanoseconds; and starts again.
    pub(super) fn take_use_ns(&self) -> u64 {
        match self.begun_us.swap(0, Ordering::Relaxed) {
            0 => 0,
            begun => {
                let used_us = self.ended_us.load(Ordering::Relaxed).wrapping_sub(begun);
                // The end may have been guessed to lie before the beginning.
                if used_us > u32::MAX / 2 { 0 } else { u64::from(used_us) * 1_000 }
            }
        }
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

    /// Nothing is in flight any more.
    pub(super) fn all_landed(&self) {
        let graphs = self.graphs_issued.load(Ordering::Relaxed);
        let issued = self.issued.load(Ordering::Relaxed);
        self.graphs_completed.store(graphs, Ordering::Relaxed);
        self.completed.store(issued, Ordering::Relaxed);
    }
}
