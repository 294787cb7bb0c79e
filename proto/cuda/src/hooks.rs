//! The one table of hooked driver functions.
//!
//! A row reads `class body(what it takes) { export @ minimum-version flavour, … } (arguments);`
//!
//! - **class** drives policy: `init`, `lookup`, `context`, `alloc`, `free`, `share`, `pool`,
//!   `graph`, `sync`, `query`, `launch`, `work` (fills and copies), `batch` (those with many
//!   arguments), `stream`, `capture`.
//! - **body** names the hook's implementation in `shim-core`; variants of one row share it, because
//!   their signatures are equal, and rows of one function whose widths differ share a generic one.
//!   Every variant keeps its own real pointer. In parentheses is what the hook takes of the arguments; without them
//!   it takes all.
//! - **exports** are libcuda's own symbol names, with the CUDA version (`1000 * major + 10 * minor`)
//!   from which `cuGetProcAddress` answers them, and the flavour: `legacy`, or the thread's own default
//!   stream, `ptsz` where a stream is an argument and `ptds` where none is.
//! - Signatures are those of cuda.h (CUDA 12.9).
//!
//! Tests compare signatures with cudaTypedefs.h of CUDA 12.9 and 13.5, and versions and flavours with
//! what NVIDIA's driver 550 answers.
//!
//! [`for_each_hook!`] hands every row to the macro named by the caller.

