//! Copies with attributes, and batches of them. The attributes are hints, and the order in which
//! sources are read: here they are read when the call is made, which satisfies each.

use super::{ARRAY, Copy3d, End, UNIFIED, copy_3d, linear};
use crate::abi::{exports_both, get, put_if};
use crate::array::Array;
use crate::capture;
use crate::errors::Result;
use crate::handle::resolve;
use crate::stream::{Stream, stream};
use std::ffi::{c_uint, c_ulonglong, c_void};
use tessera_cuda::types::{
    CU_MEMCPY_OPERAND_TYPE_ARRAY, CU_MEMCPY_OPERAND_TYPE_POINTER, CUDA_ERROR_INVALID_VALUE,
    CUDA_MEMCPY3D_BATCH_OP, CUarray, CUdeviceptr, CUmemcpy3DOperand, CUmemcpyAttributes, CUstream,
};

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`, `…_DURING_API_CALL`, `…_ANY`.
const ORDERS: std::ops::RangeInclusive<i32> = 1..=3;

/// `CUmemcpyAttributes`: only its order can be wrong.
fn check(attributes: *const CUmemcpyAttributes, count: usize) -> Result<()> {
    /// Two locations as hints, then flags.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Attributes {
        order: i32,
        hints: [i32; 4],
        flags: c_uint,
    }
    for i in 0..count {
        let a: Attributes = get(attributes.cast::<Attributes>().wrapping_add(i))?;
        let _ = (a.hints, a.flags);
        if !ORDERS.contains(&a.order) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    Ok(())
}

/// "Must not be legacy NULL stream."
fn batched(s: &'static Stream) -> Result<()> {
    if s.is_legacy() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if s.is_capturing() { capture::fail(s) } else { Ok(()) }
}

/// `cuMemcpyBatchAsync`; the number of the copy that can't be made is written to `failed`.
fn batch(
    (dsts, srcs, sizes, count): (*const CUdeviceptr, *const CUdeviceptr, *const usize, usize),
    (attributes, indices, sets): (*const CUmemcpyAttributes, *const usize, usize),
    failed: *mut usize,
    s: &'static Stream,
) -> Result<()> {
    // No copy in particular.
    put_if(failed, usize::MAX);
    batched(s)?;
    if count == 0 || sets == 0 || sets > count {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    check(attributes, sets)?;
    // "The first entry in attrsIdxs must always be 0. Also, each entry must be greater than the
    // previous entry and the last entry should be less than count."
    let mut last = None;
    for i in 0..sets {
        let index = get(indices.wrapping_add(i))?;
        let right = last.map_or(index == 0, |last| index > last);
        if !right || index >= count {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        last = Some(index);
    }
    for i in 0..count {
        let copy = || {
            let dst = get(dsts.wrapping_add(i))?;
            let src = get(srcs.wrapping_add(i))?;
            let len = get(sizes.wrapping_add(i))?;
            linear((dst, End::Either), (src, End::Either), len, s, false)
        };
        copy().inspect_err(|_| put_if(failed, i))?;
    }
    Ok(())
}

/// One side of a [`Copy3d`].
struct Side {
    kind: c_uint,
    base: u64,
    pitch: usize,
    rows: usize,
    offset: [usize; 3],
}

/// An operand whose elements have so many bytes.
fn operand(this: &CUmemcpy3DOperand, element: usize) -> Result<Side> {
    let number = |at: usize| usize::try_from(this.op[at]).map_err(|_| CUDA_ERROR_INVALID_VALUE);
    match this.r#type {
        CU_MEMCPY_OPERAND_TYPE_POINTER => {
            let (pitch, rows) = (number(1)? * element, number(2)?);
            Ok(Side { kind: UNIFIED, base: this.op[0], pitch, rows, offset: [0; 3] })
        }
        CU_MEMCPY_OPERAND_TYPE_ARRAY => {
            let offset = [number(1)? * element, number(2)?, number(3)?];
            Ok(Side { kind: ARRAY, base: this.op[0], pitch: 0, rows: 0, offset })
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Bytes of an array's element; `None` of linear memory.
fn element(of: &CUmemcpy3DOperand) -> Result<Option<usize>> {
    if of.r#type != CU_MEMCPY_OPERAND_TYPE_ARRAY {
        return Ok(None);
    }
    let array: &Array = resolve(of.op[0] as CUarray)?;
    let (_, level) = array.bytes()?;
    let bytes = level.row / level.width;
    usize::try_from(bytes).map(Some).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

fn operation(op: &CUDA_MEMCPY3D_BATCH_OP, s: &'static Stream) -> Result<()> {
    if op.extent.contains(&0) || !ORDERS.contains(&op.srcAccessOrder) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // "For pointer-to-pointer copies, the element size is considered to be 1."
    let bytes = match (element(&op.dst)?, element(&op.src)?) {
        (Some(a), Some(b)) if a != b => return Err(CUDA_ERROR_INVALID_VALUE),
        (a, b) => a.or(b).unwrap_or(1),
    };
    let (dst, src) = (operand(&op.dst, bytes)?, operand(&op.src, bytes)?);
    let copy = Copy3d {
        src_x: src.offset[0],
        src_y: src.offset[1],
        src_z: src.offset[2],
        src_kind: src.kind,
        src_host: src.base,
        src_device: src.base,
        src_array: src.base,
        src_pitch: src.pitch,
        src_height: src.rows,
        dst_x: dst.offset[0],
        dst_y: dst.offset[1],
        dst_z: dst.offset[2],
        dst_kind: dst.kind,
        dst_host: dst.base,
        dst_device: dst.base,
        dst_array: dst.base,
        dst_pitch: dst.pitch,
        dst_height: dst.rows,
        width: op.extent[0] * bytes,
        height: op.extent[1],
        depth: op.extent[2],
        ..Copy3d::NONE
    };
    copy_3d(&copy, s, false)
}

fn operations(
    ops: *const CUDA_MEMCPY3D_BATCH_OP,
    count: usize,
    failed: *mut usize,
    flags: c_ulonglong,
    s: &'static Stream,
) -> Result<()> {
    put_if(failed, usize::MAX);
    batched(s)?;
    if count == 0 || flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for i in 0..count {
        get(ops.wrapping_add(i))
            .and_then(|op| operation(&op, s))
            .inspect_err(|_| put_if(failed, i))?;
    }
    Ok(())
}

const NOT_WANTED: *mut usize = std::ptr::null_mut();

exports_both! {
    fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize, sets: usize, failed: *mut usize, s: CUstream) |flavour| {
        batch((dsts, srcs, sizes, count), (attributes, indices, sets), failed, stream(s, flavour)?)
    }
    fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize, sets: usize, s: CUstream) |flavour| {
        batch((dsts, srcs, sizes, count), (attributes, indices, sets), NOT_WANTED, stream(s, flavour)?)
    }
    fn cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz(count: usize, ops: *mut CUDA_MEMCPY3D_BATCH_OP, failed: *mut usize, flags: c_ulonglong, s: CUstream) |flavour| {
        operations(ops, count, failed, flags, stream(s, flavour)?)
    }
    fn cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz(count: usize, ops: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, s: CUstream) |flavour| {
        operations(ops, count, NOT_WANTED, flags, stream(s, flavour)?)
    }
    fn cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz(dst: CUdeviceptr, src: CUdeviceptr, len: usize, attributes: *mut CUmemcpyAttributes, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        check(attributes, 1)?;
        linear((dst, End::Either), (src, End::Either), len, s, false)
    }
    fn cuMemcpy3DWithAttributesAsync, cuMemcpy3DWithAttributesAsync_ptsz(op: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        operation(&get(op)?, s)
    }
    // No fabric and no decompression engine: the devices' attributes say so.
    fn cuFabricCpyBatchAsync, cuFabricCpyBatchAsync_ptsz(_count: usize, _ops: *mut c_void, _flags: c_ulonglong, s: CUstream) |flavour| {
        stream(s, flavour)?;
        Err(tessera_cuda::types::CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMemBatchDecompressAsync, cuMemBatchDecompressAsync_ptsz(_params: *mut c_void, _count: usize, _flags: c_uint, _failed: *mut usize, s: CUstream) |flavour| {
        stream(s, flavour)?;
        Err(tessera_cuda::types::CUDA_ERROR_NOT_SUPPORTED)
    }
}
