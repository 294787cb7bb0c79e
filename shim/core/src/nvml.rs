//! NVML's view of memory: the same quota and use as the driver API's, matched by the device's UUID.
//!
//! These hooks only look: a process that asks NVML alone (`nvidia-smi`) takes no slot and opens no
//! session. libnvidia-ml calls its own exports through the PLT, so they re-enter; the depth guard
//! lets its inner calls see the real figures.
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::quota::View;
use crate::real::{self, Library, Wanted};
use crate::state::{self, Observed};
use crate::thread::{Answer, Depth};
use core::ffi::{CStr, c_uint, c_void};
use core::ptr;
use tessera_cuda::nvml::*;
use tessera_region::layout::MAX_GPUS;
use tessera_region::share::ShareSet;

/// `nvmlMemory_v2`
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

/// `NVML_ERROR_LIBRARY_NOT_FOUND`
const LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: nvmlReturn_t = 13;

/// What a function that NVML lacks answers.
#[cold]
pub fn missing() -> nvmlReturn_t {
    if real::bind(Library::Nvml, Wanted::IfLoaded) { FUNCTION_NOT_FOUND } else { LIBRARY_NOT_FOUND }
}

/// The tenant, and which of its GPUs `device` stands for; `None` where this is no tenant. A device of which NVML does
/// not tell what it is stands for none of them.
pub(crate) fn tenant_of(device: nvmlDevice_t) -> Option<(Observed, Parts)> {
    let observed = state::observed()?;
    Some((observed, Parts::of(device, observed.shares())))
}

/// Inside a hook of a tenant's that asks for something at `place`; else the call is NVML's alone.
pub(crate) fn asked<T>(place: *mut T) -> Option<Depth> {
    Depth::enter().filter(|_| !place.is_null() && state::observed().is_some())
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
    call: impl FnOnce(*mut c_void) -> Answer,
) -> Answer {
    /// Of a version, the bytes of its structure; the rest is a number.
    const SIZE: c_uint = 0x00ff_ffff;
    let mut place = [0u64; 512];
    if (version & SIZE) as usize > size_of_val(&place) {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    // The first member of every such structure.
    place[0] = u64::from(version);
    match call(place.as_mut_ptr().cast()) {
        Ok(()) | Err(NVML_ERROR_INSUFFICIENT_SIZE) => Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH),
        error => error,
    }
}

pub unsafe fn nvmlDeviceGetMemoryInfo(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlMemory_t) -> Answer,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> Answer {
    let Some(_depth) = asked(memory) else { return real(device, memory) };
    // In a place of ours no thread of the tenant sees what NVML says.
    let mut shown = nvmlMemory_t::default();
    real(device, &raw mut shown)?;
    if let Some(view) = view(device, shown.total) {
        shown = nvmlMemory_t { total: view.total, free: view.free(), used: view.used() };
    }
    // SAFETY: not null, the caller's, where NVML would have written.
    unsafe { memory.write_unaligned(shown) };
    Ok(())
}

/// NVML API, "Device Queries". The quota holds nothing back: `reserved` is 0.
pub unsafe fn nvmlDeviceGetMemoryInfo_v2(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> Answer,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> Answer {
    let Some(_depth) = asked(memory) else { return real(device, memory) };
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { memory.cast::<c_uint>().read_unaligned() };
    if version != MEMORY_V2 {
        return of_unknown_version(version, |place| real(device, place.cast()));
    }
    let mut shown = nvmlMemory_v2_t { version, ..Default::default() };
    real(device, &raw mut shown)?;
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
    Ok(())
}

// Which of a tenant's GPUs an NVML device handle stands for. A MIG instance is a GPU of the quota page, by its own
// UUID. A GPU in MIG mode is none, and its handle shows "aggregate information" (NVML API,
// `nvmlDeviceGetMemoryInfo`): of those of its instances that the page names.

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_BYTES: c_uint = 96;
/// More instances than any GPU has: seven.
const INSTANCES: c_uint = 64;

/// One of the page's GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Its entry of the page.
    pub(crate) gpu: u8,
    /// Its handle.
    device: nvmlDevice_t,
}

impl Part {
    /// The ids of GPU instance and compute instance that NVML has for it; of a whole GPU, none.
    pub(crate) fn instance_ids(self) -> (c_uint, c_uint) {
        let [gpu, compute] =
            [&real::nvmlDeviceGetGpuInstanceId, &real::nvmlDeviceGetComputeInstanceId].map(
                |real| {
                    // SAFETY: NVML's own handle, and a valid place for the answer.
                    real.ask(0, |ask, id| unsafe { ask(self.device, id) })
                        .unwrap_or(NVML_NO_INSTANCE)
                },
            );
        (gpu, compute)
    }
}

/// What a handle stands for.
#[derive(Debug)]
pub(crate) struct Parts {
    parts: [Part; MAX_GPUS],
    count: usize,
}

impl Parts {
    /// Of `device`: none where NVML does not tell what it is.
    pub(crate) fn of(device: nvmlDevice_t, shares: &ShareSet) -> Self {
        let mut parts =
            Self { parts: [Part { gpu: 0, device: ptr::null_mut() }; MAX_GPUS], count: 0 };
        if parts.add(device, shares) == Some(false) {
            parts.add_instances(device, shares);
        }
        parts
    }

    /// The page's GPUs among it; none where it was not given to this tenant.
    pub(crate) fn as_slice(&self) -> &[Part] {
        &self.parts[..self.count]
    }

    fn add(&mut self, device: nvmlDevice_t, shares: &ShareSet) -> Option<bool> {
        let gpu = entry(device, shares)?;
        let Some((gpu, place)) = gpu.zip(self.parts.get_mut(self.count)) else {
            return Some(false);
        };
        *place = Part { gpu, device };
        self.count += 1;
        Some(true)
    }

    fn add_instances(&mut self, device: nvmlDevice_t, shares: &ShareSet) {
        // SAFETY: the caller's handle, which NVML knew just now, and a valid place for the answer.
        let most =
            real::nvmlDeviceGetMaxMigDeviceCount.ask(0, |ask, count| unsafe { ask(device, count) });
        // Drivers before MIG do not tell.
        for index in 0..most.map_or(0, |most| most.min(INSTANCES)) {
            // SAFETY: as above. Indexes without an instance are an error.
            let instance = real::nvmlDeviceGetMigDeviceHandleByIndex
                .ask(ptr::null_mut(), |ask, instance| unsafe { ask(device, index, instance) });
            if let Ok(instance) = instance {
                self.add(instance, shares);
            }
        }
    }
}

/// Which entry of the page `device` is, if any; `None` where NVML does not tell its UUID.
fn entry(device: nvmlDevice_t, shares: &ShareSet) -> Option<Option<u8>> {
    // SAFETY: room for so many bytes; the device is the caller's, or NVML's own.
    let text = real::nvmlDeviceGetUUID
        .ask([0u8; UUID_BYTES as usize], |ask, text| unsafe {
            ask(device, text.cast(), UUID_BYTES)
        })
        .ok()?;
    let uuid = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    Some(shares.find(uuid).and_then(|gpu| u8::try_from(gpu).ok()))
}
