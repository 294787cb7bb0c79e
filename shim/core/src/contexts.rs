//! The contexts this process has, and on which GPU each is.
//!
//! A context costs device memory that no hook sees, so each live one is charged the quota page's
//! overhead. Allocations carry their context's *serial*, never its handle: the driver reuses handles
//! as soon as a context is destroyed.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::gate::streams::{Going, context_going};
use crate::limits::{Frames, Local};
use crate::pages::{Full, List, Zeroed};
use crate::place::{device_of, primary, primary_is_active};
use crate::quota::{self, Asked};
use crate::real;
use crate::spin::{Held, Spin};
use crate::state::{self, PRIMARIES, Process, Standing};
use crate::thread::{Answer, Call, Depth, entered, tenant};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// Where an allocation goes: the context that will own it and its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The context's serial; 0 is no context.
    pub serial: u32,
    /// Index in the quota page; `None` where the page does not name the GPU.
    pub gpu: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub handle: usize,
    /// Bytes charged for its existence.
    pub overhead_bytes: u64,
    /// Owner and GPU of what is allocated in it.
    pub place: Place,
    pub local: Local,
    /// `cuCtxCreate` and `cuCtxAttach` less `cuCtxDetach`.
    pub users: u32,
    /// The device whose primary context it is.
    pub primary_of: Option<i32>,
    /// It is a green context's: another handle of the primary context, at whose place it is.
    pub is_view: bool,
}

impl Context {
    /// One that is charged nothing.
    pub fn new(handle: usize, place: Place) -> Self {
        Self {
            handle,
            overhead_bytes: 0,
            place,
            local: Local::default(),
            users: 1,
            primary_of: None,
            is_view: false,
        }
    }
}

// SAFETY: plain data, for which all-zero bytes are a value (`Option`s of integers carry a tag of their own).
unsafe impl Zeroed for Context {}

#[derive(Debug)]
pub struct Contexts {
    list: Spin<List<Context>>,
    last_serial: AtomicU32,
    /// Moves on when a context goes or changes, so that threads' cached places become void.
    epoch: AtomicU64,
    /// Handles of kernels with large frames; written under `list`.
    pub(crate) frames: Frames,
}

impl Default for Contexts {
    fn default() -> Self {
        Self {
            list: Spin::default(),
            last_serial: AtomicU32::new(0),
            epoch: AtomicU64::new(1),
            frames: Frames::new(),
        }
    }
}

impl Contexts {
    /// The current epoch; see [`Contexts::find`].
    #[inline]
    pub fn epoch(&self) -> u64 {
        // Acquire: pairs with the Release in `changed`.
        self.epoch.load(Ordering::Acquire)
    }

    /// Where `handle` is. The answer may be kept while the epoch stays.
    pub fn find(&self, handle: usize) -> Option<Place> {
        let list = self.list.lock();
        list.iter().find(|context| context.handle == handle).map(|context| context.place)
    }

    pub fn primary(&self, device: i32) -> Option<Context> {
        self.list.lock().iter().copied().find(|context| context.primary_of == Some(device))
    }

    /// Makes room for a context that is about to be made, without which it must not be: nobody could say
    /// later whose its memory is.
    ///
    /// # Errors
    /// [`Full`] when the kernel has no memory for the table.
    pub fn make_room(&self) -> Result<(), Full> {
        self.list.lock().make_room()
    }

    /// Remembers a context that the driver has just made, and gives it a serial, unless it is a view.
    /// `stale` gets what had its handle before: a context that ended without our seeing it.
    pub fn insert(&self, mut context: Context, stale: impl FnOnce(Context)) -> Context {
        if let Some(before) = self.take_if(|known| known.handle == context.handle) {
            stale(before);
        }
        if !context.is_view {
            let last = self.last_serial.fetch_add(1, Ordering::Relaxed);
            context.place.serial = last.wrapping_add(1).max(1);
        }
        self.keep(context);
        context
    }

    /// Forgets `handle`, before the driver destroys it.
    pub fn leaving(&self, handle: usize) -> Option<Context> {
        self.take_if(|context| context.handle == handle)
    }

    /// Remembers a context as it is. Where others have taken its room and the kernel has no memory for more, it
    /// stays charged, and is charged once more when it is used, which is the safe side.
    pub fn keep(&self, context: Context) {
        let _ = self.list.lock().push(context);
        self.changed();
    }

