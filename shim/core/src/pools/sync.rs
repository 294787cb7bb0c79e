//! Synchronisations: where the driver gives chunks back ("When more than the release threshold bytes
//! of memory are held by the memory pool, the allocator will try to release memory back to the OS on
//! the next call to stream, event or context synchronize", `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
//! `cuStreamQuery` and `cuEventQuery` only make memory reusable, so they are not hooked.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::FREES;
use crate::gate::{self, Stream, Waited};
use crate::real::Real;
use crate::state;
use crate::thread::Depth;
use core::sync::atomic::Ordering;
use tessera_cuda::types::*;

/// Some loads and branches where nothing was freed into a pool and nobody waits for the tenant's lease.
#[inline]
fn synchronised(result: CUresult, waited: Waited) -> CUresult {
    gate::synchronised(if result == CUDA_SUCCESS { waited } else { Waited::Event });
    if FREES.load(Ordering::Relaxed) && result == CUDA_SUCCESS {
        settle();
    }
    result
}

#[cold]
#[inline(never)]
fn settle() {
    let Some(_depth) = Depth::enter() else { return };
    match state::armed() {
        Some(process) => process.pools.settle_freed(process, true),
        // A forked child that has not used the driver: its parent's frees.
        None => FREES.store(false, Ordering::Relaxed),
    }
}

/// CUDA Driver API, "Stream Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuStreamSynchronize(
    real: &Real<unsafe extern "C" fn(CUstream) -> CUresult>,
    stream: CUstream,
) -> CUresult {
    let per_thread = real.symbol().work.per_thread;
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let waited = Waited::Stream(Stream::new(stream, per_thread));
    // SAFETY: the caller's own argument.
    synchronised(unsafe { real(stream) }, waited)
}

/// CUDA Driver API, "Event Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuEventSynchronize(
    real: &Real<unsafe extern "C" fn(CUevent) -> CUresult>,
    event: CUevent,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    synchronised(unsafe { real(event) }, Waited::Event)
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxSynchronize(real: &Real<unsafe extern "C" fn() -> CUresult>) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: no arguments.
    synchronised(unsafe { real() }, Waited::Context(0))
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxSynchronize_v2(
    real: &Real<unsafe extern "C" fn(CUcontext) -> CUresult>,
    ctx: CUcontext,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    synchronised(unsafe { real(ctx) }, Waited::Context(ctx.addr()))
}
