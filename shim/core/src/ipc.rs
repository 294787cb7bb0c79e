//! Legacy IPC: device pointers shared by 64-byte handles (CUDA Driver API, "Memory Management").
//! The exporter is charged; see [`crate::shares`].
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::place::{self, Look};
use crate::quota;
use crate::real::{self, Real};
use crate::shares;
use crate::state::{self, Process, Standing};
use crate::thread::Depth;
use core::ffi::c_uint;
use tessera_cuda::types::*;

/// Where the charged allocation begins that `pointer` is in.
pub(crate) fn base_of(process: &'static Process, pointer: CUdeviceptr) -> Option<CUdeviceptr> {
    let charged = |pointer| process.allocations.get(pointer).map(|_| pointer);
    charged(pointer).or_else(|| {
        let ask = real::cuMemGetAddressRange_v2.get()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: valid places for both answers; any pointer may be asked for.
        let found = unsafe { ask(&raw mut base, &raw mut bytes, pointer) } == CUDA_SUCCESS;
        found.then_some(base).and_then(charged)
    })
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuIpcGetMemHandle(
    real: &Real<unsafe extern "C" fn(*mut CUipcMemHandle, CUdeviceptr) -> CUresult>,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(handle, pointer) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || handle.is_null() {
        return result;
    }
    let Some(process) = state::armed() else { return result };
    if let Some(base) = base_of(process, pointer) {
        // SAFETY: the driver wrote it.
        let name = shares::name(&unsafe { *handle }.reserved);
        if process.shares.export(base, |export| export.named(name)).is_err() {
            // SAFETY: the caller's own place for it.
            unsafe { (*handle).reserved.fill(0) };
            return quota::refuse_unnoted("cuIpcGetMemHandle");
        }
    }
    result
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuIpcOpenMemHandle(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr, CUipcMemHandle, c_uint) -> CUresult>,
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pointer, handle, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    let mark = shares::name(&handle.reserved);
    shares::mark_import(process, mark);
    let result = call();
    if result != CUDA_SUCCESS || pointer.is_null() {
        shares::unmark_import(process, mark);
        return result;
    }
    let context = match place::current(process) {
        Look::At(place) => place.serial,
        _ => 0,
    };
    // SAFETY: the driver wrote it.
    process.shares.opened(process, unsafe { *pointer }, mark, context);
    result
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuIpcCloseMemHandle(
    real: &Real<unsafe extern "C" fn(CUdeviceptr) -> CUresult>,
    pointer: CUdeviceptr,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let result = unsafe { real(pointer) };
    let Some(_depth) = Depth::enter() else { return result };
    if result == CUDA_SUCCESS
        && let Some(process) = state::armed()
    {
        process.shares.closed(process, pointer);
        process.shares.look_again(process);
    }
    result
}
