//! Contexts: each live one is charged the overhead that the quota page names, and its end gives back
//! everything that was allocated in it (CUDA Driver API, `cuCtxDestroy` and
//! `cuDevicePrimaryCtxReset`: arrays and what is allocated by `cuMemAlloc`, `cuMemAllocPitch` and
//! `cuMemAllocManaged` go with the context; pool memory and that of `cuMemCreate` do not).
//!
//! A primary context is created by the first retain and destroyed by the last release. Others may
//! retain it where no hook sees it, so the driver is asked what became of it, not a count of ours.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::contexts::{Context, Place, Promise};
use crate::gate::streams::{Going, context_going};
use crate::place::{device_of, primary, primary_is_active};
use crate::quota::{self, Asked};
use crate::real;
use crate::spin::Held;
use crate::state::{self, PRIMARIES, Process, Standing};
use crate::thread::{Answer, Call, Depth, entered, tenant};
use core::ffi::{c_int, c_uint};
use core::ptr;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// CUDA Driver API, "Initialization": where absence closes, and where the plugin first hears of the process.
pub unsafe fn cuInit(call: Call<'_>, _: c_uint) -> Answer {
    let depth = Depth::enter();
    if depth.is_some() && matches!(state::standing_at_init(), Standing::Closed) {
        return Err(CUDA_ERROR_SYSTEM_NOT_READY);
    }
    call()
}

/// Makes a context with `call`, charged for `device`. `handle` reads what the driver made.
fn create(
    name: &'static str,
    device: CUdevice,
    primary_of: Option<CUdevice>,
    process: &'static Process,
    call: Call<'_>,
    handle: impl FnOnce() -> CUcontext,
) -> Answer {
    // A device that the driver does not know, or a driver not initialised: its own error.
    let Some(listed) = process.listed(device) else { return call() };
    let gpu = listed.ok_or_else(|| quota::refuse_unlisted(process, name, Asked::Context))?;
    let promise = process.contexts.promise().ok_or_else(|| quota::refuse_unnoted(name))?;
    let overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
    let reservation = quota::reserve_for(process, gpu, overhead_bytes, name, Asked::Context)?;
    quota::insist(process, gpu, overhead_bytes, call)?; // the reservation rolls back
    // What was reserved, which never fails.
    let _fits = reservation.commit(overhead_bytes, Kind::Overhead);
    let context = Context::new(handle().addr(), Place { serial: 0, gpu: Some(gpu) });
    remember(process, promise, Context { overhead_bytes, primary_of, ..context });
    Ok(())
}

/// Remembers a context that is charged, and tells the plugin of it.
pub(crate) fn remember(
    process: &'static Process,
    promise: Promise<'_>,
    context: Context,
) -> Context {
    let made = process.contexts.insert(promise, context, |stale| give_back(process, &stale));
    if let Some(gpu) = context.place.gpu.filter(|_| !context.is_view) {
        quota::report_context(process, gpu);
    }
    made
}

/// A `cuCtxCreate` of any version.
unsafe fn create_own(call: Call<'_>, pctx: *mut CUcontext, device: CUdevice) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    if pctx.is_null() {
        return call();
    }
    // SAFETY: the driver wrote the handle when it succeeded.
    create("cuCtxCreate", device, None, process, call, || unsafe { *pctx })
}

pub unsafe fn cuCtxCreate(
    call: Call<'_>,
    pctx: *mut CUcontext,
    _: c_uint,
    dev: CUdevice,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create_own(call, pctx, dev) }
}

/// As [`cuCtxCreate`].
pub unsafe fn cuCtxCreate_v3(
    call: Call<'_>,
    pctx: *mut CUcontext,
    _: *mut CUexecAffinityParam,
    _: c_int,
    _: c_uint,
    dev: CUdevice,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create_own(call, pctx, dev) }
}

/// As [`cuCtxCreate`].
pub unsafe fn cuCtxCreate_v4(
    call: Call<'_>,
    pctx: *mut CUcontext,
    _: *mut CUctxCreateParams,
    _: c_uint,
    dev: CUdevice,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create_own(call, pctx, dev) }
}

/// Destroys `ctx` with `call`. Its entry goes first, because the driver may reuse the handle.
fn destroy(process: &'static Process, ctx: CUcontext, call: Call<'_>) -> Answer {
    let mut going = context_going(ctx);
    let leaving = process.contexts.leaving(ctx.addr());
    let answer = call();
    going.iter_mut().for_each(|going| going.is_gone(answer.is_ok()));
    if let Some((context, place)) = leaving {
        match answer {
            Ok(()) => give_back(process, &context),
            Err(_) => place.keep(context),
        }
    }
    answer
}

