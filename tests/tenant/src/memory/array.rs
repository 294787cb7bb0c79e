//! CUDA arrays, plain and mipmapped with one level: two-dimensional, of four floats an element.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, check, need};
use crate::exit::CudaError;

/// `CU_AD_FORMAT_FLOAT`.
const FLOAT: c_int = 0x20;
/// `CU_MEMORYTYPE_HOST`.
const HOST: c_int = 1;
/// `CU_MEMORYTYPE_ARRAY`.
const ARRAY: c_int = 3;
/// Bytes of an element.
const ELEMENT: usize = 16;
/// Elements of a row: 32 KiB, so that mebibytes are whole rows, and in every GPU's tiles.
const WIDTH: usize = 2048;
const ROW: usize = WIDTH * ELEMENT;

/// `CUDA_ARRAY3D_DESCRIPTOR` (cuda.h 12.9).
#[repr(C)]
struct Descriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}
const _: () = assert!(size_of::<Descriptor>() == 40);

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
struct End {
    x_in_bytes: usize,
    y: usize,
    kind: c_int,
    host: *mut c_void,
    device: CUdeviceptr,
    array: *mut c_void,
    pitch: usize,
}

/// `CUDA_MEMCPY2D` (cuda.h 12.9).
#[repr(C)]
struct Copy2d {
    from: End,
    to: End,
    width_in_bytes: usize,
    height: usize,
}
const _: () = assert!(size_of::<Copy2d>() == 128);

/// An array, or the first level of a mipmapped one.
#[derive(Debug)]
pub struct Array {
    array: *mut c_void,
    mipmapped: *mut c_void,
    rows: usize,
}
// SAFETY: arrays may be used from any thread in which their context is current (CUDA C
// Programming Guide, "Driver API").
unsafe impl Send for Array {}

impl Array {
    pub fn bytes(&self) -> u64 {
        (self.rows * ROW) as u64
    }
}

pub fn create(cuda: &Cuda, mipmapped: bool, bytes: usize) -> Result<Array, CudaError> {
    let rows = bytes.div_ceil(ROW).max(1);
    let shape =
        Descriptor { width: WIDTH, height: rows, depth: 0, format: FLOAT, channels: 4, flags: 0 };
    let shape = (&raw const shape).cast();
    let mut made = Array { array: null_mut(), mipmapped: null_mut(), rows };
    let driver = cuda.driver();
    if mipmapped {
        let create = need("cuMipmappedArrayCreate", driver.mipmap_create)?;
        let level = need("cuMipmappedArrayGetLevel", driver.mipmap_level)?;
        // SAFETY: live out-parameters and descriptor.
        unsafe {
            check("cuMipmappedArrayCreate", create(&raw mut made.mipmapped, shape, 1))?;
            check("cuMipmappedArrayGetLevel", level(&raw mut made.array, made.mipmapped, 0))?;
        }
    } else {
        let create = need("cuArray3DCreate", driver.array_create)?;
        // SAFETY: a live out-parameter and descriptor.
        check("cuArray3DCreate", unsafe { create(&raw mut made.array, shape) })?;
    }
    Ok(made)
}

pub fn destroy(cuda: &Cuda, array: &Array) -> Result<(), CudaError> {
    // SAFETY: made by `create` and destroyed once by its owner; a level goes with its array.
    unsafe {
        if array.mipmapped.is_null() {
            let destroy = need("cuArrayDestroy", cuda.driver().array_destroy)?;
            check("cuArrayDestroy", destroy(array.array))
        } else {
            let destroy = need("cuMipmappedArrayDestroy", cuda.driver().mipmap_destroy)?;
            check("cuMipmappedArrayDestroy", destroy(array.mipmapped))
        }
    }
}

pub fn write(cuda: &Cuda, array: &Array, offset: u64, data: &[u8]) -> Result<(), CudaError> {
    let source = host(data.as_ptr().cast_mut().cast(), data.len());
    copy(cuda, source, inside(array, offset), data.len())
}

pub fn read(cuda: &Cuda, array: &Array, offset: u64, data: &mut [u8]) -> Result<(), CudaError> {
    let length = data.len();
    copy(cuda, inside(array, offset), host(data.as_mut_ptr().cast(), length), length)
}

/// Part of one row, from `from` to `to`.
fn copy(cuda: &Cuda, from: End, to: End, length: usize) -> Result<(), CudaError> {
    debug_assert!(from.x_in_bytes.max(to.x_in_bytes) + length <= ROW);
    let copy_2d = need("cuMemcpy2D", cuda.driver().copy_2d)?;
    let copy = Copy2d { from, to, width_in_bytes: length, height: 1 };
    // SAFETY: the host's end is a live slice of this length, exclusive where it is written.
    check("cuMemcpy2D", unsafe { copy_2d((&raw const copy).cast()) })
}

fn host(data: *mut c_void, pitch: usize) -> End {
    End { x_in_bytes: 0, y: 0, kind: HOST, host: data, device: 0, array: null_mut(), pitch }
}

fn inside(array: &Array, offset: u64) -> End {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    End {
        x_in_bytes: offset % ROW,
        y: offset / ROW,
        kind: ARRAY,
        host: null_mut(),
        device: 0,
        array: array.array,
        pitch: 0,
    }
}
