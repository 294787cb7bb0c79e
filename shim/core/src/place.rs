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
use tessera_cuda::types::{CUDA_SUCCESS, CUcontext, CUdevice, CUstream};
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

/// Charges the current context, which no hook saw being made: through `cuGetExportTable`, graphics
/// interoperation or a green context.
#[cold]
fn adopt(process: &'static Process, context: CUcontext) -> Look {
    let Some(ask) = real::cuCtxGetDevice.get() else { return Look::Nowhere };
    let mut device: CUdevice = 0;
    // SAFETY: a valid place for a device.
    if unsafe { ask(&raw mut device) } != CUDA_SUCCESS {
        return Look::Nowhere;
    }
    let Some(gpu) = process.listed(device) else {
        // There is a context, but on a GPU that cannot be told: as if the page did not name it.
        return Look::At(Place { serial: 0, gpu: None });
    };
    let _one_at_a_time = process.primaries[primary_lock(device)].lock();
    if let Some(place) = process.contexts.find(context.addr()) {
        return Look::At(place);
    }
    let Some(promise) = process.contexts.promise() else { return Look::Unnoted(gpu) };
    let mut overhead_bytes = 0;
    if let Some(gpu) = gpu {
        overhead_bytes = process.account.quota().context_overhead(usize::from(gpu));
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
        primary_of: is_primary(context, device).then_some(device),
    };
    if let Some(gpu) = gpu {
        quota::tell_of_context(process, gpu);
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

/// Compares with the primary context's handle, which only a retain tells; an active one's retain and
/// release change nothing.
fn is_primary(context: CUcontext, device: CUdevice) -> bool {
    let release =
        real::cuDevicePrimaryCtxRelease_v2.get().or_else(|| real::cuDevicePrimaryCtxRelease.get());
    let (Some(retain), Some(release)) = (real::cuDevicePrimaryCtxRetain.get(), release) else {
        return false;
    };
    if !primary_is_active(device) {
        return false;
    }
    let mut primary: CUcontext = ptr::null_mut();
    // SAFETY: a valid place for a handle; what was retained is released.
    unsafe {
        if retain(&raw mut primary, device) != CUDA_SUCCESS {
            return false;
        }
        release(device);
    }
    primary == context
}
