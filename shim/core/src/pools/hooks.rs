//! The hooks of the stream-ordered allocator, and synchronisations.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::allocate::{self, Order};
use super::pool::{Home, Pool};
use super::{FREES, ask, home_of};
use crate::contexts::Place;
use crate::gate::{self, Stream, Waited};
use crate::place::{self, Look};
use crate::quota::{self, Asked};
use crate::real;
use crate::state::{self, Process};
use crate::thread::{Answer, Call, Depth, entered, tenant};
use core::ffi::{c_ulonglong, c_void};
use core::sync::atomic::Ordering;
use tessera_cuda::types::*;

/// An allocation on `stream` from the pool that `which` names.
#[inline]
unsafe fn allocate(
    name: &'static str,
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: Stream,
    which: impl FnOnce(&'static Process, Place) -> Option<CUmemoryPool>,
) -> Answer {
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let Some((process, _depth)) = tenant()? else { return call() };
    // A node of a graph, which takes memory when the graph is launched.
    if ask::is_capturing(stream) {
        return call();
    }
    let place = place::of_stream(process, stream).or_refuse(process, name)?;
    let Some(place) = place else { return call() };
    let bytes = bytes as u64;
    let unlisted = || Err(quota::refuse_unlisted(process, name, Asked::Bytes(bytes)));
    let Some(handle) = which(process, place) else {
        // The driver has no pools, or its own objection.
        return if place.gpu.is_some() { call() } else { unlisted() };
    };
    let Some(pool) = allocate::pool(process, handle, place.gpu) else {
        return Err(quota::refuse_unnoted(name));
    };
    match pool.home() {
        Home::Free => call(),
        Home::Unlisted => unlisted(),
        Home::Gpu(gpu) => Order { name, process, pool, gpu, bytes, dptr, stream }.carry_out(call),
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": from the pool current to the stream's device.
pub unsafe fn cuMemAllocAsync(
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: Stream,
) -> Answer {
    let which = |process: &'static Process, place: Place| {
        ask::current_pool(process.gpus.device_of(place.gpu?)?)
    };
    // SAFETY: the caller's own arguments.
    unsafe { allocate("cuMemAllocAsync", call, dptr, bytes, stream, which) }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the pool says where the memory is, which may
/// be another device than the stream's.
pub unsafe fn cuMemAllocFromPoolAsync(
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: Stream,
) -> Answer {
    let which = |_: &'static Process, _: Place| (!pool.is_null()).then_some(pool);
    // SAFETY: the caller's own arguments.
    unsafe { allocate("cuMemAllocFromPoolAsync", call, dptr, bytes, stream, which) }
}

/// Where managed memory without a place of its own is counted: on the current context's GPU.
fn here(process: &'static Process) -> Option<Home> {
    match place::current(process) {
        Look::At(place) => Some(place.gpu.map_or(Home::Unlisted, Home::Gpu)),
        _ => None,
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the properties say where the pool's memory
/// will be. It holds none yet.
pub unsafe fn cuMemPoolCreate(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
    props: *const CUmemPoolProps,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    call()?;
    if pool.is_null() || props.is_null() {
        return Ok(());
    }
    // SAFETY: the driver has read the one and written the other.
    let (handle, location, kind) = unsafe { (*pool, (*props).location, (*props).allocType) };
    let Some(home) = home_of(process, location, kind, here(process)) else {
        return Ok(()); // where it is first used
    };
    if let Some(pool) = process.pools.insert(process, handle, home) {
        pool.mark_own();
        return Ok(());
    }
    if let Some(destroy) = real::cuMemPoolDestroy.get() {
        // SAFETY: just made, and nobody else has seen it.
        unsafe { destroy(handle) };
    }
    Err(quota::refuse_unnoted("cuMemPoolCreate"))
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": "the resources associated with the pool will
/// be released automatically once there are no more outstanding allocations".
pub unsafe fn cuMemPoolDestroy(call: Call<'_>, pool: CUmemoryPool) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(known) = process.pools.find(pool) else { return call() };
    known.prepare_end(process);
    known.hide();
    let answer = call();
    match answer {
        Ok(()) => known.orphan(),
        Err(_) => known.show(pool.expose_provenance()),
    }
    answer
}

/// A call after which the driver may hold less for `pool`.
fn then_settle(pool: CUmemoryPool, call: Call<'_>, before: impl FnOnce(&Pool)) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    if let Some(pool) = process.pools.find(pool) {
        before(pool);
        pool.settle(process);
    }
    Ok(())
}

pub unsafe fn cuMemPoolTrimTo(call: Call<'_>, pool: CUmemoryPool, _: usize) -> Answer {
    then_settle(pool, call, |_| {})
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": a lower release threshold lets the next
/// synchronisation give chunks back.
pub unsafe fn cuMemPoolSetAttribute(
    call: Call<'_>,
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> Answer {
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
pub unsafe fn cuMemPoolImportFromShareableHandle(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
    _: *mut c_void,
    _: CUmemAllocationHandleType,
    _: c_ulonglong,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver wrote the handle.
    if let Some(&pool) = unsafe { pool.as_ref() } {
        // Without memory for the table it is looked at when it is used, and fails then.
        process.pools.insert(process, pool, Home::Free);
    }
    Ok(())
}

/// CUDA Driver API, "Stream Ordered Memory Allocator" (CUDA 13). The pool that the driver names for a place is
/// remembered as being there: only drivers that came later can be asked where a pool is.
pub unsafe fn cuMemGetMemPool(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver has read the one and written the other.
    let (Some(&pool), Some(&location)) = (unsafe { (pool.as_ref(), location.as_ref()) }) else {
        return Ok(());
    };
    if let Some(home) = home_of(process, location, kind, here(process)) {
        // Without memory for the table it is looked at when it is used.
        process.pools.adopt(pool, home);
    }
    Ok(())
}

pub use cuMemGetMemPool as cuMemGetDefaultMemPool;

/// Where the driver gives chunks back ("When more than the release threshold bytes of memory are held by the
/// memory pool, the allocator will try to release memory back to the OS on the next call to stream, event or
/// context synchronize", `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`). `cuStreamQuery` and `cuEventQuery` only make
/// memory reusable, so they are not hooked.
///
/// Some loads and branches where nothing was freed into a pool and nobody waits for the tenant's lease.
#[inline]
fn synchronise(call: &impl Fn() -> Answer, waited: Waited) -> Answer {
    let answer = call();
    gate::synchronised(if answer.is_ok() { waited } else { Waited::Event });
    if FREES.load(Ordering::Relaxed) && answer.is_ok() {
        settle();
    }
    answer
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

pub unsafe fn cuStreamSynchronize(call: &impl Fn() -> Answer, stream: Stream) -> Answer {
    synchronise(call, Waited::Stream(stream))
}

pub unsafe fn cuEventSynchronize(call: &impl Fn() -> Answer, _: CUevent) -> Answer {
    synchronise(call, Waited::Event)
}

pub unsafe fn cuCtxSynchronize(call: &impl Fn() -> Answer) -> Answer {
    synchronise(call, Waited::Context(0))
}

pub unsafe fn cuCtxSynchronize_v2(call: &impl Fn() -> Answer, ctx: CUcontext) -> Answer {
    synchronise(call, Waited::Context(ctx.addr()))
}
