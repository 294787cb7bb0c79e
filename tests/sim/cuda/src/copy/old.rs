//! Copies and fills of before CUDA 3.2, when device addresses and sizes had 32 bits.

use super::{Copy3d, End, Side, copy_3d, fill, linear, plane, with_array};
use crate::abi::{exports, get};
use crate::context::current;
use crate::errors::Result;
use crate::stream::{Flavour, Stream, stream};
use std::ffi::{c_uchar, c_uint, c_ushort};
use tessera_cuda::types::{CUDA_MEMCPY2D_v1, CUDA_MEMCPY3D_v1, CUarray, CUdeviceptr_v1, CUstream};

/// The default stream, which there was one of.
fn default() -> Result<&'static Stream> {
    stream(std::ptr::null_mut(), Flavour::Legacy)
}

fn in_3d(copy: *const CUDA_MEMCPY3D_v1) -> Result<Copy3d> {
    let c = get(copy)?;
    Ok(Copy3d {
        src_z: c.srcZ as usize,
        src_lod: c.srcLOD as usize,
        src_height: c.srcHeight as usize,
        dst_z: c.dstZ as usize,
        dst_lod: c.dstLOD as usize,
        dst_height: c.dstHeight as usize,
        depth: c.Depth as usize,
        ..plane!(c)
    })
}

fn at(address: CUdeviceptr_v1) -> (u64, End) {
    (address.into(), End::Device)
}

fn side(address: CUdeviceptr_v1) -> Side {
    Side::Linear(address.into(), End::Device)
}

exports! {
    fn cuMemcpyHtoD(dst: CUdeviceptr_v1, src: *const std::ffi::c_void, len: c_uint) {
        linear(at(dst), (src as u64, End::Host), len as usize, current()?.legacy(), true)
    }
    fn cuMemcpyDtoH(dst: *mut std::ffi::c_void, src: CUdeviceptr_v1, len: c_uint) {
        linear((dst as u64, End::Host), at(src), len as usize, current()?.legacy(), true)
    }
    fn cuMemcpyDtoD(dst: CUdeviceptr_v1, src: CUdeviceptr_v1, len: c_uint) {
        linear(at(dst), at(src), len as usize, default()?, true)
    }
    fn cuMemcpyDtoDAsync(dst: CUdeviceptr_v1, src: CUdeviceptr_v1, len: c_uint, s: CUstream) {
        linear(at(dst), at(src), len as usize, stream(s, Flavour::Legacy)?, false)
    }
    fn cuMemcpyDtoA(dst: CUarray, offset: c_uint, src: CUdeviceptr_v1, len: c_uint) {
        with_array((Side::Array(dst), offset as usize), (side(src), 0), len as usize, default()?, true)
    }
    fn cuMemcpyAtoD(dst: CUdeviceptr_v1, src: CUarray, offset: c_uint, len: c_uint) {
        with_array((side(dst), 0), (Side::Array(src), offset as usize), len as usize, default()?, true)
    }
    fn cuMemcpyAtoA(dst: CUarray, to: c_uint, src: CUarray, from: c_uint, len: c_uint) {
        with_array((Side::Array(dst), to as usize), (Side::Array(src), from as usize), len as usize, default()?, true)
    }
    fn cuMemcpy2D, cuMemcpy2DUnaligned(copy: *const CUDA_MEMCPY2D_v1) { copy_3d(&plane!(get(copy)?), default()?, true) }
    fn cuMemcpy2DAsync(copy: *const CUDA_MEMCPY2D_v1, s: CUstream) {
        copy_3d(&plane!(get(copy)?), stream(s, Flavour::Legacy)?, false)
    }
    fn cuMemcpy3D(copy: *const CUDA_MEMCPY3D_v1) { copy_3d(&in_3d(copy)?, default()?, true) }
    fn cuMemcpy3DAsync(copy: *const CUDA_MEMCPY3D_v1, s: CUstream) {
        copy_3d(&in_3d(copy)?, stream(s, Flavour::Legacy)?, false)
    }
    fn cuMemsetD8(dst: CUdeviceptr_v1, value: c_uchar, n: c_uint) {
        fill(dst.into(), 0, value, (n as usize, 1), default()?, true)
    }
    fn cuMemsetD16(dst: CUdeviceptr_v1, value: c_ushort, n: c_uint) {
        fill(dst.into(), 0, value, (n as usize, 1), default()?, true)
    }
    fn cuMemsetD32(dst: CUdeviceptr_v1, value: c_uint, n: c_uint) {
        fill(dst.into(), 0, value, (n as usize, 1), default()?, true)
    }
    fn cuMemsetD2D8(dst: CUdeviceptr_v1, pitch: c_uint, value: c_uchar, width: c_uint, height: c_uint) {
        fill(dst.into(), pitch as usize, value, (width as usize, height as usize), default()?, true)
    }
    fn cuMemsetD2D16(dst: CUdeviceptr_v1, pitch: c_uint, value: c_ushort, width: c_uint, height: c_uint) {
        fill(dst.into(), pitch as usize, value, (width as usize, height as usize), default()?, true)
    }
    fn cuMemsetD2D32(dst: CUdeviceptr_v1, pitch: c_uint, value: c_uint, width: c_uint, height: c_uint) {
        fill(dst.into(), pitch as usize, value, (width as usize, height as usize), default()?, true)
    }
}
