//! The hooks themselves: each brings its descriptor into the newest form.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::{Shape, create, release};
use crate::real::{self, Real};
use core::ffi::c_uint;
use tessera_cuda::types::*;

/// Reads a caller's descriptor in the form `D`.
///
/// # Safety
/// `descriptor` is null or valid for reads.
unsafe fn read<D: Copy>(
    descriptor: *const D,
    as_newest: impl FnOnce(D) -> CUDA_ARRAY3D_DESCRIPTOR,
) -> Option<Shape> {
    if descriptor.is_null() {
        return None;
    }
    // SAFETY: not null, hence valid by the contract; packed structures may hold it.
    let descriptor = as_newest(unsafe { descriptor.read_unaligned() });
    Some(Shape { descriptor, levels: None })
}

/// One or two dimensions in the newest form.
fn flat(
    width: usize,
    height: usize,
    format: CUarray_format,
    channels: c_uint,
) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: 0,
        Format: format,
        NumChannels: channels,
        Flags: 0,
    }
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuArrayCreate(
    real: &Real<unsafe extern "C" fn(*mut CUarray, *const CUDA_ARRAY_DESCRIPTOR) -> CUresult>,
    handle: *mut CUarray,
    descriptor: *const CUDA_ARRAY_DESCRIPTOR,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let shape = unsafe { read(descriptor, |d| flat(d.Width, d.Height, d.Format, d.NumChannels)) };
    create("cuArrayCreate", shape, handle, &real::cuArrayDestroy, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(handle, descriptor) }
    })
}

/// The 32-bit form of before CUDA 3.2.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuArrayCreate_v1(
    real: &Real<unsafe extern "C" fn(*mut CUarray, *const CUDA_ARRAY_DESCRIPTOR_v1) -> CUresult>,
    handle: *mut CUarray,
    descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let shape = unsafe {
        read(descriptor, |d| flat(d.Width as usize, d.Height as usize, d.Format, d.NumChannels))
    };
    create("cuArrayCreate", shape, handle, &real::cuArrayDestroy, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(handle, descriptor) }
    })
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuArray3DCreate(
    real: &Real<unsafe extern "C" fn(*mut CUarray, *const CUDA_ARRAY3D_DESCRIPTOR) -> CUresult>,
    handle: *mut CUarray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let shape = unsafe { read(descriptor, |d| d) };
    create("cuArray3DCreate", shape, handle, &real::cuArrayDestroy, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(handle, descriptor) }
    })
}

/// The 32-bit form of before CUDA 3.2.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuArray3DCreate_v1(
    real: &Real<unsafe extern "C" fn(*mut CUarray, *const CUDA_ARRAY3D_DESCRIPTOR_v1) -> CUresult>,
    handle: *mut CUarray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let shape = unsafe {
        read(descriptor, |d| CUDA_ARRAY3D_DESCRIPTOR {
            Width: d.Width as usize,
            Height: d.Height as usize,
            Depth: d.Depth as usize,
            Format: d.Format,
            NumChannels: d.NumChannels,
            Flags: d.Flags,
        })
    };
    create("cuArray3DCreate", shape, handle, &real::cuArrayDestroy, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(handle, descriptor) }
    })
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMipmappedArrayCreate(
    real: &Real<
        unsafe extern "C" fn(
            *mut CUmipmappedArray,
            *const CUDA_ARRAY3D_DESCRIPTOR,
            c_uint,
        ) -> CUresult,
    >,
    handle: *mut CUmipmappedArray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
    levels: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let shape = unsafe { read(descriptor, |d| d) };
    let shape = shape.map(|shape| Shape { levels: Some(levels), ..shape });
    create("cuMipmappedArrayCreate", shape, handle, &real::cuMipmappedArrayDestroy, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(handle, descriptor, levels) }
    })
}

/// CUDA Driver API, "Memory Management". Planes and levels of an array are views, unknown here.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuArrayDestroy(
    real: &Real<unsafe extern "C" fn(CUarray) -> CUresult>,
    array: CUarray,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    release(array, &|| unsafe { real(array) })
}

/// CUDA Driver API, "Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMipmappedArrayDestroy(
    real: &Real<unsafe extern "C" fn(CUmipmappedArray) -> CUresult>,
    array: CUmipmappedArray,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    release(array, &|| unsafe { real(array) })
}