/// Expands `$expand! { rows… }` with the whole table; see the module text for a row's form.
#[macro_export]
macro_rules! for_each_hook {
    ($expand:path) => {
        $expand! {
            init cuInit() { cuInit @ 2000 legacy } (flags: c_uint);

            lookup cuGetProcAddress { cuGetProcAddress @ 11030 legacy }
                (symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t);
            lookup cuGetProcAddress_v2 { cuGetProcAddress_v2 @ 12000 legacy }
                (symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t,
                 status: *mut CUdriverProcAddressQueryResult);

            context cuCtxCreate(pctx, dev) { cuCtxCreate @ 2000 legacy, cuCtxCreate_v2 @ 3020 legacy }
                (pctx: *mut CUcontext, flags: c_uint, dev: CUdevice);
            context cuCtxCreate_v3(pctx, dev) { cuCtxCreate_v3 @ 11040 legacy }
                (pctx: *mut CUcontext, params: *mut CUexecAffinityParam, num_params: c_int,
                 flags: c_uint, dev: CUdevice);
            context cuCtxCreate_v4(pctx, dev) { cuCtxCreate_v4 @ 12050 legacy }
                (pctx: *mut CUcontext, params: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice);
            context cuCtxDestroy { cuCtxDestroy @ 2000 legacy, cuCtxDestroy_v2 @ 4000 legacy }
                (ctx: CUcontext);
            context cuCtxAttach(pctx) { cuCtxAttach @ 2000 legacy } (pctx: *mut CUcontext, flags: c_uint);
            context cuCtxDetach { cuCtxDetach @ 2000 legacy } (ctx: CUcontext);
            context cuDevicePrimaryCtxRetain { cuDevicePrimaryCtxRetain @ 7000 legacy }
                (pctx: *mut CUcontext, dev: CUdevice);
            context cuDevicePrimaryCtxRelease {
                cuDevicePrimaryCtxRelease @ 7000 legacy, cuDevicePrimaryCtxRelease_v2 @ 11000 legacy
            } (dev: CUdevice);
            context cuDevicePrimaryCtxReset {
                cuDevicePrimaryCtxReset @ 7000 legacy, cuDevicePrimaryCtxReset_v2 @ 11000 legacy
            } (dev: CUdevice);

            context cuCtxSetLimit { cuCtxSetLimit @ 3010 legacy } (limit: CUlimit, value: usize);
            context cuModuleGetFunction(function) { cuModuleGetFunction @ 2000 legacy }
                (function: *mut CUfunction, module: CUmodule, name: *const c_char);
            context cuLibraryGetKernel(kernel) { cuLibraryGetKernel @ 12000 legacy }
                (kernel: *mut CUkernel, library: CUlibrary, name: *const c_char);
            context cuKernelGetFunction(function) { cuKernelGetFunction @ 12000 legacy }
                (function: *mut CUfunction, kernel: CUkernel);

            context cuGreenCtxCreate(dev) { cuGreenCtxCreate @ 12040 legacy }
                (pctx: *mut CUgreenCtx, desc: CUdevResourceDesc, dev: CUdevice, flags: c_uint);
            context cuGreenCtxDestroy { cuGreenCtxDestroy @ 12040 legacy } (ctx: CUgreenCtx);

            alloc cuMemAlloc { cuMemAlloc_v2 @ 3020 legacy }
                (dptr: *mut CUdeviceptr, bytes: usize);
            alloc cuMemAlloc { cuMemAlloc @ 2000 legacy }
                (dptr: *mut CUdeviceptr_v1, bytes: c_uint);
            alloc cuMemAllocPitch(dptr, pitch, width_bytes, height) { cuMemAllocPitch_v2 @ 3020 legacy }
                (dptr: *mut CUdeviceptr, pitch: *mut usize, width_bytes: usize, height: usize,
                 element_bytes: c_uint);
            alloc cuMemAllocPitch(dptr, pitch, width_bytes, height) { cuMemAllocPitch @ 2000 legacy }
                (dptr: *mut CUdeviceptr_v1, pitch: *mut c_uint, width_bytes: c_uint, height: c_uint,
                 element_bytes: c_uint);
            alloc cuMemAllocManaged(dptr, bytes) { cuMemAllocManaged @ 6000 legacy }
                (dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint);
            alloc cuMemAllocAsync {
                cuMemAllocAsync @ 11020 legacy, cuMemAllocAsync_ptsz @ 11020 ptsz
            } (dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream);
            alloc cuMemAllocFromPoolAsync {
                cuMemAllocFromPoolAsync @ 11020 legacy, cuMemAllocFromPoolAsync_ptsz @ 11020 ptsz
            } (dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);

            alloc cuArrayCreate { cuArrayCreate_v2 @ 3020 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR);
            alloc cuArrayCreate { cuArrayCreate @ 2000 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1);
            alloc cuArray3DCreate { cuArray3DCreate_v2 @ 3020 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR);
            alloc cuArray3DCreate { cuArray3DCreate @ 2000 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1);
            alloc cuMipmappedArrayCreate { cuMipmappedArrayCreate @ 5000 legacy }
                (handle: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
                 levels: c_uint);
            free cuArrayDestroy { cuArrayDestroy @ 2000 legacy } (array: CUarray);
            free cuMipmappedArrayDestroy { cuMipmappedArrayDestroy @ 5000 legacy }
                (array: CUmipmappedArray);

            alloc cuMemCreate(handle, bytes, prop) { cuMemCreate @ 10020 legacy }
                (handle: *mut CUmemGenericAllocationHandle, bytes: usize,
                 prop: *const CUmemAllocationProp, flags: c_ulonglong);
            free cuMemRelease { cuMemRelease @ 10020 legacy }
                (handle: CUmemGenericAllocationHandle);
            share cuMemRetainAllocationHandle(address) { cuMemRetainAllocationHandle @ 11000 legacy }
                (handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
            share cuMemMap(pointer, bytes, handle) { cuMemMap @ 10020 legacy }
                (pointer: CUdeviceptr, bytes: usize, offset: usize,
                 handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
            free cuMemUnmap { cuMemUnmap @ 10020 legacy } (pointer: CUdeviceptr, bytes: usize);
            share cuMemMapArrayAsync {
                cuMemMapArrayAsync @ 11010 legacy, cuMemMapArrayAsync_ptsz @ 11010 ptsz
            } (list: *mut CUarrayMapInfo, count: c_uint, stream: CUstream);
            share cuMemExportToShareableHandle(shareable, handle, handle_type) {
                cuMemExportToShareableHandle @ 10020 legacy
            } (shareable: *mut c_void, handle: CUmemGenericAllocationHandle,
                 handle_type: CUmemAllocationHandleType, flags: c_ulonglong);
            share cuMemImportFromShareableHandle { cuMemImportFromShareableHandle @ 10020 legacy }
                (handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void,
                 handle_type: CUmemAllocationHandleType);
            share cuMemGetHandleForAddressRange(handle, pointer, bytes, handle_type) {
                cuMemGetHandleForAddressRange @ 11070 legacy
            } (handle: *mut c_void, pointer: CUdeviceptr, bytes: usize,
                 handle_type: CUmemRangeHandleType, flags: c_ulonglong);
            share cuMulticastCreate(object) { cuMulticastCreate @ 12010 legacy }
                (object: *mut CUmemGenericAllocationHandle, prop: *const CUmulticastObjectProp);
            share cuMulticastBindMem(object, object_offset, memory) { cuMulticastBindMem @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, object_offset: usize,
                 memory: CUmemGenericAllocationHandle, offset: usize, bytes: usize,
                 flags: c_ulonglong);
            share cuMulticastBindMem_v2(object, dev, object_offset, memory) {
                cuMulticastBindMem_v2 @ 13010 legacy
            } (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 memory: CUmemGenericAllocationHandle, offset: usize, bytes: usize,
                 flags: c_ulonglong);
            share cuMulticastBindAddr(object, object_offset, pointer) { cuMulticastBindAddr @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, object_offset: usize, pointer: CUdeviceptr,
                 bytes: usize, flags: c_ulonglong);
            share cuMulticastBindAddr_v2(object, dev, object_offset, pointer) {
                cuMulticastBindAddr_v2 @ 13010 legacy
            } (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong);
            free cuMulticastUnbind { cuMulticastUnbind @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 bytes: usize);

            share cuIpcGetMemHandle { cuIpcGetMemHandle @ 4010 legacy }
                (handle: *mut CUipcMemHandle, pointer: CUdeviceptr);
            share cuIpcOpenMemHandle(pointer, handle) {
                cuIpcOpenMemHandle @ 4010 legacy, cuIpcOpenMemHandle_v2 @ 11000 legacy
            } (pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
            share cuIpcCloseMemHandle { cuIpcCloseMemHandle @ 4010 legacy } (pointer: CUdeviceptr);

            free cuMemFree { cuMemFree_v2 @ 3020 legacy } (dptr: CUdeviceptr);
            free cuMemFree { cuMemFree @ 2000 legacy } (dptr: CUdeviceptr_v1);
            free cuMemFreeAsync(dptr) {
                cuMemFreeAsync @ 11020 legacy, cuMemFreeAsync_ptsz @ 11020 ptsz
            } (dptr: CUdeviceptr, stream: CUstream);

            pool cuMemPoolCreate { cuMemPoolCreate @ 11020 legacy }
                (pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
            pool cuMemPoolDestroy { cuMemPoolDestroy @ 11020 legacy } (pool: CUmemoryPool);
            pool cuMemPoolTrimTo(pool) { cuMemPoolTrimTo @ 11020 legacy }
                (pool: CUmemoryPool, min_bytes_to_keep: usize);
            pool cuMemPoolSetAttribute { cuMemPoolSetAttribute @ 11020 legacy }
                (pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void);

            pool cuMemPoolImportFromShareableHandle(pool) {
                cuMemPoolImportFromShareableHandle @ 11020 legacy
            } (pool: *mut CUmemoryPool, handle: *mut c_void, handle_type: CUmemAllocationHandleType,
               flags: c_ulonglong);
            pool cuMemGetDefaultMemPool { cuMemGetDefaultMemPool @ 13000 legacy }
                (pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: CUmemAllocationType);
            pool cuMemGetMemPool { cuMemGetMemPool @ 13000 legacy }
                (pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: CUmemAllocationType);

            graph cuGraphInstantiate(pexec, graph) {
                cuGraphInstantiate @ 10000 legacy, cuGraphInstantiate_v2 @ 11000 legacy
            } (pexec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode,
               log: *mut c_char, log_bytes: usize);
            graph cuGraphInstantiateWithFlags(pexec, graph) { cuGraphInstantiateWithFlags @ 11040 legacy }
                (pexec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
            graph cuGraphInstantiateWithParams {
                cuGraphInstantiateWithParams @ 12000 legacy,
                cuGraphInstantiateWithParams_ptsz @ 12000 ptsz
            } (pexec: *mut CUgraphExec, graph: CUgraph,
               params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
            graph cuGraphExecDestroy { cuGraphExecDestroy @ 10000 legacy } (exec: CUgraphExec);
            graph cuGraphExecUpdate(exec, graph) { cuGraphExecUpdate @ 10020 legacy }
                (exec: CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode,
                 outcome: *mut CUgraphExecUpdateResult);
            graph cuGraphExecUpdate_v2(exec, graph) { cuGraphExecUpdate_v2 @ 12000 legacy }
                (exec: CUgraphExec, graph: CUgraph, outcome: *mut CUgraphExecUpdateResultInfo);
            graph cuGraphExecKernelNodeSetParams(params) {
                cuGraphExecKernelNodeSetParams @ 10010 legacy
            } (exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v1);
            graph cuGraphExecKernelNodeSetParams(params) {
                cuGraphExecKernelNodeSetParams_v2 @ 12000 legacy
            } (exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS);
            graph cuGraphExecNodeSetParams(params) { cuGraphExecNodeSetParams @ 12020 legacy }
                (exec: CUgraphExec, node: CUgraphNode, params: *mut CUgraphNodeParams);
            graph cuGraphUpload { cuGraphUpload @ 11010 legacy, cuGraphUpload_ptsz @ 11010 ptsz }
                (exec: CUgraphExec, stream: CUstream);
            graph cuDeviceGraphMemTrim { cuDeviceGraphMemTrim @ 11040 legacy } (dev: CUdevice);

            sync cuStreamSynchronize {
                cuStreamSynchronize @ 2000 legacy, cuStreamSynchronize_ptsz @ 7000 ptsz
            } (stream: CUstream);
            sync cuEventSynchronize() { cuEventSynchronize @ 2000 legacy } (event: CUevent);
            sync cuCtxSynchronize { cuCtxSynchronize @ 2000 legacy } ();
            sync cuCtxSynchronize_v2 { cuCtxSynchronize_v2 @ 13000 legacy } (ctx: CUcontext);

            query cuMemGetInfo { cuMemGetInfo_v2 @ 3020 legacy }
                (free: *mut usize, total: *mut usize);
            query cuMemGetInfo { cuMemGetInfo @ 2000 legacy }
                (free: *mut c_uint, total: *mut c_uint);
            query cuDeviceTotalMem { cuDeviceTotalMem_v2 @ 3020 legacy }
                (bytes: *mut usize, dev: CUdevice);
            query cuDeviceTotalMem { cuDeviceTotalMem @ 2000 legacy }
                (bytes: *mut c_uint, dev: CUdevice);

            launch cuLaunchKernel {
                cuLaunchKernel @ 4000 legacy, cuLaunchKernel_ptsz @ 7000 ptsz
            } (f: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
               block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream,
               params: *mut *mut c_void, extra: *mut *mut c_void);
            launch cuLaunchKernelEx {
                cuLaunchKernelEx @ 11060 legacy, cuLaunchKernelEx_ptsz @ 11060 ptsz
            } (config: *const CUlaunchConfig, f: CUfunction, params: *mut *mut c_void,
               extra: *mut *mut c_void);
            launch cuLaunchCooperativeKernel {
                cuLaunchCooperativeKernel @ 9000 legacy, cuLaunchCooperativeKernel_ptsz @ 9000 ptsz
            } (f: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
               block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream,
               params: *mut *mut c_void);
            launch cuLaunchCooperativeKernelMultiDevice {
                cuLaunchCooperativeKernelMultiDevice @ 9000 legacy
            } (launches: *mut CUDA_LAUNCH_PARAMS, devices: c_uint, flags: c_uint);
            launch cuGraphLaunch { cuGraphLaunch @ 10000 legacy, cuGraphLaunch_ptsz @ 10000 ptsz }
                (graph: CUgraphExec, stream: CUstream);
            launch cuLaunch { cuLaunch @ 2000 legacy } (f: CUfunction);
            launch cuLaunchGrid { cuLaunchGrid @ 2000 legacy }
                (f: CUfunction, grid_width: c_int, grid_height: c_int);
            launch cuLaunchGridAsync { cuLaunchGridAsync @ 2000 legacy }
                (f: CUfunction, grid_width: c_int, grid_height: c_int, stream: CUstream);

            work cuMemsetD8 { cuMemsetD8_v2 @ 3020 legacy, cuMemsetD8_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, value: c_uchar, count: usize);
            work cuMemsetD8_v1 { cuMemsetD8 @ 2000 legacy }
                (dst: CUdeviceptr_v1, value: c_uchar, count: c_uint);
            work cuMemsetD16 { cuMemsetD16_v2 @ 3020 legacy, cuMemsetD16_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, value: c_ushort, count: usize);
            work cuMemsetD16_v1 { cuMemsetD16 @ 2000 legacy }
                (dst: CUdeviceptr_v1, value: c_ushort, count: c_uint);
            work cuMemsetD32 { cuMemsetD32_v2 @ 3020 legacy, cuMemsetD32_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, value: c_uint, count: usize);
            work cuMemsetD32_v1 { cuMemsetD32 @ 2000 legacy }
                (dst: CUdeviceptr_v1, value: c_uint, count: c_uint);
            work cuMemsetD2D8 { cuMemsetD2D8_v2 @ 3020 legacy, cuMemsetD2D8_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize);
            work cuMemsetD2D8_v1 { cuMemsetD2D8 @ 2000 legacy }
                (dst: CUdeviceptr_v1, pitch: c_uint, value: c_uchar, width: c_uint, height: c_uint);
            work cuMemsetD2D16 { cuMemsetD2D16_v2 @ 3020 legacy, cuMemsetD2D16_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize);
            work cuMemsetD2D16_v1 { cuMemsetD2D16 @ 2000 legacy }
                (dst: CUdeviceptr_v1, pitch: c_uint, value: c_ushort, width: c_uint,
                 height: c_uint);
            work cuMemsetD2D32 { cuMemsetD2D32_v2 @ 3020 legacy, cuMemsetD2D32_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize);
            work cuMemsetD2D32_v1 { cuMemsetD2D32 @ 2000 legacy }
                (dst: CUdeviceptr_v1, pitch: c_uint, value: c_uint, width: c_uint, height: c_uint);
            work cuMemsetD8Async { cuMemsetD8Async @ 3020 legacy, cuMemsetD8Async_ptsz @ 7000 ptsz }
                (dst: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
            work cuMemsetD16Async {
                cuMemsetD16Async @ 3020 legacy, cuMemsetD16Async_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
            work cuMemsetD32Async {
                cuMemsetD32Async @ 3020 legacy, cuMemsetD32Async_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
            work cuMemsetD2D8Async {
                cuMemsetD2D8Async @ 3020 legacy, cuMemsetD2D8Async_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize,
                 stream: CUstream);
            work cuMemsetD2D16Async {
                cuMemsetD2D16Async @ 3020 legacy, cuMemsetD2D16Async_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize,
                 stream: CUstream);
            work cuMemsetD2D32Async {
                cuMemsetD2D32Async @ 3020 legacy, cuMemsetD2D32Async_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize,
                 stream: CUstream);

            work cuMemcpy { cuMemcpy @ 4000 legacy, cuMemcpy_ptds @ 7000 ptds }
                (dst: CUdeviceptr, src: CUdeviceptr, bytes: usize);
            work cuMemcpyAsync { cuMemcpyAsync @ 4000 legacy, cuMemcpyAsync_ptsz @ 7000 ptsz }
                (dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
            work cuMemcpyWithAttributesAsync {
                cuMemcpyWithAttributesAsync @ 13020 legacy,
                cuMemcpyWithAttributesAsync_ptsz @ 13020 ptsz
            } (dst: CUdeviceptr, src: CUdeviceptr, bytes: usize,
                 attributes: *mut CUmemcpyAttributes, stream: CUstream);
            work cuMemcpyPeer { cuMemcpyPeer @ 4000 legacy, cuMemcpyPeer_ptds @ 7000 ptds }
                (dst: CUdeviceptr, dst_ctx: CUcontext, src: CUdeviceptr, src_ctx: CUcontext,
                 bytes: usize);
            work cuMemcpyPeerAsync {
                cuMemcpyPeerAsync @ 4000 legacy, cuMemcpyPeerAsync_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, dst_ctx: CUcontext, src: CUdeviceptr, src_ctx: CUcontext,
                 bytes: usize, stream: CUstream);
            work cuMemcpyDtoD { cuMemcpyDtoD_v2 @ 3020 legacy, cuMemcpyDtoD_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, src: CUdeviceptr, bytes: usize);
            work cuMemcpyDtoD_v1 { cuMemcpyDtoD @ 2000 legacy }
                (dst: CUdeviceptr_v1, src: CUdeviceptr_v1, bytes: c_uint);
            work cuMemcpyDtoDAsync {
                cuMemcpyDtoDAsync_v2 @ 3020 legacy, cuMemcpyDtoDAsync_v2_ptsz @ 7000 ptsz
            } (dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
            work cuMemcpyDtoDAsync_v1 { cuMemcpyDtoDAsync @ 3000 legacy }
                (dst: CUdeviceptr_v1, src: CUdeviceptr_v1, bytes: c_uint, stream: CUstream);
            work cuMemcpyDtoA { cuMemcpyDtoA_v2 @ 3020 legacy, cuMemcpyDtoA_v2_ptds @ 7000 ptds }
                (dst: CUarray, offset: usize, src: CUdeviceptr, bytes: usize);
            work cuMemcpyDtoA_v1 { cuMemcpyDtoA @ 2000 legacy }
                (dst: CUarray, offset: c_uint, src: CUdeviceptr_v1, bytes: c_uint);
            work cuMemcpyAtoD { cuMemcpyAtoD_v2 @ 3020 legacy, cuMemcpyAtoD_v2_ptds @ 7000 ptds }
                (dst: CUdeviceptr, src: CUarray, offset: usize, bytes: usize);
            work cuMemcpyAtoD_v1 { cuMemcpyAtoD @ 2000 legacy }
                (dst: CUdeviceptr_v1, src: CUarray, offset: c_uint, bytes: c_uint);
            work cuMemcpyAtoA { cuMemcpyAtoA_v2 @ 3020 legacy, cuMemcpyAtoA_v2_ptds @ 7000 ptds }
                (dst: CUarray, dst_offset: usize, src: CUarray, src_offset: usize, bytes: usize);
            work cuMemcpyAtoA_v1 { cuMemcpyAtoA @ 2000 legacy }
                (dst: CUarray, dst_offset: c_uint, src: CUarray, src_offset: c_uint, bytes: c_uint);
            work cuMemcpy2D { cuMemcpy2D_v2 @ 3020 legacy, cuMemcpy2D_v2_ptds @ 7000 ptds }
                (copy: *const CUDA_MEMCPY2D);
            work cuMemcpy2D_v1 { cuMemcpy2D @ 2000 legacy } (copy: *const CUDA_MEMCPY2D_v1);
            work cuMemcpy2DUnaligned {
                cuMemcpy2DUnaligned_v2 @ 3020 legacy, cuMemcpy2DUnaligned_v2_ptds @ 7000 ptds
            } (copy: *const CUDA_MEMCPY2D);
            work cuMemcpy2DUnaligned_v1 { cuMemcpy2DUnaligned @ 2000 legacy }
                (copy: *const CUDA_MEMCPY2D_v1);
            work cuMemcpy2DAsync {
                cuMemcpy2DAsync_v2 @ 3020 legacy, cuMemcpy2DAsync_v2_ptsz @ 7000 ptsz
            } (copy: *const CUDA_MEMCPY2D, stream: CUstream);
            work cuMemcpy2DAsync_v1 { cuMemcpy2DAsync @ 2000 legacy }
                (copy: *const CUDA_MEMCPY2D_v1, stream: CUstream);
            work cuMemcpy3D { cuMemcpy3D_v2 @ 3020 legacy, cuMemcpy3D_v2_ptds @ 7000 ptds }
                (copy: *const CUDA_MEMCPY3D);
            work cuMemcpy3D_v1 { cuMemcpy3D @ 2000 legacy } (copy: *const CUDA_MEMCPY3D_v1);
            work cuMemcpy3DAsync {
                cuMemcpy3DAsync_v2 @ 3020 legacy, cuMemcpy3DAsync_v2_ptsz @ 7000 ptsz
            } (copy: *const CUDA_MEMCPY3D, stream: CUstream);
            work cuMemcpy3DAsync_v1 { cuMemcpy3DAsync @ 2000 legacy }
                (copy: *const CUDA_MEMCPY3D_v1, stream: CUstream);
            work cuMemcpy3DPeer { cuMemcpy3DPeer @ 4000 legacy, cuMemcpy3DPeer_ptds @ 7000 ptds }
                (copy: *const CUDA_MEMCPY3D_PEER);
            work cuMemcpy3DPeerAsync {
                cuMemcpy3DPeerAsync @ 4000 legacy, cuMemcpy3DPeerAsync_ptsz @ 7000 ptsz
            } (copy: *const CUDA_MEMCPY3D_PEER, stream: CUstream);
            work cuMemcpy3DWithAttributesAsync {
                cuMemcpy3DWithAttributesAsync @ 13020 legacy,
                cuMemcpy3DWithAttributesAsync_ptsz @ 13020 ptsz
            } (op: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, stream: CUstream);
            batch cuMemcpyBatchAsync {
                cuMemcpyBatchAsync @ 12080 legacy, cuMemcpyBatchAsync_ptsz @ 12080 ptsz
            } (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                 attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize,
                 failed: *mut usize, stream: CUstream);
            batch cuMemcpyBatchAsync_v2 {
                cuMemcpyBatchAsync_v2 @ 13000 legacy, cuMemcpyBatchAsync_v2_ptsz @ 13000 ptsz
            } (dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                 attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize,
                 stream: CUstream);
            work cuMemcpy3DBatchAsync {
                cuMemcpy3DBatchAsync @ 12080 legacy, cuMemcpy3DBatchAsync_ptsz @ 12080 ptsz
            } (count: usize, ops: *mut CUDA_MEMCPY3D_BATCH_OP, failed: *mut usize,
                 flags: c_ulonglong, stream: CUstream);
            work cuMemcpy3DBatchAsync_v2 {
                cuMemcpy3DBatchAsync_v2 @ 13000 legacy, cuMemcpy3DBatchAsync_v2_ptsz @ 13000 ptsz
            } (count: usize, ops: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong,
                 stream: CUstream);
            work cuFabricCpyBatchAsync {
                cuFabricCpyBatchAsync @ 13050 legacy, cuFabricCpyBatchAsync_ptsz @ 13050 ptsz
            } (count: usize, ops: *mut CUDA_FABRIC_COPY_BATCH_OP, flags: c_ulonglong,
                 stream: CUstream);
            work cuMemBatchDecompressAsync {
                cuMemBatchDecompressAsync @ 12060 legacy,
                cuMemBatchDecompressAsync_ptsz @ 12060 ptsz
            } (params: *mut CUmemDecompressParams, count: usize, flags: c_uint, failed: *mut usize,
                 stream: CUstream);

            stream cuStreamDestroy {
                cuStreamDestroy @ 2000 legacy, cuStreamDestroy_v2 @ 4000 legacy
            } (stream: CUstream);
            stream cuStreamWaitEvent {
                cuStreamWaitEvent @ 3020 legacy, cuStreamWaitEvent_ptsz @ 7000 ptsz
            } (stream: CUstream, event: CUevent, flags: c_uint);
            stream cuLaunchHostFunc {
                cuLaunchHostFunc @ 10000 legacy, cuLaunchHostFunc_ptsz @ 10000 ptsz
            } (stream: CUstream, function: CUhostFn, data: *mut c_void);
            stream cuLaunchHostFunc_v2 {
                cuLaunchHostFunc_v2 @ 13010 legacy, cuLaunchHostFunc_v2_ptsz @ 13010 ptsz
            } (stream: CUstream, function: CUhostFn, data: *mut c_void, mode: c_uint);
            stream cuStreamAddCallback {
                cuStreamAddCallback @ 5000 legacy, cuStreamAddCallback_ptsz @ 7000 ptsz
            } (stream: CUstream, callback: CUstreamCallback, data: *mut c_void, flags: c_uint);
            stream cuStreamWaitValue32 {
                cuStreamWaitValue32 @ 8000 legacy, cuStreamWaitValue32_ptsz @ 8000 ptsz,
                cuStreamWaitValue32_v2 @ 11070 legacy, cuStreamWaitValue32_v2_ptsz @ 11070 ptsz
            } (stream: CUstream, address: CUdeviceptr, value: cuuint32_t, flags: c_uint);
            stream cuStreamWaitValue64 {
                cuStreamWaitValue64 @ 9000 legacy, cuStreamWaitValue64_ptsz @ 9000 ptsz,
                cuStreamWaitValue64_v2 @ 11070 legacy, cuStreamWaitValue64_v2_ptsz @ 11070 ptsz
            } (stream: CUstream, address: CUdeviceptr, value: cuuint64_t, flags: c_uint);
            stream cuStreamBatchMemOp {
                cuStreamBatchMemOp @ 8000 legacy, cuStreamBatchMemOp_ptsz @ 8000 ptsz,
                cuStreamBatchMemOp_v2 @ 11070 legacy, cuStreamBatchMemOp_v2_ptsz @ 11070 ptsz
            } (stream: CUstream, count: c_uint, ops: *mut CUstreamBatchMemOpParams, flags: c_uint);
            stream cuWaitExternalSemaphoresAsync {
                cuWaitExternalSemaphoresAsync @ 10000 legacy,
                cuWaitExternalSemaphoresAsync_ptsz @ 10000 ptsz
            } (semaphores: *const CUexternalSemaphore,
                 params: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint,
                 stream: CUstream);
            capture cuStreamBeginCapture {
                cuStreamBeginCapture @ 10000 legacy, cuStreamBeginCapture_ptsz @ 10000 ptsz
            } (stream: CUstream);
            capture cuStreamBeginCapture_v2 {
                cuStreamBeginCapture_v2 @ 10010 legacy, cuStreamBeginCapture_v2_ptsz @ 10010 ptsz
            } (stream: CUstream, mode: CUstreamCaptureMode);
            capture cuStreamBeginCaptureToGraph {
                cuStreamBeginCaptureToGraph @ 12030 legacy,
                cuStreamBeginCaptureToGraph_ptsz @ 12030 ptsz
            } (stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode,
                 edges: *const CUgraphEdgeData, count: usize, mode: CUstreamCaptureMode);
            capture cuStreamBeginRecaptureToGraph {
                cuStreamBeginRecaptureToGraph @ 13030 legacy,
                cuStreamBeginRecaptureToGraph_ptsz @ 13030 ptsz
            } (stream: CUstream, mode: CUstreamCaptureMode, graph: CUgraph,
                 callback: CUgraphRecaptureCallback, user_data: *mut c_void);
            capture cuStreamBeginCaptureToCig {
                cuStreamBeginCaptureToCig @ 13010 legacy,
                cuStreamBeginCaptureToCig_ptsz @ 13010 ptsz
            } (stream: CUstream, params: *mut CUstreamCigCaptureParams);
            capture cuStreamEndCapture {
                cuStreamEndCapture @ 10000 legacy, cuStreamEndCapture_ptsz @ 10000 ptsz
            } (stream: CUstream, graph: *mut CUgraph);
            capture cuStreamEndCaptureToCig {
                cuStreamEndCaptureToCig @ 13010 legacy, cuStreamEndCaptureToCig_ptsz @ 13010 ptsz
            } (stream: CUstream);
        }
    };
}

macro_rules! rows {
    ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        /// One exported symbol that Tessera hooks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Hook {
            /// Policy class: `alloc`, `free`, `launch`, ….
            pub class: &'static str,
            /// The hook's body in `shim-core`, shared by variants of equal signature.
            pub body: &'static str,
            /// libcuda's export.
            pub export: &'static str,
            /// CUDA version from which `cuGetProcAddress` answers this variant (12040 is 12.4).
            pub since: u32,
            /// `legacy`, or `ptsz` or `ptds` (per-thread default stream).
            pub flavour: &'static str,
            /// The argument list as it is written.
            pub arguments: &'static str,
        }

        /// Every hooked export, in table order.
        pub const HOOKS: &[Hook] = &[
            $($(Hook {
                class: stringify!($class),
                body: stringify!($body),
                export: stringify!($export),
                since: $since,
                flavour: stringify!($flavour),
                arguments: stringify!($args),
            },)+)*
        ];
    };
}
for_each_hook!(rows);
