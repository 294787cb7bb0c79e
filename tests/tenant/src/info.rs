//! `info`: what this process sees of its GPUs.

use crate::cuda::{self, Cuda};
use crate::driver::Library;
use crate::exit::Exit;
use serde_json::{Value, json};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use tessera_cuda::nvml::{NVML_SUCCESS, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlReturn_t};

pub fn run() -> Result<(), Exit> {
    let driver = cuda::initialise()?;
    let mut devices = Vec::new();
    for ordinal in 0..cuda::device_count(&driver)? {
        let (uuid, name, total) = cuda::describe(&driver, ordinal)?;
        let context = Cuda::on(driver, ordinal)?;
        let (free, mem_total) = context.mem_info()?;
        devices.push(json!({
            "ordinal": ordinal,
            "uuid": uuid,
            "name": name,
            "device_total_mem": total,
            "mem_get_info": { "free": free, "total": mem_total },
            "nvml": nvml_memory(&uuid),
        }));
        context.close()?;
    }
    println!("{:#}", json!({ "driver_version": cuda::version(&driver)?, "devices": devices }));
    Ok(())
}

// What NVML shows this process, beside what the driver API shows it.

type Init = unsafe extern "C" fn() -> nvmlReturn_t;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut nvmlDevice_t) -> nvmlReturn_t;
type MemoryInfo = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t;
type MemoryInfoV2 = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> nvmlReturn_t;

/// `nvmlMemory_v2`: size and version in one word (nvml.h, `NVML_STRUCT_VERSION`).
const MEMORY_V2: usize = size_of::<nvmlMemory_v2_t>() | 2 << 24;

/// Memory of the GPU with `uuid` as both NVML calls report it, or why not.
fn nvml_memory(uuid: &str) -> Value {
    match nvml_read(uuid) {
        Ok(value) => value,
        Err(reason) => json!({ "error": reason }),
    }
}

fn nvml_read(uuid: &str) -> Result<Value, String> {
    let library =
        Library::open(c"libnvidia-ml.so.1").map_err(|_| "no libnvidia-ml.so.1".to_owned())?;
    let find = |name: &str| library.symbol(name).ok_or_else(|| format!("no {name}"));
    // SAFETY: each export of these names has the type given (nvml.h 12.9).
    let (init, by_uuid, info, info_v2) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Init>(find("nvmlInit_v2")?),
            std::mem::transmute::<*mut c_void, HandleByUuid>(find("nvmlDeviceGetHandleByUUID")?),
            std::mem::transmute::<*mut c_void, MemoryInfo>(find("nvmlDeviceGetMemoryInfo")?),
            std::mem::transmute::<*mut c_void, MemoryInfoV2>(find("nvmlDeviceGetMemoryInfo_v2")?),
        )
    };
    let check = |call: &str, code: c_int| {
        if code == NVML_SUCCESS { Ok(()) } else { Err(format!("{call} returned {code}")) }
    };
    let c_uuid = CString::new(uuid).map_err(|_| "a UUID with a NUL".to_owned())?;
    let mut device: nvmlDevice_t = std::ptr::null_mut();
    let mut v1 = nvmlMemory_t::default();
    let mut v2 = nvmlMemory_v2_t {
        version: c_uint::try_from(MEMORY_V2).unwrap_or(0),
        ..nvmlMemory_v2_t::default()
    };
    // SAFETY: NVML is initialised first; every out-parameter lives, and v2 names its own size.
    unsafe {
        check("nvmlInit_v2", init())?;
        check("nvmlDeviceGetHandleByUUID", by_uuid(c_uuid.as_ptr(), &raw mut device))?;
        check("nvmlDeviceGetMemoryInfo", info(device, &raw mut v1))?;
        check("nvmlDeviceGetMemoryInfo_v2", info_v2(device, &raw mut v2))?;
    }
    Ok(json!({
        "total": v1.total, "free": v1.free, "used": v1.used,
        "v2": { "total": v2.total, "free": v2.free, "used": v2.used, "reserved": v2.reserved },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_v2_version_word_is_the_headers() {
        // nvml.h 12.9: sizeof(nvmlMemory_v2_t) is 40, so nvmlMemory_v2 is 0x02000028.
        assert_eq!(MEMORY_V2, 0x0200_0028);
    }
}
