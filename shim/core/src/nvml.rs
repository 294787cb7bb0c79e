//! NVML's view of memory: the same quota and use as the driver API's, matched by the device's UUID.
//!
//! These hooks only look: a process that asks NVML alone (`nvidia-smi`) takes no slot and opens no
//! session. libnvidia-ml calls its own exports through the PLT, so they re-enter; the depth guard
//! lets its inner calls see the real figures.
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::driver;
use crate::quota::View;
use crate::real::{self, Library, Real};
use crate::state::{self, Observed};
use crate::thread::Depth;
use core::ffi::CStr;
use tessera_cuda::nvml::*;

/// `NVML_ERROR_LIBRARY_NOT_FOUND`
const LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: nvmlReturn_t = 13;
/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_BYTES: usize = 96;

pub(crate) fn missing() -> nvmlReturn_t {
    if driver::bind(Library::Nvml, driver::Wanted::IfLoaded) {
        FUNCTION_NOT_FOUND
    } else {
        LIBRARY_NOT_FOUND
    }
}

/// The tenant, and which of its GPUs `device` is; `None` where this is no tenant.
pub(crate) fn tenant_of(device: nvmlDevice_t) -> Option<(Observed, Option<u8>)> {
    let observed = state::observed()?;
    let ask = real::nvmlDeviceGetUUID.get()?;
    let mut text = [0u8; UUID_BYTES];
    let length = u32::try_from(text.len()).unwrap_or(0);
    // SAFETY: `text` is valid for `length` bytes; the device is the caller's.
    if unsafe { ask(device, text.as_mut_ptr().cast(), length) } != NVML_SUCCESS {
        return None;
    }
    let uuid = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    let gpu = observed.quota().find(uuid).and_then(|gpu| u8::try_from(gpu).ok());
    Some((observed, gpu))
}

/// What the tenant is shown of `device`; `None` where this is no tenant.
fn view(device: nvmlDevice_t, total: u64) -> Option<View> {
    let (observed, gpu) = tenant_of(device)?;
    Some(View::of(observed, gpu, total))
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
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(device, memory) };
    if depth.is_none() || result != NVML_SUCCESS || memory.is_null() {
        return result;
    }
    // SAFETY: NVML has just written it.
    let memory = unsafe { &mut *memory };
    if let Some(view) = view(device, memory.total) {
        memory.total = view.total;
        memory.used = view.used();
        memory.free = view.free();
    }
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
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(device, memory) };
    if depth.is_none() || result != NVML_SUCCESS || memory.is_null() {
        return result;
    }
    // SAFETY: NVML has just written it.
    let memory = unsafe { &mut *memory };
    if let Some(view) = view(device, memory.total) {
        memory.total = view.total;
        memory.reserved = 0;
        memory.used = view.used();
        memory.free = view.free();
    }
    result
}
