//! What the tenant sees of its GPU's memory: its quota, and its use of it, coherent between
//! `cuMemGetInfo`, `cuDeviceTotalMem` and NVML.
//!
//! The driver is asked first, so that its errors stay its own.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::place::{self, Look};
use crate::quota::View;
use crate::real::Real;
use crate::state::{self, Observed, Standing};
use crate::thread::Depth;
use core::ffi::c_uint;
use tessera_cuda::types::*;

/// What the tenant is shown in place of the current device's `total` bytes; `None` where it is not
/// a tenant.
#[inline]
fn current_view(total: u64) -> Result<Option<View>, CUresult> {
    let process = match state::standing() {
        Standing::Pass => return Ok(None),
        Standing::Closed => return Err(CUDA_ERROR_SYSTEM_NOT_READY),
        Standing::Armed(process) => process,
    };
    match place::current(process) {
        Look::At(place) => Ok(Some(View::of(Observed::AsProcess(process), place.gpu, total))),
        // Its context does not fit: nothing is left.
        Look::Refused(refused) => {
            let gpu = u8::try_from(refused.gpu).ok();
            Ok(Some(View::of(Observed::AsProcess(process), gpu, total)))
        }
        Look::Unnoted(gpu) => Ok(Some(View::of(Observed::AsProcess(process), gpu, total))),
        Look::Nowhere => Ok(None),
    }
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemGetInfo(
    real: &Real<unsafe extern "C" fn(*mut usize, *mut usize) -> CUresult>,
    free: *mut usize,
    total: *mut usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(free, total) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || free.is_null() || total.is_null() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let real_total = unsafe { *total } as u64;
    match current_view(real_total) {
        // SAFETY: the driver has just written both.
        Ok(Some(view)) => unsafe {
            *free = saturate(view.free());
            *total = saturate(view.total);
        },
        Ok(None) => {}
        Err(refusal) => return refusal,
    }
    result
}

/// The 32-bit form of before CUDA 3.2, saturating.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemGetInfo_v1(
    real: &Real<unsafe extern "C" fn(*mut c_uint, *mut c_uint) -> CUresult>,
    free: *mut c_uint,
    total: *mut c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(free, total) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || free.is_null() || total.is_null() {
        return result;
    }
    // The driver's 32-bit total says nothing about larger GPUs.
    match current_view(u64::MAX) {
        // SAFETY: the driver has just written both.
        Ok(Some(view)) => unsafe {
            *free = saturate_32(view.free());
            *total = saturate_32(view.total);
        },
        Ok(None) => {}
        Err(refusal) => return refusal,
    }
    result
}

/// The device's total as the tenant sees it; `None` where it is not a tenant.
fn total_of(device: CUdevice, total: u64) -> Result<Option<u64>, CUresult> {
    let process = match state::standing() {
        Standing::Pass => return Ok(None),
        Standing::Closed => return Err(CUDA_ERROR_SYSTEM_NOT_READY),
        Standing::Armed(process) => process,
    };
    Ok(process.listed(device).map(|gpu| View::of(Observed::AsProcess(process), gpu, total).total))
}

/// CUDA Driver API, "Device Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDeviceTotalMem(
    real: &Real<unsafe extern "C" fn(*mut usize, CUdevice) -> CUresult>,
    bytes: *mut usize,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(bytes, dev) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || bytes.is_null() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let real_total = unsafe { *bytes } as u64;
    match total_of(dev, real_total) {
        // SAFETY: as above.
        Ok(Some(total)) => unsafe { *bytes = saturate(total) },
        Ok(None) => {}
        Err(refusal) => return refusal,
    }
    result
}

/// The 32-bit form of before CUDA 3.2, saturating.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDeviceTotalMem_v1(
    real: &Real<unsafe extern "C" fn(*mut c_uint, CUdevice) -> CUresult>,
    bytes: *mut c_uint,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(bytes, dev) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || bytes.is_null() {
        return result;
    }
    match total_of(dev, u64::MAX) {
        // SAFETY: the driver has just written it.
        Ok(Some(total)) => unsafe { *bytes = saturate_32(total) },
        Ok(None) => {}
        Err(refusal) => return refusal,
    }
    result
}

fn saturate(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn saturate_32(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}
