//! The hooks of the stream-ordered allocator.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::allocate::{self, Order};
use super::ask;
use super::home_of;
use super::pool::{Home, Pool};
use crate::contexts::Place;
use crate::place::{self, Look};
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::state::{self, Process, Standing};
use crate::thread::Depth;
use core::ffi::{c_ulonglong, c_void};
use tessera_cuda::types::*;

/// Frees on the stream that the allocation was ordered on.
fn undo_free(pointer: u64, stream: CUstream, per_thread: bool) {
    let ordered = if per_thread { &real::cuMemFreeAsync_ptsz } else { &real::cuMemFreeAsync };
    if let Some(free) = ordered.get() {
        // SAFETY: the driver has just made it on this stream, and nobody else has seen it.
        unsafe { free(pointer, stream) };
    }
}

/// Whether a variant means the thread's own default stream by NULL.
pub(crate) fn is_per_thread<F: Copy>(real: &Real<F>) -> bool {
    real.symbol().name().to_bytes().ends_with(b"_ptsz")
}

/// An allocation on `stream` from the pool that `which` names.
#[inline]
fn allocate(
    name: &'static str,
    per_thread: bool,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    which: impl FnOnce(&'static Process, Place) -> Option<CUmemoryPool>,
    call: impl Fn() -> CUresult,
) -> CUresult {
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    // A node of a graph, which takes memory when the graph is launched.
    if ask::is_capturing(stream, per_thread) {
        return call();
    }
    let place = match place::of_stream(process, stream) {
        Look::At(place) => place,
        Look::Nowhere => return call(),
        Look::Refused(refused) => return quota::refuse(process, name, Asked::Context, &refused),
        Look::Unnoted(_) => return quota::refuse_unnoted(name),
    };
    let bytes = bytes as u64;
    let Some(handle) = which(process, place) else {
        return match place.gpu {
            Some(_) => call(), // the driver has no pools, or its own objection
            None => quota::refuse_unlisted(process, name, Asked::Bytes(bytes)),
        };
    };
    let Some(pool) = allocate::pool(process, handle, place.gpu) else {
        return quota::refuse_unnoted(name);
    };
    match pool.home() {
        Home::Free => call(),
        Home::Unlisted => quota::refuse_unlisted(process, name, Asked::Bytes(bytes)),
        Home::Gpu(gpu) => Order { name, process, pool, gpu, bytes }.carry_out(
            &call,
            // SAFETY: the driver wrote `dptr` when it succeeded.
            || unsafe { *dptr },
            |pointer| undo_free(pointer, stream, per_thread),
        ),
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": from the pool current to the stream's device.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAllocAsync(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult>,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let per_thread = is_per_thread(real);
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, bytes, stream) };
    let which = |process: &'static Process, place: Place| {
        ask::current_pool(process.gpus.device_of(place.gpu?)?)
    };
    allocate("cuMemAllocAsync", per_thread, dptr, bytes, stream, which, call)
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the pool says where the memory is, which may
/// be another device than the stream's.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAllocFromPoolAsync(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr, usize, CUmemoryPool, CUstream) -> CUresult>,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    let per_thread = is_per_thread(real);
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, bytes, pool, stream) };
    let which = |_: &'static Process, _: Place| (!pool.is_null()).then_some(pool);
    allocate("cuMemAllocFromPoolAsync", per_thread, dptr, bytes, stream, which, call)
}

