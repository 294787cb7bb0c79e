//! Memory: `nvmlDeviceGetMemoryInfo` (v1 counts what the driver reserves as used, v2 apart).

use crate::abi::{Result, exports, get, put};
use crate::plt;
use crate::state::device_or_instance;
use std::ffi::{c_uint, c_ulonglong};
use tessera_cuda::nvml::{NVML_SUCCESS, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t};

const NVML_ERROR_ARGUMENT_VERSION_MISMATCH: i32 = 25;

/// `nvmlMemory_v2`: the structure's size and version 2.
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Bar1 {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

fn info(handle: nvmlDevice_t) -> Result<nvmlMemory_v2_t> {
    let device = device_or_instance(handle)?;
    device.ask_for_memory();
    let (total, usable, used) = device.memory();
    let (reserved, free) = (total - usable, usable.saturating_sub(used));
    Ok(nvmlMemory_v2_t { version: MEMORY_V2, total, reserved, free, used })
}

exports! {
    fn nvmlDeviceGetMemoryInfo_v2(handle: nvmlDevice_t, out: *mut nvmlMemory_v2_t) {
        if get(out.cast::<c_uint>())? != MEMORY_V2 {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        put(out, info(handle)?)
    }

    fn nvmlDeviceGetMemoryInfo(handle: nvmlDevice_t, out: *mut nvmlMemory_t) {
        let mut v2 = nvmlMemory_v2_t { version: MEMORY_V2, ..Default::default() };
        // SAFETY: `v2` is a valid structure of its version.
        match unsafe { plt::memory_info_v2(handle, &raw mut v2) } {
            NVML_SUCCESS => {}
            code => return Err(code),
        }
        put(out, nvmlMemory_t { total: v2.total, free: v2.free, used: v2.used + v2.reserved })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(handle: nvmlDevice_t, out: *mut Bar1) {
        let total = device_or_instance(handle)?.memory().0.next_power_of_two();
        put(out, Bar1 { total, free: total - (1 << 20), used: 1 << 20 })
    }
}
