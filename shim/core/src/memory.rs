//! Allocations: reserve, call the driver, settle to what it really took.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::allocations::Allocation;
use crate::contexts::Place;
use crate::place::{self, Look};
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::state::{self, Standing};
use crate::thread::Depth;
use core::ffi::c_uint;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// What a hook asks the quota for.
struct Ask {
    /// The driver's function, for messages.
    name: &'static str,
    kind: Kind,
    /// The most that the driver may take.
    worst: u64,
    /// The least; asked for when the worst does not fit.
    least: u64,
}

impl Ask {
    /// For calls whose bytes are known beforehand.
    #[inline]
    const fn exactly(name: &'static str, kind: Kind, bytes: u64) -> Self {
        Self { name, kind, worst: bytes, least: bytes }
    }
}

/// What the driver made.
struct Made {
    pointer: u64,
    bytes: u64,
}

/// Device memory is handed out in pages of this size (`cuMemGetAllocationGranularity` of every GPU
/// so far), and larger allocations take whole ones.
const CHUNK: u64 = 2 << 20;
/// Smaller allocations share a page, aligned to this.
const ALIGN: u64 = 512;

/// The device memory behind an allocation of `bytes`: what NVML shows, and what a quota is about.
/// Charging what was asked for would let a loop of 2 MiB + 1 byte take twice its quota.
#[inline]
pub(crate) const fn footprint(bytes: u64) -> u64 {
    let step = if bytes <= CHUNK / 2 { ALIGN } else { CHUNK };
    // What overflows fits no quota.
    match bytes.checked_next_multiple_of(step) {
        Some(bytes) => bytes,
        None => u64::MAX,
    }
}

/// Every allocating hook: `call` runs the driver's function (again, if a refusal may pass), `made`
/// reads its result, `undo` frees it.
#[inline]
fn allocate(
    ask: &Ask,
    call: impl Fn() -> CUresult,
    made: impl FnOnce() -> Made,
    undo: impl FnOnce(u64),
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    let Place { serial, gpu } = match place::current(process) {
        Look::At(place) => place,
        Look::Nowhere => return call(),
        Look::Refused(refused) => {
            return quota::refuse(process, ask.name, Asked::Context, &refused);
        }
        Look::Unnoted(_) => return quota::refuse_unnoted(ask.name),
    };
    let asked = Asked::Bytes(ask.least);
    let Some(gpu) = gpu else { return quota::refuse_unlisted(process, ask.name, asked) };

    let (worst, least) = (footprint(ask.worst), footprint(ask.least));
    let reservation = match quota::reserve_between(process, gpu, worst, least) {
        Ok(reservation) => reservation,
        Err(refused) => return quota::refuse(process, ask.name, asked, &refused),
    };
    let result = quota::insist(process, gpu, worst, &call);
    if result != CUDA_SUCCESS {
        return result; // the reservation rolls back
    }
    let made = made();
    let made = Made { bytes: footprint(made.bytes), ..made };
    if let Err(overrun) = quota::commit(process, gpu, reservation, made.bytes, ask.kind) {
        // Freed while its bytes are still reserved: nobody may take them before.
        undo(made.pointer);
        let refused = overrun.refused;
        drop(overrun);
        return quota::refuse(process, ask.name, asked, &refused);
    }
    let allocation = Allocation { bytes: made.bytes, context: serial, gpu, kind: ask.kind };
    match process.allocations.insert(made.pointer, allocation) {
        Ok(None) => CUDA_SUCCESS,
        Ok(Some(stale)) => {
            // The driver gave the address again, so what was there is gone, though we saw no free.
            quota::give_back(process, stale);
            CUDA_SUCCESS
        }
        Err(_full) => {
            undo(made.pointer);
            quota::give_back(process, allocation);
            quota::refuse_unnoted(ask.name)
        }
    }
}

/// Frees an allocation that does not fit after all.
fn undo_free(pointer: u64) {
    if let Some(free) = real::cuMemFree_v2.get() {
        // SAFETY: the driver has just made it, and nobody else has seen it.
        unsafe { free(pointer) };
    }
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAlloc(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr, usize) -> CUresult>,
    dptr: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, bytes) };
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let bytes = bytes as u64;
    let ask = Ask::exactly("cuMemAlloc", Kind::Plain, bytes);
    // SAFETY: the driver wrote `dptr` when it succeeded.
    allocate(&ask, call, || Made { pointer: unsafe { *dptr }, bytes }, undo_free)
}

