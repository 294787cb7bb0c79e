//! Functions that the shim hooks and that are not built: see "Limits" in
//! `docs/internals/simulator.md`. Their signatures are the shim's table's.

use std::ffi::{c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use tessera_cuda::types::*;

/// `refuse!($ name …)` exports functions that fail with `CUDA_ERROR_NOT_SUPPORTED`.
macro_rules! refuse {
    ($d:tt $($name:ident)+) => {
        macro_rules! refused {
            ($d($d class:ident $d body:ident $d(($d($d taken:ident),*))? { $d($d export:ident @ $d since:literal $d flavour:ident),+ $d(,)? } $d args:tt;)*) => {
                $d($d(refused!(@one $d export $d args);)+)*
            };
            $((@one $name ($d($d arg:ident: $d ty:ty),* $d(,)?)) => {
                #[unsafe(no_mangle)]
                #[unsafe(link_section = concat!(".text.", stringify!($name)))]
                #[allow(non_snake_case, reason = "the driver API's own names")]
                pub unsafe extern "C" fn $name($d(_: $d ty),*) -> CUresult {
                    crate::driver::driver().err().unwrap_or(CUDA_ERROR_NOT_SUPPORTED)
                }
            };)+
            (@one $d export:ident $d args:tt) => {};
        }
    };
}

refuse! { $
    // Sparse arrays are not simulated.
    cuMemMapArrayAsync cuMemMapArrayAsync_ptsz
    // "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED" is 0.
    cuMemGetHandleForAddressRange
    // Pools stay in their process.
    cuMemPoolImportFromShareableHandle
    // The device that memory of a multicast object is bound for (CUDA 13.1).
    cuMulticastBindAddr_v2 cuMulticastBindMem_v2
    // No graphics API runs beside: "CUDA in Graphics" is not supported.
    cuStreamBeginCaptureToCig cuStreamBeginCaptureToCig_ptsz
    cuStreamEndCaptureToCig cuStreamEndCaptureToCig_ptsz
    // Contexts that count their users: deprecated since 4.0.
    cuCtxAttach cuCtxDetach
    // Recapture (CUDA 13.3).
    cuStreamBeginRecaptureToGraph cuStreamBeginRecaptureToGraph_ptsz
    // Rows, copies and fills with the 32-bit addresses that came before CUDA 3.2.
    cuMemAllocPitch
    cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyDtoA cuMemcpyAtoD cuMemcpyAtoA
    cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy2DAsync cuMemcpy3D cuMemcpy3DAsync
    cuMemsetD8 cuMemsetD16 cuMemsetD32 cuMemsetD2D8 cuMemsetD2D16 cuMemsetD2D32
    // Copies of an array's bytes in a row: its rows are copied as 2D and 3D ones.
    cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds
    cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds
    // Batches of operations on words, and what came before cuLaunchHostFunc.
    cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
    cuStreamAddCallback cuStreamAddCallback_ptsz
    // Batches of 3D copies, and single copies with a batch's attributes.
    cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz
    cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz
    cuMemcpy3DWithAttributesAsync cuMemcpy3DWithAttributesAsync_ptsz
    // No fabric, and no decompression engine.
    cuFabricCpyBatchAsync cuFabricCpyBatchAsync_ptsz
    cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz
}
tessera_cuda::for_each_hook!(refused);
