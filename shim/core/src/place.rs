//! Where an allocation of the calling thread would go: which context owns it, on which GPU.

use crate::context::give_back;
use crate::contexts::{Context, Place};
use crate::limits::Local;
use crate::own;
use crate::quota;
use crate::real;
use crate::state::{PRIMARIES, Process};
use crate::thread::CachedPlace;
use core::ffi::c_int;
use core::ptr;
use tessera_cuda::types::{CUDA_SUCCESS, CUcontext, CUdevice, CUgreenCtx, CUstream};
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

/// The place of the current context.
#[inline]
pub(crate) fn current(process: &'static Process) -> Look {
    let Some(ask) = real::cuCtxGetCurrent.get() else { return Look::Nowhere };
    let mut context: CUcontext = ptr::null_mut();
    // SAFETY: a valid place for a handle.
    if unsafe { ask(&raw mut context) } != CUDA_SUCCESS || context.is_null() {
        return Look::Nowhere;
    }
    of_context(process, context, true)
}

/// The place of a stream: its own context's where it names one, else the current one's.
pub(crate) fn of_stream(process: &'static Process, stream: CUstream) -> Look {
    // 0, 1 and 2 stand for default streams of the current context (CU_STREAM_LEGACY, _PER_THREAD).
    if stream.addr() > 2
        && let Some(ask) = real::cuStreamGetCtx.get()
    {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the caller's stream, and a valid place for a handle. Allowed while capturing.
        if unsafe { ask(stream, &raw mut context) } == CUDA_SUCCESS && !context.is_null() {
            return of_context(process, context, false);
        }
    }
    current(process)
}

#[inline]
fn of_context(process: &'static Process, context: CUcontext, is_current: bool) -> Look {
    let handle = context.addr();
    let owner = ptr::from_ref(process).addr();
    let epoch = process.contexts.epoch();
    let cache = &own::thread().place;
    let cached = cache.get();
    if cached.handle == handle && cached.epoch == epoch && cached.owner == owner {
        return Look::At(cached.place());
    }
    let place = match process.contexts.find(handle) {
        Some(place) => place,
        None if is_current => match adopt(process, context) {
            Look::At(place) => place,
            other => return other,
        },
        None => return current(process),
    };
    let Place { serial, gpu } = place;
    let gpu = gpu.map_or(0, |gpu| u32::from(gpu) + 1);
    cache.set(CachedPlace { owner, epoch, handle, serial, gpu });
    Look::At(place)
}

/// Charges the current context, which no hook saw being made: through `cuGetExportTable` or graphics
/// interoperation. A green context's is noted at the place of the primary context, which is charged.
#[cold]
fn adopt(process: &'static Process, context: CUcontext) -> Look {
    let Some(ask) = real::cuCtxGetDevice.get() else { return Look::Nowhere };
    let mut device: CUdevice = 0;
    // SAFETY: a valid place for a device.
    if unsafe { ask(&raw mut device) } != CUDA_SUCCESS {
        return Look::Nowhere;
    }
    let Some(gpu) = process.listed(device) else {
        // There is a context, but on a GPU that is unknown: as if the page did not name it.
        return Look::At(Place { serial: 0, gpu: None });
    };
    let _one_at_a_time = process.primaries[primary_lock(device)].lock();
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
    let view = Context {
        handle: context.addr(),
        overhead_bytes: 0,
        place,
        local: Local::default(),
        users: 1,
        primary_of: None,
        is_view: true,
    };
    process.contexts.insert(promise, view, |stale| give_back(process, &stale));
    Look::At(place)
}

/// Whether the current context is a green context's: so its default stream's is.
fn is_view() -> bool {
    let Some(ask) = real::cuStreamGetGreenCtx.get() else { return false };
    let mut green: CUgreenCtx = ptr::null_mut();
    // SAFETY: the default stream of the current context, and a valid place for a handle.
    (unsafe { ask(ptr::null_mut(), &raw mut green) }) == CUDA_SUCCESS && !green.is_null()
}

/// Charges a context of a listed device, and remembers it.
fn note(process: &'static Process, context: CUcontext, device: CUdevice, gpu: Option<u8>) -> Look {
    let Some(promise) = process.contexts.promise() else { return Look::Unnoted(gpu) };
    let mut overhead_bytes = 0;
    if let Some(gpu) = gpu {
        overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
        let charged = quota::reserve(process, gpu, overhead_bytes)
            .and_then(|overhead| Ok(overhead.commit(overhead_bytes, Kind::Overhead)?));
        if let Err(refused) = charged {
            return Look::Refused(refused);
        }
    }
    let context = Context {
        handle: context.addr(),
        overhead_bytes,
        place: Place { serial: 0, gpu },
        local: Local::default(),
        users: 1,
        primary_of: (primary(device) == Some(context)).then_some(device),
        is_view: false,
    };
    if let Some(gpu) = gpu {
        quota::report_context(process, gpu);
    }
    let made = process.contexts.insert(promise, context, |stale| give_back(process, &stale));
    Look::At(made.place)
}

/// Which of [`Process::primaries`] serialises `device`.
pub(crate) fn primary_lock(device: CUdevice) -> usize {
    usize::try_from(device).unwrap_or(0) % PRIMARIES
}

/// Whether `device` has a live primary context.
pub(crate) fn primary_is_active(device: CUdevice) -> bool {
    let Some(ask) = real::cuDevicePrimaryCtxGetState.get() else { return false };
    let (mut flags, mut active) = (0, 0 as c_int);
    // SAFETY: valid places for both answers.
    (unsafe { ask(device, &raw mut flags, &raw mut active) }) == CUDA_SUCCESS && active != 0
}

/// The primary context's handle while it is active, which only a retain tells; an active one's retain
/// and release change nothing.
pub(crate) fn primary(device: CUdevice) -> Option<CUcontext> {
    let release =
        real::cuDevicePrimaryCtxRelease_v2.get().or_else(|| real::cuDevicePrimaryCtxRelease.get());
    let (retain, release) = (real::cuDevicePrimaryCtxRetain.get()?, release?);
    if !primary_is_active(device) {
        return None;
    }
    let mut primary: CUcontext = ptr::null_mut();
    // SAFETY: a valid place for a handle; what was retained is released.
    unsafe {
        if retain(&raw mut primary, device) != CUDA_SUCCESS {
            return None;
        }
        release(device);
    }
    Some(primary)
}

/// The device of a context.
pub(crate) fn device_of(context: CUcontext) -> Option<CUdevice> {
    let (push, pop) = (real::cuCtxPushCurrent_v2.get()?, real::cuCtxPopCurrent_v2.get()?);
    let ask = real::cuCtxGetDevice.get()?;
    let (mut device, mut popped): (CUdevice, CUcontext) = (0, ptr::null_mut());
    // SAFETY: a context of the application's, current for as long as it is asked, and valid places.
    unsafe {
        if push(context) != CUDA_SUCCESS {
            return None;
        }
        let result = ask(&raw mut device);
        pop(&raw mut popped);
        (result == CUDA_SUCCESS).then_some(device)
    }
}
