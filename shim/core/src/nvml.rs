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
use tessera_cuda::nvml::*;

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

/// The tenant, and which of its GPUs `device` stands for; `None` where this is no tenant.
pub(crate) fn tenant_of(device: nvmlDevice_t) -> Option<(Observed, Parts)> {
    let observed = state::observed()?;
    Some((observed, Parts::of(device, observed.shares())?))
}

/// What the tenant is shown of `device`; `None` where this is no tenant.
fn view(device: nvmlDevice_t, total: u64) -> Option<View> {
    let (observed, parts) = tenant_of(device)?;
    let parts = parts.as_slice().iter().map(|part| View::of(observed, Some(part.gpu), total));
    Some(parts.reduce(View::plus).unwrap_or_else(|| View::of(observed, None, total)))
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
