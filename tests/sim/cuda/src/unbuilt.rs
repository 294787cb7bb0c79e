//! Functions that the shim hooks and that are not built: see "Limits" in
//! `docs/internals/simulator.md`.

use crate::abi::exports;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use tessera_cuda::types::*;

exports! {
    // Sparse arrays are not simulated.
    fn cuMemMapArrayAsync, cuMemMapArrayAsync_ptsz(_list: *mut CUarrayMapInfo, _count: c_uint, _stream: CUstream) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    // "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED" is 0.
    fn cuMemGetHandleForAddressRange(_handle: *mut c_void, _start: CUdeviceptr, _len: usize, _kind: c_int, _flags: u64) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    // Pools stay in their process.
    fn cuMemPoolImportFromShareableHandle(_pool: *mut CUmemoryPool, _handle: *mut c_void, _kind: c_int, _flags: c_ulonglong) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    // No graphics API runs beside: "CUDA in Graphics" is not supported.
    fn cuStreamBeginCaptureToCig, cuStreamBeginCaptureToCig_ptsz(_stream: CUstream, _params: *mut CUstreamCigCaptureParams) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuStreamEndCaptureToCig, cuStreamEndCaptureToCig_ptsz(_stream: CUstream) { Err(CUDA_ERROR_NOT_SUPPORTED) }
    // Recapture (CUDA 13.3).
    fn cuStreamBeginRecaptureToGraph, cuStreamBeginRecaptureToGraph_ptsz(_stream: CUstream, _mode: c_int, _graph: CUgraph, _callback: CUgraphRecaptureCallback, _data: *mut c_void) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
}
