//! What the gate asks of the driver: markers. An event without timing, recorded in a stream, is
//! complete when everything that was in the stream before it is (CUDA Driver API, "Event
//! Management"). Handles are numbers here; 0 is none.

use crate::{place, real};
use core::ffi::{c_int, c_void};
use core::ptr::{self, with_exposed_provenance_mut as handle};
use tessera_cuda::types::*;

/// The calling thread's current context.
pub(super) fn current() -> usize {
    place::current_context().map_or(0, |ctx| ctx.expose_provenance())
}

/// The context of what the calling thread puts into `stream`, which lives.
pub(super) fn context_of(stream: Stream) -> usize {
    place::context_of(stream).map_or_else(current, |ctx| ctx.expose_provenance())
}

/// A new event of the current context.
pub(super) fn create() -> Option<usize> {
    /// `CU_EVENT_DISABLE_TIMING`
    const DISABLE_TIMING: u32 = 2;
    // SAFETY: a valid place for a handle.
    let made = real::cuEventCreate
        .ask(ptr::null_mut(), |create, event| unsafe { create(event, DISABLE_TIMING) });
    made.ok().map(|event| event.expose_provenance())
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
    // SAFETY: an event of ours that nobody keeps.
    real::cuEventDestroy_v2.tell(|destroy| unsafe { destroy(handle(event)) });
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

/// Whether what is put into `stream` becomes part of a graph: it takes part in a capture, valid or not. The legacy
/// default stream cannot be captured ("Stream Management", `cuStreamBeginCapture`).
pub(crate) fn is_capturing(stream: Stream) -> bool {
    stream != Stream::LEGACY && capturing(stream) == Capturing::Itself
}

// Kinds of streams, as far as the gate needs to distinguish them.

/// A stream, with the default streams by their own handles (CUDA Driver API, "Stream
/// synchronization behavior"): what NULL means depends on the flavour of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(crate) usize);

impl Stream {
    /// `CU_STREAM_LEGACY`
    pub const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`
    pub const PER_THREAD: Self = Self(2);

    /// The stream that `handle` names to a function whose NULL stream is per thread (`_ptsz`), or
    /// the legacy one.
    #[inline(always)]
    pub fn new(handle: CUstream, per_thread: bool) -> Self {
        match handle.addr() {
            0 => Self(1 + usize::from(per_thread)),
            handle => Self(handle),
        }
    }

    /// That of a launch configuration, which the driver reads as well. The legacy one where there is
    /// none: the driver refuses it.
    ///
    /// # Safety
    /// `config` is null or valid.
    #[inline(always)]
    pub unsafe fn of_config(config: *const CUlaunchConfig, per_thread: bool) -> Self {
        // SAFETY: the caller's word.
        match unsafe { config.as_ref() } {
            Some(config) => Self::new(config.hStream, per_thread),
            None => Self::LEGACY,
        }
    }

    /// Those of `cuLaunchCooperativeKernelMultiDevice`, each with what is launched.
    ///
    /// # Safety
    /// `launches` is null or points to `devices` elements.
    pub unsafe fn of_launches(
        launches: *const c_void,
        devices: u32,
    ) -> impl Iterator<Item = (CUfunction, Self)> + Clone {
        let launches = launches.cast::<LaunchParams>();
        let count = if launches.is_null() { 0 } else { devices };
        (0..count as usize).map(move |at| {
            // SAFETY: the caller's word.
            let launch = unsafe { &*launches.add(at) };
            (launch.function, Self::new(launch.stream, false))
        })
    }

    /// One of the two default streams, which every context has.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= Self::PER_THREAD.0
    }

    pub(crate) fn handle(self) -> CUstream {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// `CUDA_LAUNCH_PARAMS` (cuda.h 12.9).
#[repr(C)]
struct LaunchParams {
    function: CUfunction,
    /// Grid, block, bytes of shared memory.
    shape: [u32; 7],
    stream: CUstream,
    params: *mut *mut c_void,
}
const _: () = assert!(size_of::<LaunchParams>() == 56);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_null_stream_is_what_the_flavour_makes_of_it() {
        let null = ptr::null_mut();
        assert_eq!(Stream::new(null, false), Stream::LEGACY);
        assert_eq!(Stream::new(null, true), Stream::PER_THREAD);
        for per_thread in [false, true] {
            let own = Stream::new(ptr::without_provenance_mut(0x1000), per_thread);
            assert_eq!(own.0, 0x1000);
            assert!(!own.is_default());
            let legacy = ptr::without_provenance_mut(1);
            assert_eq!(Stream::new(legacy, per_thread), Stream::LEGACY);
        }
    }

    #[test]
    fn every_device_of_a_cooperative_launch_has_its_stream() {
        let params = |stream| LaunchParams {
            function: ptr::null_mut(),
            shape: [1; 7],
            stream: ptr::without_provenance_mut(stream),
            params: ptr::null_mut(),
        };
        let launches = [params(0x10), params(0), params(0x30)];
        // SAFETY: three elements.
        let streams = unsafe { Stream::of_launches(launches.as_ptr().cast(), 3) };
        assert!(streams.map(|(_, stream)| stream).eq([Stream(0x10), Stream::LEGACY, Stream(0x30)]));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { Stream::of_launches(ptr::null(), 3) }.count(), 0);
    }
}
