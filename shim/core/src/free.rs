//! Frees: forget the pointer, call the driver, give the bytes back only when it succeeded.
//!
//! The entry goes *before* the call, because the driver may give the address to another thread at
//! once; the bytes go *after* it, because until then they are not free. Synchronous and
//! stream-ordered frees take any pointer: CUDA lets both release the other's allocations. Pointers
//! that are not charged (NULL, imported, already freed) are the driver's to judge. What was made in a
//! pool goes back to the pool, whose charge follows the driver ([`crate::pools`]).
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::quota;
use crate::real::Real;
use crate::state;
use crate::thread::Depth;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// `waited`: the free is complete when the driver's call returns.
#[inline]
fn release(pointer: u64, waited: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let Some(allocation) = process.allocations.remove(pointer) else { return call() };
    let result = call();
    if result != CUDA_SUCCESS {
        quota::keep(process, &process.allocations, pointer, allocation);
    } else if allocation.kind != Kind::Async {
        process.shares.freed(process, pointer, allocation);
    } else if let Some(pool) = process.pools.numbered(allocation.context) {
        pool.lost(process, waited);
    }
    result
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemFree(
    real: &Real<unsafe extern "C" fn(CUdeviceptr) -> CUresult>,
    dptr: CUdeviceptr,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    release(dptr, true, || unsafe { real(dptr) })
}

/// The 32-bit form of before CUDA 3.2.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemFree_v1(
    real: &Real<unsafe extern "C" fn(CUdeviceptr_v1) -> CUresult>,
    dptr: CUdeviceptr_v1,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    release(u64::from(dptr), true, || unsafe { real(dptr) })
}

/// CUDA Driver API, "Stream Ordered Memory Allocator".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemFreeAsync(
    real: &Real<unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult>,
    dptr: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    release(dptr, false, || unsafe { real(dptr, stream) })
}