/// Everything that goes with a context.
fn give_back(process: &'static Process, context: &Context) {
    // What is obtained in a view is the primary context's.
    if context.is_view {
        return;
    }
    while process.contexts.take_view(context.place.serial) {}
    give_back_allocations(process, context.place.serial);
    let Some(gpu) = context.place.gpu else { return };
    let overhead = context.overhead_bytes.saturating_add(context.local.charged);
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

pub unsafe fn cuCtxDestroy(call: Call<'_>, ctx: CUcontext) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    destroy(process, ctx, call)
}

/// CUDA Driver API, "Context Management (deprecated)": one more user of the current context.
pub unsafe fn cuCtxAttach(call: Call<'_>, pctx: *mut CUcontext, _: c_uint) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver wrote the handle.
    if let Some(context) = unsafe { pctx.as_ref() } {
        process.contexts.adjust_users(context.addr(), 1);
    }
    Ok(())
}

/// CUDA Driver API, "Context Management (deprecated)": the last user's detach destroys.
pub unsafe fn cuCtxDetach(call: Call<'_>, ctx: CUcontext) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let answer = match process.contexts.adjust_users(ctx.addr(), -1) {
        Some(0) => destroy(process, ctx, call),
        _ => call(),
    };
    if answer.is_err() {
        process.contexts.adjust_users(ctx.addr(), 1);
    }
    answer
}

/// Held over what makes or ends the primary context of `device`.
pub(crate) fn primary_lock(process: &'static Process, device: CUdevice) -> Held<'static, ()> {
    process.primaries[usize::try_from(device).unwrap_or(0) % PRIMARIES].lock()
}

/// Makes `call`, which may make the primary context of `dev`. Two threads' first retains make one context,
/// to be charged once.
fn retain(
    name: &'static str,
    process: &'static Process,
    dev: CUdevice,
    call: Call<'_>,
    handle: impl FnOnce() -> CUcontext,
) -> Answer {
    let _one_at_a_time = primary_lock(process, dev);
    match process.contexts.primary(dev) {
        Some(_) => call(),
        None => create(name, dev, Some(dev), process, call, handle),
    }
}

/// Makes `call`, which may end the primary context of `dev`.
fn release(process: &'static Process, dev: CUdevice, call: Call<'_>) -> Answer {
    let _one_at_a_time = primary_lock(process, dev);
    let mut going = primary_going(process, dev);
    let answer = call();
    let is_gone = answer.is_ok() && !primary_is_active(dev);
    going.iter_mut().for_each(|going| going.is_gone(is_gone));
    if is_gone && let Some(context) = process.contexts.take_primary(dev) {
        give_back(process, &context);
    }
    answer
}

/// Tells the gate that a device's primary context may end.
fn primary_going(process: &Process, dev: CUdevice) -> Option<Going> {
    context_going(ptr::with_exposed_provenance_mut(process.contexts.primary(dev)?.handle))
}

pub unsafe fn cuDevicePrimaryCtxRetain(
    call: Call<'_>,
    pctx: *mut CUcontext,
    dev: CUdevice,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    if pctx.is_null() {
        return call();
    }
    // SAFETY: the driver wrote the handle when it succeeded.
    retain("cuDevicePrimaryCtxRetain", process, dev, call, || unsafe { *pctx })
}

pub unsafe fn cuDevicePrimaryCtxRelease(call: Call<'_>, dev: CUdevice) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    release(process, dev, call)
}

/// CUDA Driver API, "Green Contexts": retains the primary context, which it may make.
pub unsafe fn cuGreenCtxCreate(
    call: Call<'_>,
    _: *mut CUgreenCtx,
    _: CUdevResourceDesc,
    dev: CUdevice,
    _: c_uint,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    let handle = || primary(dev).unwrap_or(ptr::null_mut());
    retain("cuGreenCtxCreate", process, dev, call, handle)
}

/// CUDA Driver API, "Green Contexts": releases the primary context, which may end with it.
pub unsafe fn cuGreenCtxDestroy(call: Call<'_>, ctx: CUgreenCtx) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    // SAFETY: the caller's own green context, and a place for its handle.
    let view =
        real::cuCtxFromGreenCtx.ask(ptr::null_mut(), |ask, view| unsafe { ask(view, ctx) }).ok();
    let Some((view, dev)) = view.and_then(|view| Some((view, device_of(view)?))) else {
        return call();
    };
    release(process, dev, &|| destroy(process, view, call))
}

/// CUDA Driver API, "Primary Context Management": everything in the primary context goes, however
/// often it is retained.
pub unsafe fn cuDevicePrimaryCtxReset(call: Call<'_>, dev: CUdevice) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let _one_at_a_time = primary_lock(process, dev);
    let mut going = primary_going(process, dev);
    let answer = call();
    going.iter_mut().for_each(|going| going.is_gone(answer.is_ok()));
    answer?;
    let Some(context) = process.contexts.primary(dev) else { return Ok(()) };
    if primary_is_active(dev) {
        give_back_allocations(process, context.place.serial);
        if let Some(gpu) = context.place.gpu {
            process.pools.context_ended(process, gpu, false);
        }
    } else if let Some(context) = process.contexts.take_primary(dev) {
        give_back(process, &context);
    }
    Ok(())
}
