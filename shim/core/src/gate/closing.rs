//! Closing a gate: the closer, a thread that has read CLOSED, waits until no thread is between reading the
//! gate and the driver's launch, and then until everything launched is complete.
//!
//! The order makes it sound ([`super::model`] walks through every interleaving). A launching thread raises
//! its flag, then reads its stream's note and the gate. The closer takes the notes away, has every thread
//! pass a barrier, reads the flags, and then looks for notes made since by threads that were past the gate
//! but not yet at the note. So a launch is either seen by its flag and waited for, its stream being among
//! those that are drained; or it comes later and finds the gate closed, or (if it has opened again) notes
//! its stream for the next closing.

use super::flight;
use super::nap::Naps;
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
        let busy = process.records.busy_from(from);
        if busy.is_none() && process.crowd.load(Ordering::Acquire) == 0 {
            return true;
        }
        if !still() {
            return false;
        }
        from = busy.unwrap_or(usize::MAX);
        looks += 1;
        if looks.is_multiple_of(LOOKS) {
            process.records.bury();
        }
        sleep_us(if looks < 20 { 2 } else { 50 });
    }
}

/// A round of waiting for everything that is in flight.
pub(super) struct Drain {
    naps: Naps,
    /// When it was last seen not to be complete.
    missed_us: Cell<Option<u32>>,
    /// How long what was left then was expected to take.
    left_us: Cell<Option<u32>>,
}

impl Drain {
    /// Takes up everything launched so far. `None` when `still` no longer holds; the next round has
    /// it then.
    pub(super) fn begin(process: &Process, still: impl Fn() -> bool) -> Option<Self> {
        {
            let mut streams = process.gate.streams.lock();
            flight::mark_all(process, &mut streams);
            streams.take_up(process);
        }
        if !flags_are_down(process, still) {
            return None;
        }
        process.gate.streams.lock().draw_all(process);
        let (missed_us, left_us) = (Cell::new(None), Cell::new(None));
        Some(Self { naps: Naps::new(), missed_us, left_us })
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
        let is_drained = streams.drain(capturing);
        if streams.left() < left {
            gate.progress.made(now_us, gate.expected_us());
        }
        if !is_drained {
            // What can be seen of it is progress, too.
            flight::land(process, &mut streams, true);
        }
        if !is_drained || gate.going.load(Ordering::Acquire) != 0 {
            self.missed_us.set(Some(now_us));
            self.left_us.set(flight::left_us(gate, &streams));
            return false;
        }
        if flight::land(process, &mut streams, true)
            && let Some(missed_us) = self.missed_us.get()
        {
            // Some time since the last look.
            gate.end_use(now_us.wrapping_sub(now_us.wrapping_sub(missed_us) / 2));
        }
        if gate_state(gate.gate().load(Ordering::Acquire)) == GATE_CLOSED {
            gate.all_landed();
        }
        true
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
        streams.drop_over();
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

    /// Whether the end is expected so soon that the next tenant should be awake.
    pub(super) fn is_near(&self, process: &Process) -> bool {
        self.left_us.get().is_some_and(|left_us| process.gate.lateness.is_near(left_us))
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
