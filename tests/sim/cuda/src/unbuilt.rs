//! Functions that the shim hooks or a client names, and that are not built: see "Limits" in
//! `docs/internals/simulator.md`.

use crate::abi::exports;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use tessera_cuda::types::*;

exports! {
    // Sparse arrays are not simulated.
    fn cuMemMapArrayAsync(_list: *mut CUarrayMapInfo, _count: c_uint, _stream: CUstream) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMemMapArrayAsync_ptsz(_list: *mut CUarrayMapInfo, _count: c_uint, _stream: CUstream) {
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
    fn cuStreamBeginCaptureToCig(_stream: CUstream, _params: *mut CUstreamCigCaptureParams) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuStreamBeginCaptureToCig_ptsz(_stream: CUstream, _params: *mut CUstreamCigCaptureParams) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuStreamEndCaptureToCig(_stream: CUstream) { Err(CUDA_ERROR_NOT_SUPPORTED) }
    fn cuStreamEndCaptureToCig_ptsz(_stream: CUstream) { Err(CUDA_ERROR_NOT_SUPPORTED) }
    // Recapture (CUDA 13.3).
    fn cuStreamBeginRecaptureToGraph(_stream: CUstream, _mode: c_int, _graph: CUgraph, _callback: CUgraphRecaptureCallback, _data: *mut c_void) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuStreamBeginRecaptureToGraph_ptsz(_stream: CUstream, _mode: c_int, _graph: CUgraph, _callback: CUgraphRecaptureCallback, _data: *mut c_void) {
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
}

macro_rules! unbuilt {
    ($($name:ident)*) => {
        exports! { $(fn $name() { Err(CUDA_ERROR_NOT_SUPPORTED) })* }
    };
}

// The shim hooks none of them; clients name them, and can say what is missing. (They take no
// argument of their callers.)
unbuilt! {
    cuTexObjectCreate cuSurfObjectCreate
    cuGraphClone cuGraphNodeGetParams
    cuMemAdvise cuMemAdvise_v2
    cuMemPoolGetAccess cuMemPoolSetAccess
    cuMemPrefetchAsync cuMemPrefetchAsync_ptsz cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz
    cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize
}