    pub fn take_primary(&self, device: i32) -> Option<Context> {
        self.take_if(|context| context.primary_of == Some(device))
    }

    /// Forgets a view of the context with this serial; whether there was one.
    pub fn take_view(&self, serial: u32) -> bool {
        self.take_if(|context| context.is_view && context.place.serial == serial).is_some()
    }

    /// Adds to a context's users; returns how many there are now. A primary context has none: the driver counts its retains, and
    /// no document says that detaching ends it.
    pub fn adjust_users(&self, handle: usize, by: i32) -> Option<u32> {
        let mut list = self.list.lock();
        let context = list.iter_mut().find(|c| c.handle == handle && c.primary_of.is_none())?;
        context.users = context.users.saturating_add_signed(by);
        Some(context.users)
    }

    /// What the limits of `handle` take, to be changed; nothing where it is gone.
    pub(crate) fn local<R: Default>(
        &self,
        handle: usize,
        change: impl FnOnce(&mut Local) -> R,
    ) -> R {
        let mut list = self.list.lock();
        let Some(&found) = list.iter().find(|c| c.handle == handle) else { return R::default() };
        // A view's are those of the context that it is a view of.
        let wanted = |c: &&mut Context| match found.is_view {
            true => !c.is_view && c.place.serial == found.place.serial,
            false => c.handle == handle,
        };
        let base = list.iter_mut().find(wanted);
        let answer = base.map_or_else(R::default, |context| change(&mut context.local));
        self.frames.recount(lowest_frame(&list));
        answer
    }

    /// Remembers that a kernel's frame is to be charged at its launch, if it is not yet everywhere. False
    /// where there is no place for it.
    pub(crate) fn remember_frame(&self, handle: usize, frame: u32, is_of_every: bool) -> bool {
        let list = self.list.lock();
        self.frames.remember(handle, frame, is_of_every, lowest_frame(&list))
    }

    /// The frame of `handle` is charged, or it is another function's now.
    pub(crate) fn forget_frame(&self, handle: usize, if_of_every: bool) {
        let list = self.list.lock();
        self.frames.forget(handle, if_of_every, lowest_frame(&list));
    }

    pub(crate) fn each(&self, mut see: impl FnMut(usize)) {
        self.list.lock().iter().for_each(|context| see(context.handle));
    }

    /// Whether any context is left on the page's GPU `gpu`.
    pub fn any_on(&self, gpu: u8) -> bool {
        self.list.lock().iter().any(|c| !c.is_view && c.place.gpu == Some(gpu))
    }

    fn take_if(&self, wanted: impl FnMut(&Context) -> bool) -> Option<Context> {
        let context = self.list.lock().take(wanted)?;
        self.changed();
        Some(context)
    }

