//! Where an allocation of the calling thread would go: which context owns it, on which GPU.

use crate::context::{primary_lock, remember};
use crate::contexts::{Context, Place};
use crate::gate::Stream;
use crate::own;
use crate::quota::{self, Asked};
use crate::real;
use crate::state::Process;
use crate::thread::CachedPlace;
use core::ptr;
use tessera_cuda::types::*;
use tessera_region::account::Refused;
use tessera_region::layout::Kind;

/// What a look for the current context found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// There it goes.
    At(Place),
    /// No context, or the driver does not tell: the driver's own call will say what is wrong.
    Nowhere,
    /// The context was made behind our back, and its overhead does not fit the quota.
    Refused(Refused),
    /// The context was made behind our back, on this GPU of the page, and the kernel has no memory to
    /// note it: nothing may be granted there.
    Unnoted(Option<u8>),
}

impl Look {
    /// The place for `name`, which is refused where the context cannot be; `None` where the driver's own
    /// call is to say what is wrong.
    pub(crate) fn or_refuse(
        self,
        process: &'static Process,
        name: &str,
    ) -> Result<Option<Place>, CUresult> {
        match self {
            Self::At(place) => Ok(Some(place)),
            Self::Nowhere => Ok(None),
            Self::Refused(refused) => Err(quota::refuse(process, name, Asked::Context, &refused)),
            Self::Unnoted(_) => Err(quota::refuse_unnoted(name)),
        }
    }

    /// The context's serial, 0 where there is none.
    pub(crate) fn serial(self) -> u32 {
        match self {
            Self::At(place) => place.serial,
            _ => 0,
        }
    }
}

#[inline]
pub(crate) fn current(process: &'static Process) -> Look {
    match current_context() {
        Some(context) => of_context(process, context, true),
        None => Look::Nowhere,
    }
}

/// The place of a stream: its own context's where it names one, else the current one's.
pub(crate) fn of_stream(process: &'static Process, stream: Stream) -> Look {
    match context_of(stream) {
        Some(context) => of_context(process, context, false),
        None => current(process),
    }
}

#[inline]
fn of_context(process: &'static Process, context: CUcontext, is_current: bool) -> Look {
    let handle = context.addr();
    let owner = ptr::from_ref(process).addr();
    let epoch = process.contexts.epoch();
    let cache = &own::thread().place;
    let cached = cache.get();
    if cached.handle == handle && cached.epoch == epoch && cached.owner == owner {
        return Look::At(cached.place);
    }
    let place = match process.contexts.find(handle) {
        Some(place) => place,
        None if is_current => match adopt(process, context) {
            Look::At(place) => place,
            other => return other,
        },
        None => return current(process),
    };
    cache.set(CachedPlace { owner, epoch, handle, place });
    Look::At(place)
}

/// Charges the current context, which no hook saw being made: through `cuGetExportTable` or graphics
/// interoperation. A green context's is noted at the place of the primary context, which is charged.
#[cold]
fn adopt(process: &'static Process, context: CUcontext) -> Look {
    let Some(device) = current_device() else { return Look::Nowhere };
    let Some(gpu) = process.listed(device) else {
        // There is a context, but on a GPU that is unknown: as if the page did not name it.
        return Look::At(Place { serial: 0, gpu: None });
    };
    let _one_at_a_time = primary_lock(process, device);
    if let Some(place) = process.contexts.find(context.addr()) {
        return Look::At(place);
    }
    if !is_view() {
        return note(process, context, device, gpu);
    }
    let Some(base) = primary(device) else { return Look::Nowhere };
    let place = match process.contexts.find(base.addr()) {
        Some(place) => place,
        None => match note(process, base, device, gpu) {
            Look::At(place) => place,
            other => return other,
        },
    };
    let Some(promise) = process.contexts.promise() else { return Look::Unnoted(gpu) };
    let view = Context { is_view: true, ..Context::new(context.addr(), place) };
    remember(process, promise, view);
    Look::At(place)
}

