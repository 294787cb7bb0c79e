//! Contexts: each live one is charged the overhead that the quota page names, and its end gives back
//! everything that was allocated in it (CUDA Driver API, `cuCtxDestroy` and
//! `cuDevicePrimaryCtxReset`: arrays and what is allocated by `cuMemAlloc`, `cuMemAllocPitch` and
//! `cuMemAllocManaged` go with the context; pool memory and that of `cuMemCreate` do not).
//!
//! A primary context is created by the first retain and destroyed by the last release. Others may
//! retain it where no hook sees it, so the driver is asked what became of it, not a count of ours.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::contexts::{Context, Place};
use crate::gate::streams;
use crate::limits::Local;
use crate::place::{device_of, primary, primary_is_active, primary_lock};
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::state::{self, Process, Standing};
use crate::thread::Depth;
use core::ffi::{c_int, c_uint};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// Makes a context with `call`, charged for `device`. `handle` reads what the driver made.
fn create(
    name: &'static str,
    device: CUdevice,
    primary_of: Option<CUdevice>,
    process: &'static Process,
    call: impl Fn() -> CUresult,
    handle: impl FnOnce() -> CUcontext,
) -> CUresult {
    // A device that the driver does not know, or a driver not initialised: its own error.
    let Some(listed) = process.listed(device) else { return call() };
    let Some(gpu) = listed else { return quota::refuse_unlisted(process, name, Asked::Context) };
    let Some(promise) = process.contexts.promise() else { return quota::refuse_unnoted(name) };
    let overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
    let reservation = match quota::reserve(process, gpu, overhead_bytes) {
        Ok(reservation) => reservation,
        Err(refused) => return quota::refuse(process, name, Asked::Context, &refused),
    };
    let result = quota::insist(process, gpu, overhead_bytes, &call);
    if result != CUDA_SUCCESS {
        return result; // the reservation rolls back
    }
    // Settles to what was reserved, which never fails.
    let charged = reservation.commit(overhead_bytes, Kind::Overhead).is_ok();
    let handle = handle().addr();
    let place = Place { serial: 0, gpu: Some(gpu) };
    let overhead_bytes = if charged { overhead_bytes } else { 0 };
    let local = Local::default();
    let context =
        Context { handle, overhead_bytes, place, local, users: 1, primary_of, is_view: false };
    process.contexts.insert(promise, context, |stale| give_back(process, &stale));
    quota::report_context(process, gpu);
    result
}

