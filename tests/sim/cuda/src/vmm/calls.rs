//! The functions of virtual memory management.

use super::{check, create, export, granularity, import, vmm};
use crate::abi::{exports, get, put};
use crate::driver::driver;
use crate::pool::props::{HANDLE_FABRIC, HANDLE_FD, RawAccess};
use crate::shared::descriptor_in;
use std::ffi::{c_int, c_ulonglong, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle,
};

exports! {
    fn cuMemGetAllocationGranularity(out: *mut usize, prop: *const CUmemAllocationProp, option: c_int) {
        let driver = driver()?;
        check(driver, &get(prop)?)?;
        if !matches!(option, 0 | 1) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, usize::try_from(granularity(driver)).unwrap_or(usize::MAX))
    }

    fn cuMemAddressReserve(out: *mut CUdeviceptr, len: usize, align: usize, hint: CUdeviceptr, flags: c_ulonglong) {
        let driver = driver()?;
        if out.is_null() || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, vmm().reserve(driver, len as u64, align as u64, hint)?)
    }
    fn cuMemAddressFree(start: CUdeviceptr, len: usize) {
        driver()?;
        vmm().unreserve(start, len as u64)
    }

    fn cuMemCreate(out: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) {
        let driver = driver()?;
        crate::capture::permit(crate::capture::Call::Physical)?;
        if out.is_null() || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, create(driver, size as u64, &get(prop)?)?)
    }
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        vmm().release(driver()?, handle)
    }
    fn cuMemRetainAllocationHandle(out: *mut CUmemGenericAllocationHandle, address: *mut c_void) {
        driver()?;
        let mut vmm = vmm();
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // "The handle is guaranteed to be the same handle value used to map the memory."
        let handle = vmm.at(address as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?.1.handle;
        vmm.memory.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?.references += 1;
        put(out, handle)
    }
    fn cuMemGetAllocationPropertiesFromHandle(out: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle) {
        driver()?;
        let mut vmm = vmm();
        let memory = vmm.get(handle)?;
        put(out, CUmemAllocationProp {
            r#type: crate::pool::props::PINNED,
            requestedHandleTypes: memory.handle_types,
            location: memory.location.raw(),
            win32HandleMetaData: std::ptr::null_mut(),
            // A hint that is not followed.
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: memory.usage,
            reserved: [0; 4],
        })
    }

    fn cuMemMap(start: CUdeviceptr, len: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) {
        let driver = driver()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        vmm().map(driver, start, len as u64, offset as u64, handle)
    }
    fn cuMemUnmap(start: CUdeviceptr, len: usize) {
        vmm().unmap(driver()?, start, len as u64)
    }
    fn cuMemSetAccess(start: CUdeviceptr, len: usize, desc: *const RawAccess, count: usize) {
        let driver = driver()?;
        if count == 0 || count > 1024 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let wanted: Vec<RawAccess> =
            (0..count).map(|i| get(desc.wrapping_add(i))).collect::<crate::errors::Result<_>>()?;
        vmm().set_access(driver, start, len as u64, &wanted)
    }

    fn cuMemExportToShareableHandle(out: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: c_ulonglong) {
        let driver = driver()?;
        if out.is_null() || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out.cast::<c_int>(), export(driver, handle, kind)?)
    }
    fn cuMemImportFromShareableHandle(out: *mut CUmemGenericAllocationHandle, handle: *mut c_void, kind: CUmemAllocationHandleType) {
        let driver = driver()?;
        match kind {
            HANDLE_FD if !out.is_null() => {
                put(out, import(driver, descriptor_in(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?)?)
            }
            // No IMEX channel here.
            HANDLE_FABRIC => Err(800),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
