//! What a pointer is: CUDA Driver API, "Unified Addressing".

use crate::abi::{exports, get, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::handle;
use crate::memory::Kind;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr};

/// `CU_POINTER_ATTRIBUTE_*`, and `CU_MEMORYTYPE_*` as the answer to the second.
fn attribute(value: *mut c_void, which: c_int, address: u64) -> Result<()> {
    let memory = driver()?.memory();
    let (start, a) = memory.find(address, 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = a.kind.is_device();
    match which {
        1 if matches!(a.kind, Kind::Mapped | Kind::MappedHost) => {
            put(value.cast(), std::ptr::null_mut::<c_void>())
        }
        1 => put(value.cast(), handle(a.context)),
        2 => put(value.cast(), if device { 2u32 } else { 1 }),
        3 => put(value.cast(), address),
        4 if !device || a.kind == Kind::Managed => put(value.cast(), address),
        // The host can't reach device memory.
        4 => Err(CUDA_ERROR_INVALID_VALUE),
        // Synchronous memory operations; GPUDirect.
        6 | 15 => put(value.cast(), 0u32),
        7 => put(value.cast(), a.id),
        8 => put(value.cast(), u8::from(a.kind == Kind::Managed)),
        9 => put(value.cast(), a.context.device.ordinal),
        // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
        10 => put(value.cast(), u8::from(a.kind == Kind::Device)),
        14 if matches!(a.kind, Kind::Mapped | Kind::MappedHost) => {
            drop(memory);
            put(value.cast(), crate::vmm::handle_types_at(address))
        }
        14 => put(value.cast(), 0u64),
        11 => put(value.cast(), start),
        12 => put(value.cast(), a.size),
        13 => put(value.cast(), 1u8),
        16 => put(value.cast(), 3u32),
        17 => put(value.cast(), a.pool.map_or(std::ptr::null_mut(), handle)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

exports! {
    fn cuPointerGetAttribute(value: *mut c_void, which: c_int, address: CUdeviceptr) {
        attribute(value, which, address)
    }

    // "Unlike cuPointerGetAttribute, this function will not return an error when the ptr
    // encountered is not a valid CUDA pointer": such attributes are null.
    fn cuPointerGetAttributes(count: c_uint, which: *mut c_int, values: *mut *mut c_void, address: CUdeviceptr) {
        driver()?;
        for i in 0..count as usize {
            let (w, value) = (get(which.wrapping_add(i))?, get(values.wrapping_add(i))?);
            if attribute(value, w, address).is_err() {
                match w {
                    9 => put(value.cast(), -2i32)?,
                    2 | 6 | 15 | 16 => put(value.cast(), 0u32)?,
                    8 | 10 | 13 => put(value.cast(), 0u8)?,
                    1 | 3 | 4 | 7 | 11 | 12 | 14 | 17 => put(value.cast(), 0u64)?,
                    _ => return Err(CUDA_ERROR_INVALID_VALUE),
                }
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: *const c_void, which: c_int, address: CUdeviceptr) {
        // Only CU_POINTER_ATTRIBUTE_SYNC_MEMOPS can be set.
        let memory = driver()?.memory();
        memory.find(address, 0).filter(|_| which == 6).map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}