/// A `cuCtxCreate` of any version.
fn create_own(device: CUdevice, pctx: *mut CUcontext, call: impl Fn() -> CUresult) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    match state::standing() {
        Standing::Pass => call(),
        Standing::Closed => CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(_) if pctx.is_null() => call(),
        Standing::Armed(process) => {
            // SAFETY: the driver wrote the handle when it succeeded.
            create("cuCtxCreate", device, None, process, call, || unsafe { *pctx })
        }
    }
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxCreate(
    real: &Real<unsafe extern "C" fn(*mut CUcontext, c_uint, CUdevice) -> CUresult>,
    pctx: *mut CUcontext,
    flags: c_uint,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    create_own(dev, pctx, || unsafe { real(pctx, flags, dev) })
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxCreate_v3(
    real: &Real<
        unsafe extern "C" fn(
            *mut CUcontext,
            *mut CUexecAffinityParam,
            c_int,
            c_uint,
            CUdevice,
        ) -> CUresult,
    >,
    pctx: *mut CUcontext,
    params: *mut CUexecAffinityParam,
    num_params: c_int,
    flags: c_uint,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    create_own(dev, pctx, || unsafe { real(pctx, params, num_params, flags, dev) })
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxCreate_v4(
    real: &Real<
        unsafe extern "C" fn(*mut CUcontext, *mut CUctxCreateParams, c_uint, CUdevice) -> CUresult,
    >,
    pctx: *mut CUcontext,
    params: *mut CUctxCreateParams,
    flags: c_uint,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    create_own(dev, pctx, || unsafe { real(pctx, params, flags, dev) })
}

/// Destroys `ctx` with `call`. Its entry goes first, because the driver may reuse the handle.
fn destroy(process: &'static Process, ctx: CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    let mut going = streams::context_going(ctx);
    let leaving = process.contexts.leaving(ctx.addr());
    let result = call();
    if let Some(going) = &mut going {
        going.is_gone(result == CUDA_SUCCESS);
    }
    let Some(leaving) = leaving else { return result };
    if result == CUDA_SUCCESS {
        give_back(process, &leaving.context);
    } else {
        process.contexts.restore(leaving);
    }
    result
}

/// Everything that goes with a context.
pub(crate) fn give_back(process: &'static Process, context: &Context) {
    // What is obtained in a view is the primary context's.
    if context.is_view {
        return;
    }
    while process.contexts.take_view(context.place.serial) {}
    give_back_allocations(process, context.place.serial);
    let Some(gpu) = context.place.gpu else { return };
    let overhead = context.overhead_bytes.saturating_add(context.local.charged());
    quota::release(process, gpu, overhead, Kind::Overhead);
    process.pools.context_ended(process, gpu, !process.contexts.any_on(gpu));
}

fn give_back_allocations(process: &'static Process, serial: u32) {
    process.shares.context_ended(process, serial);
    process.allocations.drain(
        |allocation| allocation.context == serial && allocation.kind != Kind::Async,
        |allocation| quota::give_back(process, allocation),
    );
    process.arrays.context_ended(process, serial);
    process.vmm.context_ended(process, serial);
    process.shares.look_again(process);
}

/// CUDA Driver API, "Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxDestroy(
    real: &Real<unsafe extern "C" fn(CUcontext) -> CUresult>,
    ctx: CUcontext,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(ctx) };
    let Some(_depth) = Depth::enter() else { return call() };
    match state::armed() {
        Some(process) => destroy(process, ctx, call),
        None => call(),
    }
}

/// CUDA Driver API, "Context Management (deprecated)": one more user of the current context.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxAttach(
    real: &Real<unsafe extern "C" fn(*mut CUcontext, c_uint) -> CUresult>,
    pctx: *mut CUcontext,
    flags: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pctx, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let result = call();
    if result == CUDA_SUCCESS
        && !pctx.is_null()
        && let Some(process) = state::armed()
    {
        // SAFETY: the driver wrote the handle.
        process.contexts.adjust_users(unsafe { *pctx }.addr(), 1);
    }
    result
}

/// CUDA Driver API, "Context Management (deprecated)": the last user's detach destroys.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuCtxDetach(
    real: &Real<unsafe extern "C" fn(CUcontext) -> CUresult>,
    ctx: CUcontext,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(ctx) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    if process.contexts.adjust_users(ctx.addr(), -1) == Some(0) {
        let result = destroy(process, ctx, call);
        if result != CUDA_SUCCESS {
            process.contexts.adjust_users(ctx.addr(), 1);
        }
        return result;
    }
    let result = call();
    if result != CUDA_SUCCESS {
        process.contexts.adjust_users(ctx.addr(), 1);
    }
    result
}

/// CUDA Driver API, "Primary Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDevicePrimaryCtxRetain(
    real: &Real<unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult>,
    pctx: *mut CUcontext,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pctx, dev) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    if pctx.is_null() {
        return call();
    }
    // Two threads' first retains make one context, to be charged once.
    let _one_at_a_time = process.primaries[primary_lock(dev)].lock();
    if process.contexts.primary(dev).is_some() {
        return call();
    }
    // SAFETY: the driver wrote the handle when it succeeded.
    create("cuDevicePrimaryCtxRetain", dev, Some(dev), process, call, || unsafe { *pctx })
}

