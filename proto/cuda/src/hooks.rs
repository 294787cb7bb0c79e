//! The one table of hooked driver functions.
//!
//! A row reads `class body { export @ minimum-version flavour, … } (arguments);`
//!
//! - **class** drives policy: `init`, `lookup`, `context`, `alloc`, `free`, `share`, `pool`,
//!   `graph`, `sync`, `query`, `launch`.
//! - **body** names the hook's implementation in `shim-core`; variants of one row share it, because
//!   their signatures are equal. Every variant keeps its own real pointer.
//! - **exports** are libcuda's own symbol names, with the CUDA version (`1000 * major + 10 * minor`)
//!   from which `cuGetProcAddress` answers them, and the flavour: `legacy` default stream or `ptsz`.
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
            init cuInit { cuInit @ 2000 legacy } (flags: c_uint);

            lookup cuGetProcAddress { cuGetProcAddress @ 11030 legacy }
                (symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t);
            lookup cuGetProcAddress_v2 { cuGetProcAddress_v2 @ 12000 legacy }
                (symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t,
                 status: *mut CUdriverProcAddressQueryResult);

            context cuCtxCreate { cuCtxCreate @ 2000 legacy, cuCtxCreate_v2 @ 3020 legacy }
                (pctx: *mut CUcontext, flags: c_uint, dev: CUdevice);
            context cuCtxCreate_v3 { cuCtxCreate_v3 @ 11040 legacy }
                (pctx: *mut CUcontext, params: *mut CUexecAffinityParam, num_params: c_int,
                 flags: c_uint, dev: CUdevice);
            context cuCtxCreate_v4 { cuCtxCreate_v4 @ 12050 legacy }
                (pctx: *mut CUcontext, params: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice);
            context cuCtxDestroy { cuCtxDestroy @ 2000 legacy, cuCtxDestroy_v2 @ 4000 legacy }
                (ctx: CUcontext);
            context cuCtxAttach { cuCtxAttach @ 2000 legacy } (pctx: *mut CUcontext, flags: c_uint);
            context cuCtxDetach { cuCtxDetach @ 2000 legacy } (ctx: CUcontext);
            context cuDevicePrimaryCtxRetain { cuDevicePrimaryCtxRetain @ 7000 legacy }
                (pctx: *mut CUcontext, dev: CUdevice);
            context cuDevicePrimaryCtxRelease {
                cuDevicePrimaryCtxRelease @ 7000 legacy, cuDevicePrimaryCtxRelease_v2 @ 11000 legacy
            } (dev: CUdevice);
            context cuDevicePrimaryCtxReset {
                cuDevicePrimaryCtxReset @ 7000 legacy, cuDevicePrimaryCtxReset_v2 @ 11000 legacy
            } (dev: CUdevice);

            alloc cuMemAlloc { cuMemAlloc_v2 @ 3020 legacy }
                (dptr: *mut CUdeviceptr, bytes: usize);
            alloc cuMemAlloc_v1 { cuMemAlloc @ 2000 legacy }
                (dptr: *mut CUdeviceptr_v1, bytes: c_uint);
            alloc cuMemAllocPitch { cuMemAllocPitch_v2 @ 3020 legacy }
                (dptr: *mut CUdeviceptr, pitch: *mut usize, width_bytes: usize, height: usize,
                 element_bytes: c_uint);
            alloc cuMemAllocPitch_v1 { cuMemAllocPitch @ 2000 legacy }
                (dptr: *mut CUdeviceptr_v1, pitch: *mut c_uint, width_bytes: c_uint, height: c_uint,
                 element_bytes: c_uint);
            alloc cuMemAllocManaged { cuMemAllocManaged @ 6000 legacy }
                (dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint);
            alloc cuMemAllocAsync {
                cuMemAllocAsync @ 11020 legacy, cuMemAllocAsync_ptsz @ 11020 ptsz
            } (dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream);
            alloc cuMemAllocFromPoolAsync {
                cuMemAllocFromPoolAsync @ 11020 legacy, cuMemAllocFromPoolAsync_ptsz @ 11020 ptsz
            } (dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);

            alloc cuArrayCreate { cuArrayCreate_v2 @ 3020 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR);
            alloc cuArrayCreate_v1 { cuArrayCreate @ 2000 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1);
            alloc cuArray3DCreate { cuArray3DCreate_v2 @ 3020 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR);
            alloc cuArray3DCreate_v1 { cuArray3DCreate @ 2000 legacy }
                (handle: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1);
            alloc cuMipmappedArrayCreate { cuMipmappedArrayCreate @ 5000 legacy }
                (handle: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
                 levels: c_uint);
            free cuArrayDestroy { cuArrayDestroy @ 2000 legacy } (array: CUarray);
            free cuMipmappedArrayDestroy { cuMipmappedArrayDestroy @ 5000 legacy }
                (array: CUmipmappedArray);

            alloc cuMemCreate { cuMemCreate @ 10020 legacy }
                (handle: *mut CUmemGenericAllocationHandle, bytes: usize,
                 prop: *const CUmemAllocationProp, flags: c_ulonglong);
            free cuMemRelease { cuMemRelease @ 10020 legacy }
                (handle: CUmemGenericAllocationHandle);
            share cuMemRetainAllocationHandle { cuMemRetainAllocationHandle @ 11000 legacy }
                (handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
            share cuMemMap { cuMemMap @ 10020 legacy }
                (pointer: CUdeviceptr, bytes: usize, offset: usize,
                 handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
            free cuMemUnmap { cuMemUnmap @ 10020 legacy } (pointer: CUdeviceptr, bytes: usize);
            share cuMemMapArrayAsync {
                cuMemMapArrayAsync @ 11010 legacy, cuMemMapArrayAsync_ptsz @ 11010 ptsz
            } (list: *mut CUarrayMapInfo, count: c_uint, stream: CUstream);
            share cuMemExportToShareableHandle { cuMemExportToShareableHandle @ 10020 legacy }
                (shareable: *mut c_void, handle: CUmemGenericAllocationHandle,
                 handle_type: CUmemAllocationHandleType, flags: c_ulonglong);
            share cuMemImportFromShareableHandle { cuMemImportFromShareableHandle @ 10020 legacy }
                (handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void,
                 handle_type: CUmemAllocationHandleType);
            share cuMemGetHandleForAddressRange { cuMemGetHandleForAddressRange @ 11070 legacy }
                (handle: *mut c_void, pointer: CUdeviceptr, bytes: usize,
                 handle_type: CUmemRangeHandleType, flags: c_ulonglong);
            share cuMulticastCreate { cuMulticastCreate @ 12010 legacy }
                (object: *mut CUmemGenericAllocationHandle, prop: *const CUmulticastObjectProp);
            share cuMulticastBindMem { cuMulticastBindMem @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, object_offset: usize,
                 memory: CUmemGenericAllocationHandle, offset: usize, bytes: usize,
                 flags: c_ulonglong);
            share cuMulticastBindMem_v2 { cuMulticastBindMem_v2 @ 13010 legacy }
                (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 memory: CUmemGenericAllocationHandle, offset: usize, bytes: usize,
                 flags: c_ulonglong);
            share cuMulticastBindAddr { cuMulticastBindAddr @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, object_offset: usize, pointer: CUdeviceptr,
                 bytes: usize, flags: c_ulonglong);
            share cuMulticastBindAddr_v2 { cuMulticastBindAddr_v2 @ 13010 legacy }
                (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong);
            free cuMulticastUnbind { cuMulticastUnbind @ 12010 legacy }
                (object: CUmemGenericAllocationHandle, dev: CUdevice, object_offset: usize,
                 bytes: usize);

            share cuIpcGetMemHandle { cuIpcGetMemHandle @ 4010 legacy }
                (handle: *mut CUipcMemHandle, pointer: CUdeviceptr);
            share cuIpcOpenMemHandle {
                cuIpcOpenMemHandle @ 4010 legacy, cuIpcOpenMemHandle_v2 @ 11000 legacy
            } (pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
            share cuIpcCloseMemHandle { cuIpcCloseMemHandle @ 4010 legacy } (pointer: CUdeviceptr);

            free cuMemFree { cuMemFree_v2 @ 3020 legacy } (dptr: CUdeviceptr);
            free cuMemFree_v1 { cuMemFree @ 2000 legacy } (dptr: CUdeviceptr_v1);
            free cuMemFreeAsync {
                cuMemFreeAsync @ 11020 legacy, cuMemFreeAsync_ptsz @ 11020 ptsz
            } (dptr: CUdeviceptr, stream: CUstream);

            pool cuMemPoolCreate { cuMemPoolCreate @ 11020 legacy }
                (pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
            pool cuMemPoolDestroy { cuMemPoolDestroy @ 11020 legacy } (pool: CUmemoryPool);
            pool cuMemPoolTrimTo { cuMemPoolTrimTo @ 11020 legacy }
                (pool: CUmemoryPool, min_bytes_to_keep: usize);
            pool cuMemPoolSetAttribute { cuMemPoolSetAttribute @ 11020 legacy }
                (pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void);

            pool cuMemPoolImportFromShareableHandle {
                cuMemPoolImportFromShareableHandle @ 11020 legacy
            } (pool: *mut CUmemoryPool, handle: *mut c_void, handle_type: CUmemAllocationHandleType,
               flags: c_ulonglong);
            pool cuMemGetDefaultMemPool { cuMemGetDefaultMemPool @ 13000 legacy }
                (pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: CUmemAllocationType);
            pool cuMemGetMemPool { cuMemGetMemPool @ 13000 legacy }
                (pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: CUmemAllocationType);

            graph cuGraphInstantiate {
                cuGraphInstantiate @ 10000 legacy, cuGraphInstantiate_v2 @ 11000 legacy
            } (pexec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode,
               log: *mut c_char, log_bytes: usize);
            graph cuGraphInstantiateWithFlags { cuGraphInstantiateWithFlags @ 11040 legacy }
                (pexec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
            graph cuGraphInstantiateWithParams {
                cuGraphInstantiateWithParams @ 12000 legacy,
                cuGraphInstantiateWithParams_ptsz @ 12000 ptsz
            } (pexec: *mut CUgraphExec, graph: CUgraph,
               params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
            graph cuGraphExecDestroy { cuGraphExecDestroy @ 10000 legacy } (exec: CUgraphExec);
            graph cuGraphExecUpdate { cuGraphExecUpdate @ 10020 legacy }
                (exec: CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode,
                 outcome: *mut CUgraphExecUpdateResult);
            graph cuGraphExecUpdate_v2 { cuGraphExecUpdate_v2 @ 12000 legacy }
                (exec: CUgraphExec, graph: CUgraph, outcome: *mut CUgraphExecUpdateResultInfo);
            graph cuGraphUpload { cuGraphUpload @ 11010 legacy, cuGraphUpload_ptsz @ 11010 ptsz }
                (exec: CUgraphExec, stream: CUstream);
            graph cuDeviceGraphMemTrim { cuDeviceGraphMemTrim @ 11040 legacy } (dev: CUdevice);

            sync cuStreamSynchronize {
                cuStreamSynchronize @ 2000 legacy, cuStreamSynchronize_ptsz @ 7000 ptsz
            } (stream: CUstream);
            sync cuEventSynchronize { cuEventSynchronize @ 2000 legacy } (event: CUevent);
            sync cuCtxSynchronize { cuCtxSynchronize @ 2000 legacy } ();
            sync cuCtxSynchronize_v2 { cuCtxSynchronize_v2 @ 13000 legacy } (ctx: CUcontext);

            query cuMemGetInfo { cuMemGetInfo_v2 @ 3020 legacy }
                (free: *mut usize, total: *mut usize);
            query cuMemGetInfo_v1 { cuMemGetInfo @ 2000 legacy }
                (free: *mut c_uint, total: *mut c_uint);
            query cuDeviceTotalMem { cuDeviceTotalMem_v2 @ 3020 legacy }
                (bytes: *mut usize, dev: CUdevice);
            query cuDeviceTotalMem_v1 { cuDeviceTotalMem @ 2000 legacy }
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
        }
    };
}

macro_rules! rows {
    ($($class:ident $body:ident { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
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
            /// `legacy` or `ptsz` (per-thread default stream).
            pub flavour: &'static str,
        }

        /// Every hooked export, in table order.
        pub const HOOKS: &[Hook] = &[
            $($(Hook {
                class: stringify!($class),
                body: stringify!($body),
                export: stringify!($export),
                since: $since,
                flavour: stringify!($flavour),
            },)+)*
        ];
    };
}
for_each_hook!(rows);
