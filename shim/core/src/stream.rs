//! Streams and captures: hooks through which the gate learns what becomes of the streams that it has
//! to drain.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::gate::{Stream, capture, elsewhere, streams};
use crate::real::{self, Real};
use core::ffi::{c_uint, c_void};
use tessera_cuda::types::*;

macro_rules! hooks {
    ($($name:ident ($stream:ident: CUstream $(, $arg:ident: $ty:ty)*) { $around:ident };)+) => {
        $(
            /// CUDA Driver API, "Stream Management".
            ///
            /// # Safety
            /// As the driver's.
            pub unsafe fn $name(
                real: &Real<unsafe extern "C" fn(CUstream $(, $ty)*) -> CUresult>,
                $stream: CUstream,
                $($arg: $ty),*
            ) -> CUresult {
                let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
                let stream = Stream::new($stream, real.symbol().work.per_thread);
                // SAFETY: the caller's own arguments.
                $around(stream, || unsafe { function($stream $(, $arg)*) })
            }
        )+
    };
}

hooks! {
    cuStreamDestroy(stream: CUstream) { destroying };
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) { joining };
    cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) { elsewhere };
    cuLaunchHostFunc_v2(
        stream: CUstream, function: CUhostFn, data: *mut c_void, mode: c_uint
    ) { elsewhere };
    cuStreamAddCallback(
        stream: CUstream, callback: CUstreamCallback, data: *mut c_void, flags: c_uint
    ) { elsewhere };
    cuStreamWaitValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) {
        elsewhere
    };
    cuStreamWaitValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) {
        elsewhere
    };
    cuStreamBatchMemOp(
        stream: CUstream, count: c_uint, ops: *mut CUstreamBatchMemOpParams, flags: c_uint
    ) { elsewhere };
    cuStreamBeginCapture(stream: CUstream) { beginning };
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) { beginning };
    cuStreamBeginCaptureToGraph(
        stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, mode: CUstreamCaptureMode
    ) { beginning };
    cuStreamBeginRecaptureToGraph(
        stream: CUstream, mode: CUstreamCaptureMode, graph: CUgraph,
        callback: CUgraphRecaptureCallback, user_data: *mut c_void
    ) { beginning };
    cuStreamBeginCaptureToCig(stream: CUstream, params: *mut CUstreamCigCaptureParams) {
        beginning
    };
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) { ending };
    cuStreamEndCaptureToCig(stream: CUstream) { ending };
}

/// CUDA Driver API, "External Resource Interoperability": others signal, the host or another process say.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuWaitExternalSemaphoresAsync(
    real: &Real<
        unsafe extern "C" fn(
            *const CUexternalSemaphore,
            *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
            c_uint,
            CUstream,
        ) -> CUresult,
    >,
    semaphores: *const CUexternalSemaphore,
    params: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
    count: c_uint,
    stream: CUstream,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let on = Stream::new(stream, real.symbol().work.per_thread);
    // SAFETY: the caller's own arguments.
    elsewhere(on, || unsafe { function(semaphores, params, count, stream) })
}

/// A stream that ends is marked before, so that what is in flight in it is still awaited.
#[inline(never)]
fn destroying(stream: Stream, call: impl FnOnce() -> CUresult) -> CUresult {
    let order = streams::destroying(stream);
    let result = call();
    if result == CUDA_SUCCESS {
        capture::destroyed(order, stream);
    }
    result
}

/// A wait for a captured event puts the stream into the capture.
#[inline(never)]
fn joining(stream: Stream, call: impl FnOnce() -> CUresult) -> CUresult {
    let _order = capture::joining(stream);
    call()
}

/// What the GPU has no part in: a host function, a wait for a word.
#[inline(never)]
fn elsewhere(stream: Stream, call: impl FnOnce() -> CUresult) -> CUresult {
    let begun = elsewhere::begin(stream);
    let result = call();
    if let Some(begun) = begun {
        begun.end();
    }
    result
}

#[inline(never)]
fn beginning(stream: Stream, call: impl FnOnce() -> CUresult) -> CUresult {
    let order = capture::beginning(stream);
    let result = call();
    if result == CUDA_SUCCESS {
        capture::began(order, stream);
    }
    result
}

/// Whether it ended is the driver's to say: an error may mean that it goes on (another thread asked,
/// or another stream of it), or that it came to nothing.
#[inline(never)]
fn ending(stream: Stream, call: impl FnOnce() -> CUresult) -> CUresult {
    let order = capture::ending();
    let before = capture::any() && is_capturing(stream);
    let result = call();
    if before && !is_capturing(stream) {
        capture::ended(order, stream);
    }
    result
}

/// Whether the stream takes part in a capture, valid or not.
fn is_capturing(stream: Stream) -> bool {
    let Some(ask) = real::cuStreamIsCapturing.get() else { return false };
    let mut status = 0;
    // SAFETY: the caller's stream, or one of the handles of the default streams.
    unsafe { ask(stream.handle(), &raw mut status) == CUDA_SUCCESS && status != 0 }
}
