//! `cuGetProcAddress` v1 and v2: the driver answers, with the caller's version and flags; only the
//! pointer is replaced by the hook of the export that it is.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::real::Real;
use crate::resolve::{Export, route};
use core::ffi::{c_char, c_int, c_void};
use tessera_cuda::types::*;

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, cuuint64_t) -> CUresult;
type GetProcAddressV2 = unsafe extern "C" fn(
    *const c_char,
    *mut *mut c_void,
    c_int,
    cuuint64_t,
    *mut CUdriverProcAddressQueryResult,
) -> CUresult;

/// CUDA Driver API, "Driver Entry Point Access" (before 12.0).
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGetProcAddress(
    exports: &'static [Export],
    real: &Real<GetProcAddress>,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cuda_version: c_int,
    flags: cuuint64_t,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(symbol, pfn, cuda_version, flags) };
    if result == CUDA_SUCCESS && !pfn.is_null() {
        // SAFETY: the driver has just written it.
        unsafe { *pfn = route(exports, *pfn) };
    }
    result
}

/// CUDA Driver API, "Driver Entry Point Access" (from 12.0).
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGetProcAddress_v2(
    exports: &'static [Export],
    real: &Real<GetProcAddressV2>,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cuda_version: c_int,
    flags: cuuint64_t,
    status: *mut CUdriverProcAddressQueryResult,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(symbol, pfn, cuda_version, flags, status) };
    if result == CUDA_SUCCESS && !pfn.is_null() {
        // SAFETY: the driver has just written it.
        unsafe { *pfn = route(exports, *pfn) };
    }
    result
}
