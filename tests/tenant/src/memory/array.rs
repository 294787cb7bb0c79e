//! CUDA arrays, plain and mipmapped with one level: two-dimensional, of four floats an element.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use tessera_cuda::types::{
    CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_HOST, CUDA_ARRAY3D_DESCRIPTOR, CUDA_MEMCPY2D, CUarray,
    CUmipmappedArray,
};

use crate::cuda::Cuda;
use crate::driver::call;
use crate::exit::CudaError;

/// `CU_AD_FORMAT_FLOAT`.
const FLOAT: c_int = 0x20;
/// Bytes of an element.
const ELEMENT: usize = 16;
/// Elements of a row: 32 KiB, so that mebibytes are whole rows, and in every GPU's tiles.
const WIDTH: usize = 2048;
const ROW: usize = WIDTH * ELEMENT;

/// Nothing, between hosts.
const COPY: CUDA_MEMCPY2D = CUDA_MEMCPY2D {
    srcXInBytes: 0,
    srcY: 0,
    srcMemoryType: CU_MEMORYTYPE_HOST,
    srcHost: null(),
    srcDevice: 0,
    srcArray: null_mut(),
    srcPitch: 0,
    dstXInBytes: 0,
    dstY: 0,
    dstMemoryType: CU_MEMORYTYPE_HOST,
    dstHost: null_mut(),
    dstDevice: 0,
    dstArray: null_mut(),
    dstPitch: 0,
    WidthInBytes: 0,
    Height: 1,
};

#[derive(Debug)]
pub struct Array {
    array: CUarray,
    mipmapped: CUmipmappedArray,
    pub bytes: u64,
}
// SAFETY: arrays may be used from any thread in which their context is current (CUDA C
// Programming Guide, "Driver API").
unsafe impl Send for Array {}

pub fn create(cuda: &Cuda, mipmapped: bool, bytes: usize) -> Result<Array, CudaError> {
    let rows = bytes.div_ceil(ROW).max(1);
    let shape = CUDA_ARRAY3D_DESCRIPTOR {
        Width: WIDTH,
        Height: rows,
        Depth: 0,
        Format: FLOAT,
        NumChannels: 4,
        Flags: 0,
    };
    let mut made = Array { array: null_mut(), mipmapped: null_mut(), bytes: (rows * ROW) as u64 };
    // SAFETY: live out-parameters and descriptor.
    unsafe {
        if mipmapped {
            call!(cuda.driver, mipmap_create(&raw mut made.mipmapped, &raw const shape, 1))?;
            call!(cuda.driver, mipmap_level(&raw mut made.array, made.mipmapped, 0))?;
        } else {
            call!(cuda.driver, array_create(&raw mut made.array, &raw const shape))?;
        }
    }
    Ok(made)
}

pub fn destroy(cuda: &Cuda, array: &Array) -> Result<(), CudaError> {
    // SAFETY: made by `create` and destroyed once by its owner; a level goes with its array.
    unsafe {
        if array.mipmapped.is_null() {
            call!(cuda.driver, array_destroy(array.array))
        } else {
            call!(cuda.driver, mipmap_destroy(array.mipmapped))
        }
    }
}

/// Within one row.
pub fn write(cuda: &Cuda, array: &Array, offset: u64, data: &[u8]) -> Result<(), CudaError> {
    let (x, y) = place(offset);
    let copy = CUDA_MEMCPY2D {
        srcHost: data.as_ptr().cast(),
        srcPitch: data.len(),
        dstXInBytes: x,
        dstY: y,
        dstMemoryType: CU_MEMORYTYPE_ARRAY,
        dstArray: array.array,
        WidthInBytes: data.len(),
        ..COPY
    };
    // SAFETY: the host's end is a live slice of this length.
    unsafe { call!(cuda.driver, copy_2d(&raw const copy)) }
}

/// Within one row.
pub fn read(cuda: &Cuda, array: &Array, offset: u64, data: &mut [u8]) -> Result<(), CudaError> {
    let (x, y) = place(offset);
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: x,
        srcY: y,
        srcMemoryType: CU_MEMORYTYPE_ARRAY,
        srcArray: array.array,
        dstHost: data.as_mut_ptr().cast(),
        dstPitch: data.len(),
        WidthInBytes: data.len(),
        ..COPY
    };
    // SAFETY: the host's end is a live, exclusive slice of this length.
    unsafe { call!(cuda.driver, copy_2d(&raw const copy)) }
}

fn place(offset: u64) -> (usize, usize) {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    (offset % ROW, offset / ROW)
}