/// Where managed memory without a place of its own is counted: on the current context's GPU.
fn here(process: &'static Process) -> Option<Home> {
    match place::current(process) {
        Look::At(Place { gpu: Some(gpu), .. }) => Some(Home::Gpu(gpu)),
        Look::At(Place { gpu: None, .. }) => Some(Home::Unlisted),
        _ => None,
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the properties say where the pool's memory
/// will be. It holds none yet.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemPoolCreate(
    real: &Real<unsafe extern "C" fn(*mut CUmemoryPool, *const CUmemPoolProps) -> CUresult>,
    pool: *mut CUmemoryPool,
    props: *const CUmemPoolProps,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pool, props) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    let result = call();
    if result != CUDA_SUCCESS || pool.is_null() || props.is_null() {
        return result;
    }
    // SAFETY: the driver has read the one and written the other.
    let (handle, location, kind) = unsafe { (*pool, (*props).location, (*props).allocType) };
    let Some(home) = home_of(process, location, kind, here(process)) else {
        return CUDA_SUCCESS; // where it is first used
    };
    match process.pools.insert(process, handle, home) {
        Some(pool) => {
            pool.mark_own();
            CUDA_SUCCESS
        }
        None => {
            if let Some(destroy) = real::cuMemPoolDestroy.get() {
                // SAFETY: just made, and nobody else has seen it.
                unsafe { destroy(handle) };
            }
            quota::refuse_unnoted("cuMemPoolCreate")
        }
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": "the resources associated with the pool will
/// be released automatically once there are no more outstanding allocations".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemPoolDestroy(
    real: &Real<unsafe extern "C" fn(CUmemoryPool) -> CUresult>,
    pool: CUmemoryPool,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(pool) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let Some(known) = process.pools.find(pool) else { return call() };
    known.prepare_end(process);
    known.hide();
    let result = call();
    if result == CUDA_SUCCESS {
        known.orphan();
    } else {
        known.show(pool.expose_provenance());
    }
    result
}

/// A call after which the driver may hold less for `pool`.
#[inline]
fn then_settle(
    pool: CUmemoryPool,
    call: impl FnOnce() -> CUresult,
    before: impl FnOnce(&Pool),
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let result = call();
    if result == CUDA_SUCCESS
        && let Some(process) = state::armed()
        && let Some(pool) = process.pools.find(pool)
    {
        before(pool);
        pool.settle(process);
    }
    result
}

/// CUDA Driver API, "Stream Ordered Memory Allocator".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemPoolTrimTo(
    real: &Real<unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult>,
    pool: CUmemoryPool,
    min_bytes_to_keep: usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    then_settle(pool, || unsafe { real(pool, min_bytes_to_keep) }, |_| {})
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": a lower release threshold lets the next
/// synchronisation give chunks back.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemPoolSetAttribute(
    real: &Real<unsafe extern "C" fn(CUmemoryPool, CUmemPool_attribute, *mut c_void) -> CUresult>,
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pool, attr, value) };
    if attr != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD || value.is_null() {
        return call();
    }
    then_settle(pool, call, |pool| {
        // SAFETY: the driver has just read this attribute's cuuint64_t there.
        pool.set_threshold(unsafe { value.cast::<u64>().read_unaligned() });
        pool.loosen();
    })
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the exporting process is charged, and an
/// imported pool allocates nothing.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemPoolImportFromShareableHandle(
    real: &Real<
        unsafe extern "C" fn(
            *mut CUmemoryPool,
            *mut c_void,
            CUmemAllocationHandleType,
            c_ulonglong,
        ) -> CUresult,
    >,
    pool: *mut CUmemoryPool,
    handle: *mut c_void,
    handle_type: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pool, handle, handle_type, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let result = call();
    if result == CUDA_SUCCESS
        && !pool.is_null()
        && let Some(process) = state::armed()
    {
        // Without memory for the table it is looked at when it is used, and fails then.
        // SAFETY: the driver wrote the handle.
        process.pools.insert(process, unsafe { *pool }, Home::Free);
    }
    result
}

/// The pool that the driver names for a place is remembered as being there: only drivers that came
/// later can be asked where a pool is.
#[inline]
fn then_know(
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let result = call();
    if result != CUDA_SUCCESS || pool.is_null() || location.is_null() {
        return result;
    }
    if let Some(process) = state::armed() {
        // SAFETY: the driver has read the one and written the other.
        let (pool, location) = unsafe { (*pool, *location) };
        let home = home_of(process, location, kind, here(process));
        if let Some(home) = home {
            // Without memory for the table it is looked at when it is used.
            process.pools.adopt(pool, home);
        }
    }
    result
}

/// The pool of a place.
type PoolOf =
    unsafe extern "C" fn(*mut CUmemoryPool, *mut CUmemLocation, CUmemAllocationType) -> CUresult;

/// CUDA Driver API, "Stream Ordered Memory Allocator" (CUDA 13).
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemGetDefaultMemPool(
    real: &Real<PoolOf>,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    then_know(pool, location, kind, || unsafe { real(pool, location, kind) })
}

/// CUDA Driver API, "Stream Ordered Memory Allocator" (CUDA 13).
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemGetMemPool(
    real: &Real<PoolOf>,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    then_know(pool, location, kind, || unsafe { real(pool, location, kind) })
}
