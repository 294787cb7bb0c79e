//! Closing a gate: the closer, a thread that has read CLOSED, waits until no thread is between reading the
//! gate and the driver's launch, and then until everything launched is complete.
//!
//! The order makes it sound (`model_tests` walks through every interleaving). A launching thread raises
//! its flag, then reads its stream's note and the gate. The closer takes the notes away, has every thread
//! pass a barrier, reads the flags, and then looks for notes made since by threads that were past the gate
//! but not yet at the note. So a launch is either seen by its flag and waited for, its stream being among
//! those that are drained; or it comes later and finds the gate closed, or (if it has opened again) notes
//! its stream for the next closing.

use super::flight;
use super::nap::Naps;
use crate::pools::ask::Uncaptured;
use crate::spin::sleep_us;
use crate::state::Process;
use core::cell::Cell;
use core::sync::atomic::{Ordering, fence};
use tessera_region::layout::{GATE_CLOSED, gate_state};

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`
const REGISTER: libc::c_int = 1 << 4;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: no pointers; the commands have no other effect than their barrier.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether the kernel has what the hot path leaves to who closes. Only asks; a closer registers.
pub(crate) fn has_membarrier() -> bool {
    // SAFETY: a query has no effect.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) };
    commands > 0 && commands & libc::c_long::from(PRIVATE_EXPEDITED) != 0
}

/// Makes [`everybody_passes_a_barrier`] possible. Slow in a process with many threads.
pub(super) fn prepare(process: &Process) {
    if process.has_membarrier {
        membarrier(REGISTER);
    }
}

/// Orders all that this thread did before against what every other thread does after.
pub(super) fn everybody_passes_a_barrier(process: &Process) {
    // A forked child is not registered, but its threads are its own: it comes by `prepare`.
    if process.has_membarrier && !membarrier(PRIVATE_EXPEDITED) {
        membarrier(REGISTER);
        membarrier(PRIVATE_EXPEDITED);
    }
    fence(Ordering::SeqCst);
}

/// Looks between which a thread that ended in a launch is looked for.
const LOOKS: u32 = 512;

/// Waits until every flag has been down once. False when `still` no longer holds.
pub(super) fn flags_are_down(process: &Process, still: impl Fn() -> bool) -> bool {
    everybody_passes_a_barrier(process);
    let (mut from, mut looks) = (0, 0u32);
    loop {
        let Some(busy) = process.records.busy_from(from) else { return true };
        if !still() {
            return false;
        }
        from = busy;
        looks += 1;
        if looks.is_multiple_of(LOOKS) {
            process.records.bury();
        }
        sleep_us(if looks < 20 { 2 } else { 50 });
    }
}

/// A thread comes to wait at the gate that was closed with `word`: it marks what was launched, its own first of all. If
/// no thread is in the driver, that is all there is, and it is shown.
pub(super) fn mark(process: &Process, word: u32) {
    let gate = &process.gate;
    // Its holder may be inside the driver, or draining.
    let Some(mut streams) = gate.streams.lock_soon() else { return };
    let capturing = gate.captures.any();
    let _uncaptured = capturing.then(Uncaptured::enter);
    flight::mark_all(process, &mut streams);
    if gate.parked.load(Ordering::Acquire) || gate.flight().closed.load(Ordering::Relaxed) == word {
        return;
    }
    streams.take_up(process);
    everybody_passes_a_barrier(process);
    if process.records.busy_from(0).is_some() {
        return; // the helper waits for them
    }
    let is_marked = flight::mark_all(process, &mut streams);
    streams.draw_all(process);
    streams.drain(process, capturing);
    if is_marked && streams.is_marked() {
        // Release: what is marked is admitted.
        gate.flight().closed.store(word, Ordering::Release);
    }
}

/// A round of waiting for everything that is in flight.
pub(super) struct Drain {
    naps: Naps,
    /// When it was last seen not to be complete.
    missed_us: Cell<Option<u32>>,
    /// How long what was left then was expected to take.
    left_us: Cell<Option<u32>>,
    /// When it was last asked whether contexts are broken.
    asked_us: Cell<u32>,
    /// The gate word, if it is a closed one.
    closed: Option<u32>,
    /// Whether all launches are marked.
    is_marked: Cell<bool>,
}

/// Where nothing lands for so long it is asked whether contexts are broken, microseconds.
const BROKEN_US: u32 = 10_000;

impl Drain {
    /// Takes up everything launched so far. `None` when `still` no longer holds; the next round has
    /// it then.
    pub(super) fn begin(process: &Process, still: impl Fn() -> bool) -> Option<Self> {
        let gate = &process.gate;
        let word = gate.gate().load(Ordering::Acquire);
        let closed = (gate_state(word) == GATE_CLOSED).then_some(word);
        {
            let mut streams = gate.streams.lock();
            flight::mark_all(process, &mut streams);
            streams.take_up(process);
        }
        if !flags_are_down(process, still) {
            return None;
        }
        let mut streams = gate.streams.lock();
        let is_marked = Cell::new(flight::mark_all(process, &mut streams));
        streams.draw_all(process);
        let (missed_us, left_us) = (Cell::new(None), Cell::new(None));
        let asked_us = Cell::new(flight::now_us());
        Some(Self { naps: Naps::new(), missed_us, left_us, asked_us, closed, is_marked })
    }

    /// Whether everything is complete.
    pub(super) fn look(&self, process: &Process) -> bool {
        let gate = &process.gate;
        let mut streams = gate.streams.lock();
        // Under the lock, so that who parks the helper knows when it is out of the driver.
        if gate.parked.load(Ordering::Acquire) {
            return true;
        }
        let capturing = gate.captures.any();
        let now_us = flight::now_us();
        let left = streams.left();
        if !self.is_marked.get() {
            self.is_marked.set(flight::mark_all(process, &mut streams));
        }
        let is_drained = streams.drain(process, capturing);
        let is_progress = streams.left() < left;
        if is_progress {
            gate.progress.made(now_us, gate.expected_us());
        }
        let is_marked = self.is_marked.get() && streams.is_marked();
        if let Some(word) = self.closed
            && is_marked
            && !gate.is_own()
        {
            // Release: what is marked is admitted.
            gate.flight().closed.store(word, Ordering::Release);
        }
        // What can be seen of it is progress, too.
        let landed = flight::land(process, &mut streams, true);
        let is_left = !is_drained || !is_marked || !streams.flying.is_empty();
        if is_left || gate.going.load(Ordering::Acquire) != 0 {
            if landed || is_progress {
                self.asked_us.set(now_us);
            } else if now_us.wrapping_sub(self.asked_us.get()) >= BROKEN_US {
                self.asked_us.set(now_us);
                streams.lanes.drop_broken();
            }
            self.missed_us.set(Some(now_us));
            self.left_us.set(flight::left_us(gate, &streams));
            return false;
        }
        if landed && let Some(missed_us) = self.missed_us.get() {
            // Some time since the last look.
            gate.end_use(now_us.wrapping_sub(now_us.wrapping_sub(missed_us) / 2));
        }
        true
    }

    /// All is complete, and no ticket is out or was taken since: what was admitted and nobody has marked is settled.
    pub(super) fn settle(&self, process: &Process) {
        let gate = &process.gate;
        let Some(word) = self.closed else { return };
        let streams = gate.streams.lock();
        if !streams.draining.is_empty() || !streams.flying.is_empty() {
            return; // a stream was marked that ends
        }
        let flight = gate.flight();
        let admitted = flight.admitted.load(Ordering::SeqCst);
        let left = admitted.wrapping_sub(flight.complete());
        // As long as the gate is closed, and nobody was invited, nothing is admitted.
        let is_still = gate.gate().load(Ordering::SeqCst) == word
            && flight.invited.load(Ordering::SeqCst) != word;
        if is_still && left.cast_signed() >= 0 {
            flight.settled.fetch_add(left, Ordering::Release);
            gate.make_room(admitted);
        }
    }

    /// Looks at what has been marked, while a thread is still in the driver: it may wait there for what
    /// is in flight, and a marker would wait with it.
    pub(super) fn peek(process: &Process) {
        let gate = &process.gate;
        let Some(mut streams) = gate.streams.lock_soon() else { return };
        if gate.parked.load(Ordering::Acquire) {
            return;
        }
        let left = streams.left();
        streams.drop_over(gate);
        if streams.left() < left {
            gate.progress.made(flight::now_us(), gate.expected_us());
        }
        flight::land(process, &mut streams, true);
    }

    /// Whether all that is left waits for something that the GPU does not do.
    pub(super) fn waits_elsewhere(&self, process: &Process) -> bool {
        let Some(mut streams) = process.gate.streams.lock_soon() else { return false };
        !process.gate.parked.load(Ordering::Acquire) && streams.waits_elsewhere()
    }

    /// Sleeps until it is worth looking again.
    pub(super) fn nap(&mut self, process: &Process) {
        self.naps.nap(&process.gate.lateness, self.left_us.get());
    }

    /// How long to sleep while the gate is open, nanoseconds.
    pub(super) fn next_nap_ns(&mut self) -> u64 {
        u64::from(self.naps.next_at_leisure()) * 1_000
    }
}
