//! The array functions.

use super::shape::{Shape, UNIT};
use super::{Array, Mipmap};
use crate::abi::{exports, get, put};
use crate::context::current;
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use std::ffi::c_uint;
use tessera_cuda::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY_MEMORY_REQUIREMENTS,
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR_v1, CUDA_ERROR_INVALID_VALUE, CUarray,
    CUdevice, CUmipmappedArray,
};

fn create(out: *mut CUarray, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<()> {
    let context = current()?;
    let shape = Shape::check(descriptor, 1).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(out, handle(Array::create(context, shape)?))
}

fn flat(d: CUDA_ARRAY_DESCRIPTOR) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: d.Width,
        Height: d.Height,
        Depth: 0,
        Format: d.Format,
        NumChannels: d.NumChannels,
        Flags: 0,
    }
}

fn wide(d: CUDA_ARRAY_DESCRIPTOR_v1) -> CUDA_ARRAY_DESCRIPTOR {
    CUDA_ARRAY_DESCRIPTOR {
        Width: d.Width as usize,
        Height: d.Height as usize,
        Format: d.Format,
        NumChannels: d.NumChannels,
    }
}

/// "If the CUDA array is not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING
/// CUDA_ERROR_INVALID_VALUE will be returned."
fn needs(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, shape: &Shape, dev: CUdevice) -> Result<()> {
    driver()?.device(dev)?;
    if !shape.is_deferred() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let size = usize::try_from(shape.bytes()).unwrap_or(usize::MAX);
    let alignment = usize::try_from(UNIT).unwrap_or(usize::MAX);
    put(out, CUDA_ARRAY_MEMORY_REQUIREMENTS { size, alignment, ..Default::default() })
}

exports! {
    fn cuArrayCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR) {
        driver()?;
        create(out, flat(get(descriptor)?))
    }
    fn cuArrayCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) {
        driver()?;
        create(out, flat(wide(get(descriptor)?)))
    }
    fn cuArray3DCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) {
        driver()?;
        create(out, get(descriptor)?)
    }
    fn cuArray3DCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) {
        driver()?;
        let d = get(descriptor)?;
        create(out, CUDA_ARRAY3D_DESCRIPTOR {
            Width: d.Width as usize,
            Height: d.Height as usize,
            Depth: d.Depth as usize,
            Format: d.Format,
            NumChannels: d.NumChannels,
            Flags: d.Flags,
        })
    }
    fn cuArrayDestroy(array: CUarray) {
        let driver = driver()?;
        resolve::<Array>(array)?.destroy(driver)
    }

    fn cuArrayGetMemoryRequirements(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, dev: CUdevice) {
        driver()?;
        let view = resolve::<Array>(array)?.view()?;
        if view.borrowed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        needs(out, &view.memory.shape, dev)
    }

    fn cuMipmappedArrayCreate(out: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: c_uint) {
        let context = current()?;
        // "clamped to the range [1, …]".
        let shape = Shape::check(get(descriptor)?, levels.max(1)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, handle(Mipmap::create(context, shape)?))
    }
    fn cuMipmappedArrayGetLevel(out: *mut CUarray, mipmap: CUmipmappedArray, level: c_uint) {
        driver()?;
        let inner = crate::driver::lock(&resolve::<Mipmap>(mipmap)?.inner);
        let whole = inner.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let array = whole.levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(out, handle(*array))
    }
    fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray) {
        let driver = driver()?;
        resolve::<Mipmap>(mipmap)?.destroy(driver);
        Ok(())
    }
    fn cuMipmappedArrayGetMemoryRequirements(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, mipmap: CUmipmappedArray, dev: CUdevice) {
        driver()?;
        let inner = crate::driver::lock(&resolve::<Mipmap>(mipmap)?.inner);
        let whole = inner.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        needs(out, &whole.memory.shape, dev)
    }
}