/// The 32-bit form of before CUDA 3.2.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAlloc_v1(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr_v1, c_uint) -> CUresult>,
    dptr: *mut CUdeviceptr_v1,
    bytes: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, bytes) };
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let bytes = u64::from(bytes);
    let ask = Ask::exactly("cuMemAlloc", Kind::Plain, bytes);
    // SAFETY: the driver wrote `dptr` when it succeeded.
    let made = || Made { pointer: u64::from(unsafe { *dptr }), bytes };
    allocate(&ask, call, made, undo_free)
}

/// Rows are padded to the pitch, which only the driver knows: every driver and GPU so far takes a
/// multiple of 512 bytes or less, so that is reserved, and settled to what it reports.
const PITCH: u64 = 512;

fn pitched(width_bytes: u64, height: u64) -> Ask {
    // A product that overflows fits no quota.
    let worst = width_bytes.checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    Ask {
        name: "cuMemAllocPitch",
        kind: Kind::Pitched,
        worst: worst.saturating_mul(height),
        least: width_bytes.saturating_mul(height),
    }
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAllocPitch(
    real: &Real<
        unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, usize, usize, c_uint) -> CUresult,
    >,
    dptr: *mut CUdeviceptr,
    pitch: *mut usize,
    width_bytes: usize,
    height: usize,
    element_bytes: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, pitch, width_bytes, height, element_bytes) };
    if dptr.is_null() || pitch.is_null() || width_bytes == 0 || height == 0 {
        return call();
    }
    let made = || {
        // SAFETY: the driver wrote both when it succeeded.
        let (pointer, pitch) = unsafe { (*dptr, *pitch) };
        Made { pointer, bytes: (pitch as u64).saturating_mul(height as u64) }
    };
    allocate(&pitched(width_bytes as u64, height as u64), call, made, undo_free)
}

/// The 32-bit form of before CUDA 3.2.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAllocPitch_v1(
    real: &Real<
        unsafe extern "C" fn(*mut CUdeviceptr_v1, *mut c_uint, c_uint, c_uint, c_uint) -> CUresult,
    >,
    dptr: *mut CUdeviceptr_v1,
    pitch: *mut c_uint,
    width_bytes: c_uint,
    height: c_uint,
    element_bytes: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, pitch, width_bytes, height, element_bytes) };
    if dptr.is_null() || pitch.is_null() || width_bytes == 0 || height == 0 {
        return call();
    }
    let made = || {
        // SAFETY: the driver wrote both when it succeeded.
        let (pointer, pitch) = unsafe { (*dptr, *pitch) };
        let bytes = u64::from(pitch) * u64::from(height);
        Made { pointer: u64::from(pointer), bytes }
    };
    allocate(&pitched(u64::from(width_bytes), u64::from(height)), call, made, undo_free)
}

/// CUDA Driver API, "Memory Management". Charged whole on the current device: managed memory may
/// be resident there at any time.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemAllocManaged(
    real: &Real<unsafe extern "C" fn(*mut CUdeviceptr, usize, c_uint) -> CUresult>,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(dptr, bytes, flags) };
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let bytes = bytes as u64;
    let ask = Ask::exactly("cuMemAllocManaged", Kind::Managed, bytes);
    // SAFETY: the driver wrote `dptr` when it succeeded.
    allocate(&ask, call, || Made { pointer: unsafe { *dptr }, bytes }, undo_free)
}

#[cfg(test)]
mod tests {
    use super::footprint;

    #[test]
    fn small_allocations_share_a_page_and_large_ones_take_whole_ones() {
        const MIB: u64 = 1 << 20;
        for (asked, taken) in [
            (1, 512),
            (512, 512),
            (513, 1024),
            (MIB, MIB),
            (MIB + 1, 2 * MIB),
            (2 * MIB, 2 * MIB),
            (2 * MIB + 1, 4 * MIB),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(footprint(asked), taken, "{asked}");
        }
    }
}