/// Tells the gate that a device's primary context may end.
fn primary_going(process: &Process, dev: CUdevice) -> Option<streams::Going> {
    let context = process.contexts.primary(dev)?;
    streams::context_going(core::ptr::with_exposed_provenance_mut(context.handle))
}

/// CUDA Driver API, "Primary Context Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDevicePrimaryCtxRelease(
    real: &Real<unsafe extern "C" fn(CUdevice) -> CUresult>,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(dev) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let _one_at_a_time = process.primaries[primary_lock(dev)].lock();
    let mut going = primary_going(process, dev);
    let result = call();
    let is_gone = result == CUDA_SUCCESS && !primary_is_active(dev);
    if let Some(going) = &mut going {
        going.is_gone(is_gone);
    }
    if is_gone && let Some(context) = process.contexts.take_primary(dev) {
        give_back(process, &context);
    }
    result
}

/// CUDA Driver API, "Green Contexts": retains the primary context, which it may make.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGreenCtxCreate(
    real: &Real<
        unsafe extern "C" fn(*mut CUgreenCtx, CUdevResourceDesc, CUdevice, c_uint) -> CUresult,
    >,
    pctx: *mut CUgreenCtx,
    desc: CUdevResourceDesc,
    dev: CUdevice,
    flags: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pctx, desc, dev, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    let _one_at_a_time = process.primaries[primary_lock(dev)].lock();
    if process.contexts.primary(dev).is_some() {
        return call();
    }
    let handle = || primary(dev).unwrap_or(core::ptr::null_mut());
    create("cuGreenCtxCreate", dev, Some(dev), process, call, handle)
}

/// CUDA Driver API, "Green Contexts": releases the primary context, which may end with it.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGreenCtxDestroy(
    real: &Real<unsafe extern "C" fn(CUgreenCtx) -> CUresult>,
    ctx: CUgreenCtx,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(ctx) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let mut view: CUcontext = core::ptr::null_mut();
    // SAFETY: the caller's own green context, and a place for its handle.
    let known = real::cuCtxFromGreenCtx
        .get()
        .is_some_and(|ask| unsafe { ask(&raw mut view, ctx) } == CUDA_SUCCESS);
    let Some(dev) = known.then(|| device_of(view)).flatten() else { return call() };
    let _one_at_a_time = process.primaries[primary_lock(dev)].lock();
    let mut going = [streams::context_going(view), primary_going(process, dev)];
    let leaving = process.contexts.leaving(view.addr());
    let result = call();
    let is_gone = [result == CUDA_SUCCESS, result == CUDA_SUCCESS && !primary_is_active(dev)];
    for (going, is_gone) in going.iter_mut().zip(is_gone) {
        if let Some(going) = going {
            going.is_gone(is_gone);
        }
    }
    if result != CUDA_SUCCESS
        && let Some(leaving) = leaving
    {
        process.contexts.restore(leaving);
    }
    if is_gone[1]
        && let Some(context) = process.contexts.take_primary(dev)
    {
        give_back(process, &context);
    }
    result
}

/// CUDA Driver API, "Primary Context Management": everything in the primary context goes, however
/// often it is retained.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDevicePrimaryCtxReset(
    real: &Real<unsafe extern "C" fn(CUdevice) -> CUresult>,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(dev) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let _one_at_a_time = process.primaries[primary_lock(dev)].lock();
    let mut going = primary_going(process, dev);
    let result = call();
    if let Some(going) = &mut going {
        going.is_gone(result == CUDA_SUCCESS);
    }
    if result == CUDA_SUCCESS
        && let Some(context) = process.contexts.primary(dev)
    {
        if primary_is_active(dev) {
            give_back_allocations(process, context.place.serial);
            if let Some(gpu) = context.place.gpu {
                process.pools.context_ended(process, gpu, false);
            }
        } else if let Some(context) = process.contexts.take_primary(dev) {
            give_back(process, &context);
        }
    }
    result
}
