//! Which of a tenant's GPUs an NVML device handle stands for. A MIG instance is a GPU of the quota page,
//! by its own UUID. A GPU in MIG mode is none, and its handle shows "aggregate information" (NVML API,
//! `nvmlDeviceGetMemoryInfo`): of those of its instances that the page names.

use crate::real;
use core::ffi::{CStr, c_uint};
use core::ptr;
use tessera_cuda::nvml::*;
use tessera_region::layout::MAX_GPUS;
use tessera_region::share::ShareSet;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_BYTES: usize = 96;
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
        let ask =
            |real: Option<unsafe extern "C" fn(nvmlDevice_t, *mut c_uint) -> nvmlReturn_t>| {
                let mut id = NVML_NO_INSTANCE;
                // SAFETY: NVML's own handle, and a valid place for the answer.
                let result = real.map(|ask| unsafe { ask(self.device, &raw mut id) });
                if result == Some(NVML_SUCCESS) { id } else { NVML_NO_INSTANCE }
            };
        let gpu_instance = ask(real::nvmlDeviceGetGpuInstanceId.get());
        (gpu_instance, ask(real::nvmlDeviceGetComputeInstanceId.get()))
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
        let count = real::nvmlDeviceGetMaxMigDeviceCount.get();
        let by_index = real::nvmlDeviceGetMigDeviceHandleByIndex.get();
        // Drivers before MIG have neither.
        let Some((count, by_index)) = count.zip(by_index) else { return };
        let mut most = 0;
        // SAFETY: the caller's handle, which NVML knew just now, and a valid place for the answer.
        if unsafe { count(device, &raw mut most) } != NVML_SUCCESS {
            return;
        }
        for index in 0..most.min(INSTANCES) {
            let mut instance = ptr::null_mut();
            // SAFETY: as above. Indexes without an instance are an error.
            if unsafe { by_index(device, index, &raw mut instance) } == NVML_SUCCESS {
                self.add(instance, shares);
            }
        }
    }
}

/// Which entry of the page `device` is, if any; `None` where NVML does not tell its UUID.
fn entry(device: nvmlDevice_t, shares: &ShareSet) -> Option<Option<u8>> {
    let ask = real::nvmlDeviceGetUUID.get()?;
    let mut text = [0u8; UUID_BYTES];
    let length = u32::try_from(text.len()).unwrap_or(0);
    // SAFETY: `text` is valid for `length` bytes; the device is the caller's, or NVML's own.
    if unsafe { ask(device, text.as_mut_ptr().cast(), length) } != NVML_SUCCESS {
        return None;
    }
    let uuid = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    Some(shares.find(uuid).and_then(|gpu| u8::try_from(gpu).ok()))
}
