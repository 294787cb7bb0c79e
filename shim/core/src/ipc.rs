//! Legacy IPC: device pointers shared by 64-byte handles (CUDA Driver API, "Memory Management").
//! The exporter is charged; see [`crate::shares`].
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::place;
use crate::quota;
use crate::shares::{self, extent};
use crate::state::Process;
use crate::thread::{Answer, Call, entered, tenant};
use core::ffi::c_uint;
use tessera_cuda::types::*;

/// Where the charged allocation begins that `pointer` is in.
pub(crate) fn base_of(process: &'static Process, pointer: CUdeviceptr) -> Option<CUdeviceptr> {
    let charged = |pointer| process.allocations.get(pointer).map(|_| pointer);
    charged(pointer).or_else(|| charged(extent(pointer)?.0))
}

pub unsafe fn cuIpcGetMemHandle(
    call: Call<'_>,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the caller's own place, which the driver wrote.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return Ok(()) };
    let Some(base) = base_of(process, pointer) else { return Ok(()) };
    let name = shares::name(&handle.reserved);
    process.shares.export(base, |export| export.named(name)).map_err(|_full| {
        handle.reserved.fill(0);
        quota::refuse_unnoted("cuIpcGetMemHandle")
    })
}

pub unsafe fn cuIpcOpenMemHandle(
    call: Call<'_>,
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    _: c_uint,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    let mark = shares::name(&handle.reserved);
    shares::mark_import(process, mark);
    let answer = call();
    if answer.is_err() || pointer.is_null() {
        shares::unmark_import(process, mark);
        return answer;
    }
    let context = place::current(process).serial();
    // SAFETY: the driver wrote it.
    process.shares.opened(process, unsafe { *pointer }, mark, context);
    answer
}

pub unsafe fn cuIpcCloseMemHandle(call: Call<'_>, pointer: CUdeviceptr) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    process.shares.closed(process, pointer);
    process.shares.look_again(process);
    Ok(())
}
