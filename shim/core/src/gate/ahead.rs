//! Work that is queued ahead of its turn. Once nothing of the tenant is in flight the arbiter *invites* its processes to
//! do so ([`tessera_region::flight`]): a stream is made to wait for the turn, and launches go behind that wait instead of
//! waiting at the gate. So the GPU has a window's work in the microsecond in which the gate opens, whether the tenant's
//! threads have a processor by then or not.
//!
//! A wait ends with the gate's next word. Who moves the gate ends it: the arbiter, and while that is silent the helper.

use super::flight;
use super::local::Local;
use super::{Stream, want};
use crate::place::Pushed;
use crate::real;
use crate::records::Flown;
use crate::state::Process;
use core::ptr;
use core::sync::atomic::Ordering;
use tessera_cuda::types::CUDA_SUCCESS;

/// `CU_STREAM_WAIT_VALUE_GEQ`
const AT_LEAST: u32 = 0;

/// Whether launches may be queued ahead at the gate that was closed with `word`.
pub(super) fn is_invited(gate: &Local, word: u32) -> bool {
    // Acquire: what the arbiter has seen to be complete is.
    gate.flight().invited.load(Ordering::Acquire) == word
        && gate.not_ahead.load(Ordering::Relaxed) != word
        && gate.is_bound()
        && !gate.is_own()
        && !gate.captures.any()
        && !gate.parked.load(Ordering::Relaxed)
}

/// Whether nobody needs to be awake when the gate opens that was closed with `word`: work is queued ahead, or will be.
pub(super) fn is_able(gate: &Local, word: u32) -> bool {
    gate.flight().ahead.load(Ordering::Relaxed) != 0
        && gate.not_ahead.load(Ordering::Relaxed) != word
        && !gate.captures.any()
}

/// Whether something waits for the tenant's turn.
pub(super) fn is_waiting(gate: &Local, word: u32) -> bool {
    let flight = gate.flight();
    flight.invited.load(Ordering::Acquire) == word
        && flight.admitted.load(Ordering::Relaxed) != flight.complete()
}

/// Takes room for one operation, if there is any.
pub(super) fn take_room(process: &Process, is_graph: bool) -> bool {
    let take = || flight::take_room(&process.gate, is_graph, false);
    take() || {
        // What the arbiter has seen to be complete may not have been counted here.
        let streams = process.gate.streams.lock_soon();
        streams.is_some_and(|mut streams| flight::land(process, &mut streams, false)) && take()
    }
}

/// Room has been taken for a launch of the calling thread: has its stream wait, unless it does, and says once that
/// somebody wants the GPU. False where that cannot be done, or the gate has moved.
pub(super) fn hold(process: &Process, flown: &Flown, word: u32) -> bool {
    let gate = &process.gate;
    if flown.held.load(Ordering::Relaxed) != word {
        let Some(is_put) = put(gate, flown, word) else { return false };
        if !is_put {
            gate.not_ahead.store(word, Ordering::Relaxed);
            return false;
        }
        flown.held.store(word, Ordering::Relaxed);
    }
    // SeqCst: after room was taken; see `tessera_region::flight`.
    let is_held = gate.gate().load(Ordering::SeqCst) == word;
    if is_held {
        want(process, word);
    }
    is_held
}

/// Puts a wait into the stream. `None`: the gate has moved, or somebody has the lock.
fn put(gate: &Local, flown: &Flown, word: u32) -> Option<bool> {
    let ctx = flown.ctx.load(Ordering::Relaxed);
    let Some(_pushed) = Pushed::new(ptr::with_exposed_provenance_mut(ctx)) else {
        return Some(false);
    };
    let turn = gate.streams.lock_soon()?.lanes.turn(ctx);
    let Some((address, turn)) = turn else { return Some(false) };
    // After the turn was read; see `tessera_region::flight`.
    if gate.gate().load(Ordering::SeqCst) != word {
        return None;
    }
    let stream = Stream(flown.stream.load(Ordering::Relaxed)).handle();
    // SAFETY: a living stream that the caller is about to launch into, and a word of memory that its context has
    // registered and that is never unmapped.
    let status = real::cuStreamWaitValue64_v2
        .get()
        .map(|wait| unsafe { wait(stream, address, turn.wrapping_add(1), AT_LEAST) });
    Some(status == Some(CUDA_SUCCESS))
}

/// What is queued ahead is marked at once where it lasts so long, microseconds: by the time that it is complete its thread
/// may have no processor to do so.
const MARKED_US: u32 = 20;

/// Whether the last launch into `flown` is to be marked.
pub(super) fn is_due(gate: &Local, flown: &Flown) -> bool {
    let held = flown.held.load(Ordering::Relaxed);
    let usual_us = || gate.flight().usual_us.load(Ordering::Relaxed);
    held != 0
        && held == gate.gate().load(Ordering::Relaxed)
        && (usual_us() == 0 || flown.unmarked().saturating_mul(usual_us()) >= MARKED_US)
}

/// Lets go what waits: the gate is the process's own from now on.
pub(super) fn release(gate: &Local) {
    let flight = gate.flight();
    flight.opened_us.store(flight::now_us(), Ordering::Relaxed);
    flight.release();
}