    fn changed(&self) {
        self.frames.recount(lowest_frame(&self.list.lock()));
        // Release: pairs with the Acquire in `epoch`.
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

/// The frame that every context is charged; 0 where there is none.
fn lowest_frame(contexts: &[Context]) -> u32 {
    let bases = contexts.iter().filter(|c| !c.is_view && c.place.gpu.is_some());
    bases.map(|c| c.local.frame).min().unwrap_or(0)
}

// Contexts: each live one is charged the overhead that the quota page names, and its end gives back
// everything that was allocated in it (CUDA Driver API, `cuCtxDestroy` and
// `cuDevicePrimaryCtxReset`: arrays and what is allocated by `cuMemAlloc`, `cuMemAllocPitch` and
// `cuMemAllocManaged` go with the context; pool memory and that of `cuMemCreate` do not).
//
// A primary context is created by the first retain and destroyed by the last release. Others may
// retain it where no hook sees it, so the driver is asked what became of it, not a count of ours.

/// CUDA Driver API, "Initialization": where absence closes, and where the plugin first hears of the process.
pub unsafe fn cuInit(call: Call<'_>) -> Answer {
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
    process.contexts.make_room().map_err(|_full| quota::refuse_unnoted(name))?;
    let overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
    let reservation = quota::reserve_for(process, gpu, overhead_bytes, name, Asked::Context)?;
    quota::insist(process, gpu, overhead_bytes, call)?; // the reservation rolls back
    // What was reserved, which never fails.
    let _fits = reservation.commit(overhead_bytes, Kind::Overhead);
    let context = Context::new(handle().addr(), Place { serial: 0, gpu: Some(gpu) });
    remember(process, Context { overhead_bytes, primary_of, ..context });
    Ok(())
}

/// Remembers a context that is charged, and tells the plugin of it.
pub(crate) fn remember(process: &'static Process, context: Context) -> Context {
    let made = process.contexts.insert(context, |stale| give_back(process, &stale));
    if let Some(gpu) = context.place.gpu.filter(|_| !context.is_view) {
        quota::report_context(process, gpu);
    }
    made
}

/// CUDA Driver API, "Context Management", of any version.
pub unsafe fn cuCtxCreate(call: Call<'_>, pctx: *mut CUcontext, dev: CUdevice) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    if pctx.is_null() {
        return call();
    }
    // SAFETY: the driver wrote the handle when it succeeded.
    create("cuCtxCreate", dev, None, process, call, || unsafe { *pctx })
}

pub use cuCtxCreate as cuCtxCreate_v3;
pub use cuCtxCreate as cuCtxCreate_v4;

/// Destroys `ctx` with `call`. Its entry goes first, because the driver may reuse the handle.
fn destroy(process: &'static Process, ctx: CUcontext, call: Call<'_>) -> Answer {
    let mut going = context_going(ctx);
    let leaving = process.contexts.leaving(ctx.addr());
    let answer = call();
    going.iter_mut().for_each(|going| going.is_gone(answer.is_ok()));
    if let Some(context) = leaving {
        match answer {
            Ok(()) => give_back(process, &context),
            Err(_) => process.contexts.keep(context),
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
    process.vmm.context_ended(process, serial);
    process.shares.look_again(process);
}

pub unsafe fn cuCtxDestroy(call: Call<'_>, ctx: CUcontext) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    destroy(process, ctx, call)
}

/// CUDA Driver API, "Context Management (deprecated)": one more user of the current context.
pub unsafe fn cuCtxAttach(call: Call<'_>, pctx: *mut CUcontext) -> Answer {
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
pub unsafe fn cuGreenCtxCreate(call: Call<'_>, dev: CUdevice) -> Answer {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn context(handle: usize, gpu: u8) -> Context {
        Context::new(handle, Place { serial: 0, gpu: Some(gpu) })
    }

    fn made(contexts: &Contexts, context: Context) -> Context {
        contexts.insert(context, |stale| panic!("{stale:?} was known"))
    }

    #[test]
    fn a_handle_made_again_gets_a_new_serial_and_hands_back_a_context_that_is_still_known() {
        let contexts = Contexts::default();
        let first = made(&contexts, context(0x10, 0));
        assert_eq!(contexts.leaving(0x10), Some(first));
        assert_eq!(contexts.find(0x10), None);
        let second = made(&contexts, context(0x10, 0));
        assert_ne!(first.place.serial, second.place.serial);
        let mut stale = None;
        let third = contexts.insert(context(0x10, 0), |context| stale = Some(context));
        assert_eq!((stale, contexts.find(0x10)), (Some(second), Some(third.place)));
    }

    #[test]
    fn the_epoch_moves_when_a_context_goes() {
        let contexts = Contexts::default();
        made(&contexts, Context { primary_of: Some(0), ..context(0x10, 0) });
        let before = contexts.epoch();
        assert!(contexts.take_primary(0).is_some());
        assert_ne!(contexts.epoch(), before);
        assert!(contexts.take_primary(0).is_none());
    }

    #[test]
    fn a_failed_destroy_keeps_the_context() {
        let contexts = Contexts::default();
        let made = made(&contexts, context(0x10, 2));
        let context = contexts.leaving(0x10).expect("known");
        assert!(!contexts.any_on(2));
        contexts.keep(context);
        assert_eq!(contexts.find(0x10), Some(made.place));
        assert!(contexts.any_on(2));
    }

    #[test]
    fn users_are_counted() {
        let contexts = Contexts::default();
        made(&contexts, context(0x10, 0));
        assert_eq!(contexts.adjust_users(0x10, 1), Some(2));
        assert_eq!(contexts.adjust_users(0x10, -1), Some(1));
        assert_eq!(contexts.adjust_users(0x20, 1), None);
    }
}
