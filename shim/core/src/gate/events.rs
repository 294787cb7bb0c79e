//! What the gate asks of the driver: markers. An event without timing, recorded in a stream, is
//! complete when everything that was in the stream before it is (CUDA Driver API, "Event
//! Management"). Handles are numbers here; 0 is none.

use super::Stream;
use crate::real;
use core::ffi::c_int;
use core::ptr::{self, with_exposed_provenance_mut as handle};
use tessera_cuda::types::*;

/// The calling thread's current context.
pub(super) fn current() -> usize {
    let mut ctx = ptr::null_mut();
    if let Some(ask) = real::cuCtxGetCurrent.get() {
        // SAFETY: a valid place for a handle.
        unsafe { ask(&raw mut ctx) };
    }
    ctx.expose_provenance()
}

/// The context of a living stream that is no default stream.
pub(super) fn context_of(stream: Stream) -> usize {
    let mut ctx = ptr::null_mut();
    let Some(ask) = real::cuStreamGetCtx.get() else { return current() };
    // SAFETY: the caller's stream, and a valid place for a handle.
    match unsafe { ask(stream.handle(), &raw mut ctx) } {
        CUDA_SUCCESS => ctx.expose_provenance(),
        _ => current(),
    }
}

/// While it lives, a context is this thread's current one.
pub(super) struct Pushed(bool);

impl Pushed {
    /// `None` when the driver refuses.
    pub(super) fn new(ctx: usize) -> Option<Self> {
        if ctx != 0 && current() == ctx {
            return Some(Self(false));
        }
        let push = real::cuCtxPushCurrent_v2.get()?;
        // SAFETY: a context that no hook has seen end; those that end wait for the streams' lock.
        (unsafe { push(handle(ctx)) } == CUDA_SUCCESS).then_some(Self(true))
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        let mut ctx = ptr::null_mut();
        if self.0
            && let Some(pop) = real::cuCtxPopCurrent_v2.get()
        {
            // SAFETY: takes off what `new` put there.
            unsafe { pop(&raw mut ctx) };
        }
    }
}

/// A new event of the current context.
pub(super) fn create() -> Option<usize> {
    /// `CU_EVENT_DISABLE_TIMING`
    const DISABLE_TIMING: u32 = 2;
    let mut event = ptr::null_mut();
    // SAFETY: a valid place for a handle.
    let made = unsafe { real::cuEventCreate.get()?(&raw mut event, DISABLE_TIMING) };
    (made == CUDA_SUCCESS).then(|| event.expose_provenance())
}

/// Records `event` in a living stream of its context, which is the current one.
pub(super) fn record(event: usize, stream: Stream) -> bool {
    let Some(record) = real::cuEventRecord.get() else { return false };
    // SAFETY: an event of ours and the application's stream, which cannot end meanwhile.
    unsafe { record(handle(event), stream.handle()) == CUDA_SUCCESS }
}

/// Whether nothing is to be waited for any more: complete, or the context is broken.
pub(super) fn is_over(event: usize) -> bool {
    let Some(query) = real::cuEventQuery.get() else { return true };
    // SAFETY: an event of ours.
    unsafe { query(handle(event)) != CUDA_ERROR_NOT_READY }
}

/// Whether the context of `event`, which was never recorded, is broken: all calls fail then.
pub(super) fn is_broken(event: usize) -> bool {
    let Some(query) = real::cuEventQuery.get() else { return false };
    // SAFETY: an event of ours.
    !matches!(unsafe { query(handle(event)) }, CUDA_SUCCESS | CUDA_ERROR_NOT_READY)
}

pub(super) fn destroy(event: usize) {
    if let Some(destroy) = real::cuEventDestroy_v2.get() {
        // SAFETY: an event of ours that nobody keeps.
        unsafe { destroy(handle(event)) };
    }
}

/// What a marker in a stream would meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capturing {
    /// No capture.
    No,
    /// A capture of the stream itself.
    Itself,
    /// The legacy stream, while one is captured that synchronises with it: a marker would end the
    /// capture ("Stream Management", `cuStreamIsCapturing`: `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`).
    Another,
}

/// Asks about `stream` of the current context. Legal at any time.
pub(super) fn capturing(stream: Stream) -> Capturing {
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`
    const IMPLICIT: CUresult = 906;
    let mut status: c_int = 0;
    let Some(ask) = real::cuStreamIsCapturing.get() else { return Capturing::No };
    // SAFETY: a living stream and a valid place for the answer.
    match unsafe { ask(stream.handle(), &raw mut status) } {
        IMPLICIT => Capturing::Another,
        _ if status != 0 => Capturing::Itself,
        _ => Capturing::No,
    }
}
