//! What the tenant sees of its GPU's memory: its quota, and its use of it, coherent between
//! `cuMemGetInfo`, `cuDeviceTotalMem` and NVML.
//!
//! The driver is asked first, so that its errors stay its own.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::limits;
use crate::place::{self, Look};
use crate::quota::View;
use crate::real::Real;
use crate::state::{self, Observed, Process, Standing};
use crate::thread::Depth;
use core::ffi::c_uint;
use core::ptr;
use tessera_cuda::types::*;

/// Whose figures these are to be; `None` where this is no tenant, whose pointers are the driver's alone.
fn tenant() -> Result<Option<&'static Process>, CUresult> {
    match state::standing() {
        Standing::Pass => Ok(None),
        Standing::Closed => Err(CUDA_ERROR_SYSTEM_NOT_READY),
        Standing::Armed(process) => Ok(Some(process)),
    }
}

/// What the tenant is shown in place of the current device's `total` bytes.
#[inline]
fn current_view(process: &'static Process, total: u64) -> View {
    let gpu = match place::current(process) {
        Look::At(place) => place.gpu,
        // Its context does not fit: nothing is left.
        Look::Refused(refused) => u8::try_from(refused.gpu).ok(),
        Look::Unnoted(gpu) => gpu,
        // The driver has answered, so there is a device.
        Look::Nowhere => {
            limits::current_device().and_then(|device| process.listed(device).flatten())
        }
    };
    View::of(Observed::AsProcess(process), gpu, total)
}

/// A figure's width.
trait Width: Copy + Default {
    /// In which a larger figure is the largest.
    fn saturating(bytes: u64) -> Self;
    /// How much the GPU has by what the driver says.
    fn of_gpu(self) -> u64;
}

impl Width for usize {
    fn saturating(bytes: u64) -> Self {
        Self::try_from(bytes).unwrap_or(Self::MAX)
    }

    fn of_gpu(self) -> u64 {
        self as u64
    }
}

impl Width for c_uint {
    fn saturating(bytes: u64) -> Self {
        Self::try_from(bytes).unwrap_or(Self::MAX)
    }

    fn of_gpu(self) -> u64 {
        // The driver's 32 bits say nothing about larger GPUs.
        u64::MAX
    }
}

/// `own` where the caller wants an answer, else NULL as from the caller.
fn instead<T>(wanted: *mut T, own: &mut T) -> *mut T {
    if wanted.is_null() { wanted } else { ptr::from_mut(own) }
}

/// Any `cuMemGetInfo`. The driver takes NULL for either place. What it says goes to places of ours: no thread of the
/// tenant sees it, and no error leaves it there.
///
/// # Safety
/// As the driver's.
unsafe fn memory_info<T: Width>(
    real: &Real<unsafe extern "C" fn(*mut T, *mut T) -> CUresult>,
    free: *mut T,
    total: *mut T,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let depth = Depth::enter();
    if depth.is_none() || state::passes() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(free, total) };
    }
    let (mut own_free, mut own_total) = (T::default(), T::default());
    // SAFETY: NULL, or places of ours.
    let result = unsafe { real(instead(free, &mut own_free), instead(total, &mut own_total)) };
    if result != CUDA_SUCCESS {
        return result;
    }
    let process = match tenant() {
        Ok(process) => process,
        Err(refusal) => return refusal,
    };
    let (mut shown_free, mut shown_total) = (own_free, own_total);
    if let Some(process) = process {
        // SAFETY: a place of ours, and NULL, which the driver has just taken or takes for either.
        let known = !total.is_null()
            || unsafe { real(ptr::null_mut(), &raw mut own_total) } == CUDA_SUCCESS;
        let view = current_view(process, if known { own_total.of_gpu() } else { u64::MAX });
        (shown_free, shown_total) = (T::saturating(view.free()), T::saturating(view.total));
    }
    // SAFETY: the caller's own places, where the driver would have written.
    unsafe {
        put(free, shown_free);
        put(total, shown_total);
    }
    result
}

/// Writes an answer where there is a place for it.
///
/// # Safety
/// `to` is NULL or valid for a write.
unsafe fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's promise; packed structures may hold it.
        unsafe { to.write_unaligned(value) };
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
    // SAFETY: the caller's promise.
    unsafe { memory_info(real, free, total) }
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
    // SAFETY: the caller's promise.
    unsafe { memory_info(real, free, total) }
}

/// Any `cuDeviceTotalMem`; see [`memory_info`]. Of a device of which the driver does not tell what it is, the tenant has
/// nothing.
///
/// # Safety
/// As the driver's.
unsafe fn total_memory<T: Width>(
    real: &Real<unsafe extern "C" fn(*mut T, CUdevice) -> CUresult>,
    bytes: *mut T,
    device: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let depth = Depth::enter();
    if depth.is_none() || state::passes() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(bytes, device) };
    }
    let mut shown = T::default();
    // SAFETY: NULL, or a place of ours.
    let result = unsafe { real(instead(bytes, &mut shown), device) };
    if result != CUDA_SUCCESS {
        return result;
    }
    match tenant() {
        Ok(None) => {}
        Ok(Some(process)) => {
            let gpu = process.listed(device).flatten();
            let view = View::of(Observed::AsProcess(process), gpu, shown.of_gpu());
            shown = T::saturating(view.total);
        }
        Err(refusal) => return refusal,
    }
    // SAFETY: the caller's own place, where the driver would have written.
    unsafe { put(bytes, shown) };
    result
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
    // SAFETY: the caller's promise.
    unsafe { total_memory(real, bytes, dev) }
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
    // SAFETY: the caller's promise.
    unsafe { total_memory(real, bytes, dev) }
}
