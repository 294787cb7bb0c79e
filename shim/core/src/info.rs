//! What the tenant sees of its GPU's memory: its quota, and its use of it, coherent between
//! `cuMemGetInfo`, `cuDeviceTotalMem` and NVML.
//!
//! The driver is asked first, so that its errors stay its own. What it says goes to places of ours: no thread
//! of the tenant sees it, and no error leaves it there.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::memory::Width;
use crate::place::{self, Look, current_device};
use crate::quota::View;
use crate::state::{self, Observed, Process};
use crate::thread::{Answer, Depth};
use core::ptr;
use tessera_cuda::types::CUdevice;

/// What the tenant is shown in place of the current device's `total` bytes.
#[inline]
fn current_view(process: &'static Process, total: u64) -> View {
    let gpu = match place::current(process) {
        Look::At(place) => place.gpu,
        // Its context does not fit: nothing is left.
        Look::Refused(refused) => u8::try_from(refused.gpu).ok(),
        Look::Unnoted(gpu) => gpu,
        // The driver has answered, so there is a device.
        Look::Nowhere => current_device().and_then(|device| process.listed(device).flatten()),
    };
    View::of(Observed::AsProcess(process), gpu, total)
}

/// How much the GPU has, of which the driver says so much: its 32 bits say nothing about larger GPUs.
fn of_gpu<T: Width>(total: T) -> u64 {
    if size_of::<T>() < 8 { u64::MAX } else { total.wide() }
}

/// `own` where the caller wants an answer, else NULL as from the caller.
fn instead<T>(wanted: *mut T, own: &mut T) -> *mut T {
    if wanted.is_null() { wanted } else { ptr::from_mut(own) }
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

/// CUDA Driver API, "Memory Management". The driver takes NULL for either place. 32-bit figures saturate.
pub unsafe fn cuMemGetInfo<T: Width>(
    real: &dyn Fn(*mut T, *mut T) -> Answer,
    free: *mut T,
    total: *mut T,
) -> Answer {
    let depth = Depth::enter();
    if depth.is_none() || state::passes() {
        return real(free, total);
    }
    let (mut own_free, mut own_total) = (T::default(), T::default());
    real(instead(free, &mut own_free), instead(total, &mut own_total))?;
    let (mut shown_free, mut shown_total) = (own_free, own_total);
    if let Some(process) = state::standing().tenant()? {
        let known = !total.is_null() || real(ptr::null_mut(), &raw mut own_total).is_ok();
        let view = current_view(process, if known { of_gpu(own_total) } else { u64::MAX });
        (shown_free, shown_total) = (T::saturating(view.free()), T::saturating(view.total));
    }
    // SAFETY: the caller's own places, where the driver would have written.
    unsafe {
        put(free, shown_free);
        put(total, shown_total);
    }
    Ok(())
}

/// CUDA Driver API, "Device Management". Of a device of which the driver does not tell what it is, the tenant has
/// nothing.
pub unsafe fn cuDeviceTotalMem<T: Width>(
    real: &dyn Fn(*mut T, CUdevice) -> Answer,
    bytes: *mut T,
    device: CUdevice,
) -> Answer {
    let depth = Depth::enter();
    if depth.is_none() || state::passes() {
        return real(bytes, device);
    }
    let mut shown = T::default();
    real(instead(bytes, &mut shown), device)?;
    if let Some(process) = state::standing().tenant()? {
        let gpu = process.listed(device).flatten();
        let view = View::of(Observed::AsProcess(process), gpu, of_gpu(shown));
        shown = T::saturating(view.total);
    }
    // SAFETY: the caller's own place, where the driver would have written.
    unsafe { put(bytes, shown) };
    Ok(())
}
