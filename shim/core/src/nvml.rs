//! NVML's view of memory: the same quota and use as the driver API's, matched by the device's UUID.
//!
//! These hooks only look: a process that asks NVML alone (`nvidia-smi`) takes no slot and opens no
//! session. libnvidia-ml calls its own exports through the PLT, so they re-enter; the depth guard
//! lets its inner calls see the real figures.
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::driver;
use crate::nvml_mig::Parts;
use crate::quota::View;
use crate::real::{Library, Real};
use crate::state::{self, Observed};
use crate::thread::Depth;
use core::ffi::{c_uint, c_void};
use tessera_cuda::nvml::*;

/// `nvmlMemory_v2`
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

/// `NVML_ERROR_LIBRARY_NOT_FOUND`
const LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: nvmlReturn_t = 13;

pub(crate) fn missing() -> nvmlReturn_t {
    if driver::bind(Library::Nvml, driver::Wanted::IfLoaded) {
        FUNCTION_NOT_FOUND
    } else {
        LIBRARY_NOT_FOUND
    }
}

/// The tenant, and which of its GPUs `device` stands for; `None` where this is no tenant. A device of which NVML does
/// not tell what it is stands for none of them.
pub(crate) fn tenant_of(device: nvmlDevice_t) -> Option<(Observed, Parts)> {
    let observed = state::observed()?;
    Some((observed, Parts::of(device, observed.shares())))
}

/// What the tenant is shown of `device`; `None` where this is no tenant.
fn view(device: nvmlDevice_t, total: u64) -> Option<View> {
    let (observed, parts) = tenant_of(device)?;
    let parts = parts.as_slice().iter().map(|part| View::of(observed, Some(part.gpu), total));
    Some(parts.reduce(View::plus).unwrap_or_else(|| View::of(observed, None, total)))
}

/// What a tenant is answered that asks with a structure of another `version` than is known here, whose figures could not
/// be replaced: NVML's own error, and that the version is none where NVML knows it. `call` asks with a place of ours.
pub(crate) fn of_unknown_version(
    version: c_uint,
    call: impl FnOnce(*mut c_void) -> nvmlReturn_t,
) -> nvmlReturn_t {
    /// Of a version, the bytes of its structure; the rest is a number.
    const SIZE: c_uint = 0x00ff_ffff;
    let mut place = [0u64; 512];
    if (version & SIZE) as usize > size_of_val(&place) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    // The first member of every such structure.
    place[0] = u64::from(version);
    match call(place.as_mut_ptr().cast()) {
        NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE => NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        error => error,
    }
}

/// NVML API, "Device Queries".
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetMemoryInfo(
    real: &Real<unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t>,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let depth = Depth::enter();
    if depth.is_none() || memory.is_null() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, memory) };
    }
    // In a place of ours no thread of the tenant sees what NVML says.
    let mut shown = nvmlMemory_t::default();
    // SAFETY: the caller's device.
    let result = unsafe { real(device, &raw mut shown) };
    if result != NVML_SUCCESS {
        return result;
    }
    if let Some(view) = view(device, shown.total) {
        shown = nvmlMemory_t { total: view.total, free: view.free(), used: view.used() };
    }
    // SAFETY: not null, the caller's, where NVML would have written.
    unsafe { memory.write_unaligned(shown) };
    result
}

/// NVML API, "Device Queries". The quota holds nothing back: `reserved` is 0.
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetMemoryInfo_v2(
    real: &Real<unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> nvmlReturn_t>,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let depth = Depth::enter();
    if depth.is_none() || memory.is_null() || state::observed().is_none() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, memory) };
    }
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { memory.cast::<c_uint>().read_unaligned() };
    if version != MEMORY_V2 {
        // SAFETY: the caller's device, and a place of as many bytes as the version has.
        return of_unknown_version(version, |place| unsafe { real(device, place.cast()) });
    }
    let mut shown = nvmlMemory_v2_t { version, ..Default::default() };
    // SAFETY: the caller's device, and a structure of its version.
    let result = unsafe { real(device, &raw mut shown) };
    if result != NVML_SUCCESS {
        return result;
    }
    if let Some(view) = view(device, shown.total) {
        (shown.total, shown.reserved) = (view.total, 0);
        (shown.free, shown.used) = (view.free(), view.used());
    }
    // Member by member: between two of them is whatever our stack had.
    // SAFETY: not null, the caller's, where NVML would have written.
    unsafe {
        (&raw mut (*memory).total).write_unaligned(shown.total);
        (&raw mut (*memory).reserved).write_unaligned(shown.reserved);
        (&raw mut (*memory).free).write_unaligned(shown.free);
        (&raw mut (*memory).used).write_unaligned(shown.used);
    }
    result
}