/// Whether the current context is a green context's: so its default stream's is.
fn is_view() -> bool {
    // SAFETY: the default stream of the current context, and a valid place for a handle.
    let green = real::cuStreamGetGreenCtx
        .ask(ptr::null_mut(), |ask, green| unsafe { ask(ptr::null_mut(), green) });
    green.is_ok_and(|green| !green.is_null())
}

/// Charges a context of a listed device, and remembers it.
fn note(process: &'static Process, context: CUcontext, device: CUdevice, gpu: Option<u8>) -> Look {
    let Some(promise) = process.contexts.promise() else { return Look::Unnoted(gpu) };
    let mut noted = Context::new(context.addr(), Place { serial: 0, gpu });
    noted.primary_of = (primary(device) == Some(context)).then_some(device);
    if let Some(gpu) = gpu {
        noted.overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
        match quota::reserve(process, gpu, noted.overhead_bytes) {
            // What was reserved, which never fails.
            Ok(overhead) => _ = overhead.commit(noted.overhead_bytes, Kind::Overhead),
            Err(refused) => return Look::Refused(refused),
        }
    }
    Look::At(remember(process, promise, noted).place)
}

/// The primary context's handle while it is active, which only a retain tells; an active one's retain
/// and release change nothing.
pub(crate) fn primary(device: CUdevice) -> Option<CUcontext> {
    let release = real::cuDevicePrimaryCtxRelease_v2
        .get()
        .or_else(|| real::cuDevicePrimaryCtxRelease.get())?;
    if !primary_is_active(device) {
        return None;
    }
    // SAFETY: a valid place for a handle.
    let primary = real::cuDevicePrimaryCtxRetain
        .ask(ptr::null_mut(), |retain, primary| unsafe { retain(primary, device) })
        .ok()?;
    // SAFETY: it was retained.
    unsafe { release(device) };
    Some(primary)
}

pub(crate) fn primary_is_active(device: CUdevice) -> bool {
    let mut flags = 0;
    // SAFETY: valid places for both answers.
    let active = real::cuDevicePrimaryCtxGetState
        .ask(0, |ask, active| unsafe { ask(device, &raw mut flags, active) });
    active.is_ok_and(|active| active != 0)
}

#[inline]
pub(crate) fn current_context() -> Option<CUcontext> {
    // SAFETY: a valid place for a handle.
    let context =
        real::cuCtxGetCurrent.ask(ptr::null_mut(), |ask, context| unsafe { ask(context) });
    context.ok().filter(|context| !context.is_null())
}

/// The context of a stream that is not a default one, which is the current one's.
pub(crate) fn context_of(stream: Stream) -> Option<CUcontext> {
    if stream.is_default() {
        return None;
    }
    // SAFETY: the caller's stream, and a valid place for a handle. Allowed while capturing.
    let context = real::cuStreamGetCtx
        .ask(ptr::null_mut(), |ask, context| unsafe { ask(stream.handle(), context) });
    context.ok().filter(|context| !context.is_null())
}

pub(crate) fn current_device() -> Option<CUdevice> {
    // SAFETY: a valid place for a device.
    real::cuCtxGetDevice.ask(0, |ask, device| unsafe { ask(device) }).ok()
}

pub(crate) fn device_of(context: CUcontext) -> Option<CUdevice> {
    let pushed = Pushed::new(context);
    if pushed.0 { current_device() } else { None }
}

/// While it lives, a context is current; the one before stays if it is null.
pub(crate) struct Pushed(bool);

impl Pushed {
    pub(crate) fn new(context: CUcontext) -> Self {
        let push = real::cuCtxPushCurrent_v2.get().filter(|_| !context.is_null());
        // SAFETY: a context that the driver or the application has named.
        Self(push.is_some_and(|push| unsafe { push(context) } == CUDA_SUCCESS))
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        if self.0 {
            // SAFETY: what was pushed, and a valid place for a handle.
            let _ = real::cuCtxPopCurrent_v2.ask(ptr::null_mut(), |pop, top| unsafe { pop(top) });
        }
    }
}
