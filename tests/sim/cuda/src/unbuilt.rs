//! Functions that clients look for and that this driver does not have yet.

use crate::abi::exports;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::*;

exports! {
    fn cuArrayCreate(_handle: *mut CUarray, _descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuArrayCreate_v2(_handle: *mut CUarray, _descriptor: *const CUDA_ARRAY_DESCRIPTOR) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuArray3DCreate(_handle: *mut CUarray, _descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuArray3DCreate_v2(_handle: *mut CUarray, _descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMipmappedArrayCreate(
        _handle: *mut CUmipmappedArray,
        _descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
        _levels: c_uint,
    ) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuArrayDestroy(_array: CUarray) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMipmappedArrayDestroy(_array: CUmipmappedArray) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    // Sparse arrays are not simulated.
    fn cuMemMapArrayAsync(_list: *mut c_void, _count: c_uint, _stream: CUstream) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMemMapArrayAsync_ptsz(_list: *mut c_void, _count: c_uint, _stream: CUstream) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    // "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED" is 0.
    fn cuMemGetHandleForAddressRange(_handle: *mut c_void, _start: CUdeviceptr, _len: usize, _kind: c_int, _flags: u64) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
}
