//! `cuGetProcAddress`: CUDA Driver API, "Driver Entry Point Access".
//!
//! The table follows cudaTypedefs.h of CUDA 13.0 (`PFN_<name>_v<version>[_ptsz|_ptds]`): a name
//! means the newest variant that the caller's CUDA version knows.

use crate::abi::{cstr, exports, put, put_if};
use crate::driver::{cuda_version_before_init, driver};
use crate::errors::Result;
use crate::stream::Flavour;
use std::ffi::{c_char, c_int, c_void};
use tessera_cuda::types::{
    CU_GET_PROC_ADDRESS_DEFAULT, CU_GET_PROC_ADDRESS_LEGACY_STREAM,
    CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CU_GET_PROC_ADDRESS_SUCCESS,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUdriverProcAddressQueryResult, cuuint64_t,
};

/// One variant of one name.
pub(crate) struct Variant {
    /// The name to ask for.
    pub name: &'static str,
    /// CUDA version from which this variant is the answer.
    pub since: u32,
    /// Which default stream it means.
    pub flavour: Flavour,
    /// Its export.
    #[cfg_attr(not(test), allow(dead_code, reason = "read by tests"))]
    pub export: &'static str,
    address: Address,
}

struct Address(*const c_void);
// SAFETY: addresses of functions, which any thread may read.
unsafe impl Sync for Address {}

macro_rules! variants {
    ($($name:ident $since:literal $flavour:ident => $export:ident;)*) => {
        /// All variants, by name.
        pub(crate) static VARIANTS: &[Variant] = &[$(Variant {
            name: stringify!($name),
            since: $since,
            flavour: Flavour::$flavour,
            export: stringify!($export),
            address: Address(crate::exports::$export as *const c_void),
        },)*];
    };
}

/// What a lookup found.
enum Found {
    Symbol(*const c_void),
    Unknown,
    TooNew,
}

/// The variant of `name` for a caller of `version`, from a driver of version `driver`.
fn find(name: &str, version: u32, flavour: Flavour, driver: u32) -> Found {
    let from = VARIANTS.partition_point(|v| v.name < name);
    // An older driver has never heard of what came later.
    let mine =
        || VARIANTS[from..].iter().take_while(|v| v.name == name).filter(|v| v.since <= driver);
    if mine().next().is_none() {
        return Found::Unknown;
    }
    // A function with a per-thread variant has only that for a caller who wants it, even if it is
    // too new; one without has only the legacy variant. (So does NVIDIA's 550.163.01.)
    let own = flavour == Flavour::PerThread && mine().any(|v| v.flavour == flavour);
    let wanted = if own { Flavour::PerThread } else { Flavour::Legacy };
    let known = mine().filter(|v| v.flavour == wanted && v.since <= version);
    match known.max_by_key(|v| v.since) {
        Some(v) => Found::Symbol(v.address.0),
        None => Found::TooNew,
    }
}

fn look_up(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: cuuint64_t,
) -> Result<Found> {
    let name = cstr(symbol)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    const BOTH: cuuint64_t =
        CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if flags & !BOTH != CU_GET_PROC_ADDRESS_DEFAULT {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM != 0;
    let flavour = if per_thread { Flavour::PerThread } else { Flavour::Legacy };
    let known = match driver() {
        Ok(d) => d.session.config().cuda_version,
        Err(_) => cuda_version_before_init(),
    };
    // A negative version reads as a huge one.
    Ok(find(name, version.cast_unsigned(), flavour, known))
}

exports! {
    // As NVIDIA's 550.163.01 does: v1 fails and leaves the pointer alone …
    fn cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t) {
        match look_up(symbol, pfn, cuda_version, flags)? {
            Found::Symbol(p) => put(pfn, p.cast_mut()),
            Found::Unknown | Found::TooNew => Err(CUDA_ERROR_NOT_FOUND),
        }
    }

    // … and v2 succeeds with a null pointer and a status that says why.
    fn cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t, status: *mut CUdriverProcAddressQueryResult) {
        let (pointer, found) = match look_up(symbol, pfn, cuda_version, flags)? {
            Found::Symbol(p) => (p, CU_GET_PROC_ADDRESS_SUCCESS),
            Found::Unknown => (std::ptr::null(), CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
            Found::TooNew => (std::ptr::null(), CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
        };
        put(pfn, pointer.cast_mut())?;
        put_if(status, found);
        Ok(())
    }
}

variants! {
    cuArray3DCreate 2000 Legacy => cuArray3DCreate;
    cuArray3DCreate 3020 Legacy => cuArray3DCreate_v2;
    cuArrayCreate 2000 Legacy => cuArrayCreate;
    cuArrayCreate 3020 Legacy => cuArrayCreate_v2;
    cuArrayDestroy 2000 Legacy => cuArrayDestroy;
    cuArrayGetMemoryRequirements 11060 Legacy => cuArrayGetMemoryRequirements;
    cuCtxAttach 2000 Legacy => cuCtxAttach;
    cuCtxCreate 2000 Legacy => cuCtxCreate;
    cuCtxCreate 3020 Legacy => cuCtxCreate_v2;
    cuCtxCreate 11040 Legacy => cuCtxCreate_v3;
    cuCtxCreate 12050 Legacy => cuCtxCreate_v4;
    cuCtxDestroy 2000 Legacy => cuCtxDestroy;
    cuCtxDestroy 4000 Legacy => cuCtxDestroy_v2;
    cuCtxDetach 2000 Legacy => cuCtxDetach;
    cuCtxEnablePeerAccess 4000 Legacy => cuCtxEnablePeerAccess;
    cuCtxFromGreenCtx 12040 Legacy => cuCtxFromGreenCtx;
    cuCtxGetCacheConfig 3020 Legacy => cuCtxGetCacheConfig;
    cuCtxGetCurrent 4000 Legacy => cuCtxGetCurrent;
    cuCtxGetDevice 2000 Legacy => cuCtxGetDevice;
    cuCtxGetDevice 13000 Legacy => cuCtxGetDevice_v2;
    cuCtxGetLimit 3010 Legacy => cuCtxGetLimit;
    cuCtxGetStreamPriorityRange 5050 Legacy => cuCtxGetStreamPriorityRange;
    cuCtxPopCurrent 2000 Legacy => cuCtxPopCurrent;
    cuCtxPopCurrent 4000 Legacy => cuCtxPopCurrent_v2;
    cuCtxPushCurrent 2000 Legacy => cuCtxPushCurrent;
    cuCtxPushCurrent 4000 Legacy => cuCtxPushCurrent_v2;
    cuCtxSetCacheConfig 3020 Legacy => cuCtxSetCacheConfig;
    cuCtxSetCurrent 4000 Legacy => cuCtxSetCurrent;
    cuCtxSetFlags 12010 Legacy => cuCtxSetFlags;
    cuCtxSetLimit 3010 Legacy => cuCtxSetLimit;
    cuCtxSynchronize 2000 Legacy => cuCtxSynchronize;
    cuCtxSynchronize 13000 Legacy => cuCtxSynchronize_v2;
    cuDestroyExternalSemaphore 10000 Legacy => cuDestroyExternalSemaphore;
    cuDevResourceGenerateDesc 12040 Legacy => cuDevResourceGenerateDesc;
    cuDevSmResourceSplitByCount 12040 Legacy => cuDevSmResourceSplitByCount;
    cuDeviceCanAccessPeer 4000 Legacy => cuDeviceCanAccessPeer;
    cuDeviceComputeCapability 2000 Legacy => cuDeviceComputeCapability;
    cuDeviceGet 2000 Legacy => cuDeviceGet;
    cuDeviceGetAttribute 2000 Legacy => cuDeviceGetAttribute;
    cuDeviceGetCount 2000 Legacy => cuDeviceGetCount;
    cuDeviceGetDefaultMemPool 11020 Legacy => cuDeviceGetDefaultMemPool;
    cuDeviceGetDevResource 12040 Legacy => cuDeviceGetDevResource;
    cuDeviceGetGraphMemAttribute 11040 Legacy => cuDeviceGetGraphMemAttribute;
    cuDeviceGetMemPool 11020 Legacy => cuDeviceGetMemPool;
    cuDeviceGetName 2000 Legacy => cuDeviceGetName;
    cuDeviceGetUuid 9020 Legacy => cuDeviceGetUuid;
    cuDeviceGetUuid 11040 Legacy => cuDeviceGetUuid_v2;
    cuDeviceGraphMemTrim 11040 Legacy => cuDeviceGraphMemTrim;
    cuDevicePrimaryCtxGetState 7000 Legacy => cuDevicePrimaryCtxGetState;
    cuDevicePrimaryCtxRelease 7000 Legacy => cuDevicePrimaryCtxRelease;
    cuDevicePrimaryCtxRelease 11000 Legacy => cuDevicePrimaryCtxRelease_v2;
    cuDevicePrimaryCtxReset 7000 Legacy => cuDevicePrimaryCtxReset;
    cuDevicePrimaryCtxReset 11000 Legacy => cuDevicePrimaryCtxReset_v2;
    cuDevicePrimaryCtxRetain 7000 Legacy => cuDevicePrimaryCtxRetain;
    cuDeviceSetMemPool 11020 Legacy => cuDeviceSetMemPool;
    cuDeviceTotalMem 2000 Legacy => cuDeviceTotalMem;
    cuDeviceTotalMem 3020 Legacy => cuDeviceTotalMem_v2;
    cuDriverGetVersion 2020 Legacy => cuDriverGetVersion;
    cuEventCreate 2000 Legacy => cuEventCreate;
    cuEventDestroy 2000 Legacy => cuEventDestroy;
    cuEventDestroy 4000 Legacy => cuEventDestroy_v2;
    cuEventElapsedTime 2000 Legacy => cuEventElapsedTime;
    cuEventElapsedTime 12080 Legacy => cuEventElapsedTime_v2;
    cuEventQuery 2000 Legacy => cuEventQuery;
    cuEventRecord 2000 Legacy => cuEventRecord;
    cuEventRecord 7000 PerThread => cuEventRecord_ptsz;
    cuEventSynchronize 2000 Legacy => cuEventSynchronize;
    cuFabricCpyBatchAsync 13050 Legacy => cuFabricCpyBatchAsync;
    cuFabricCpyBatchAsync 13050 PerThread => cuFabricCpyBatchAsync_ptsz;
    cuFuncGetAttribute 2020 Legacy => cuFuncGetAttribute;
    cuFuncIsLoaded 12040 Legacy => cuFuncIsLoaded;
    cuFuncLoad 12040 Legacy => cuFuncLoad;
    cuFuncSetAttribute 9000 Legacy => cuFuncSetAttribute;
    cuFuncSetCacheConfig 3000 Legacy => cuFuncSetCacheConfig;
    cuGetErrorName 6000 Legacy => cuGetErrorName;
    cuGetErrorString 6000 Legacy => cuGetErrorString;
    cuGetExportTable 3000 Legacy => cuGetExportTable;
    cuGetProcAddress 11030 Legacy => cuGetProcAddress;
    cuGetProcAddress 12000 Legacy => cuGetProcAddress_v2;
    cuGraphAddEmptyNode 10000 Legacy => cuGraphAddEmptyNode;
    cuGraphAddKernelNode 10000 Legacy => cuGraphAddKernelNode;
    cuGraphAddKernelNode 12000 Legacy => cuGraphAddKernelNode_v2;
    cuGraphAddMemAllocNode 11040 Legacy => cuGraphAddMemAllocNode;
    cuGraphAddMemFreeNode 11040 Legacy => cuGraphAddMemFreeNode;
    cuGraphAddMemcpyNode 10000 Legacy => cuGraphAddMemcpyNode;
    cuGraphAddNode 12020 Legacy => cuGraphAddNode;
    cuGraphAddNode 12030 Legacy => cuGraphAddNode_v2;
    cuGraphAddNode 13040 Legacy => cuGraphAddNode_v3;
    cuGraphChildGraphNodeGetGraph 10000 Legacy => cuGraphChildGraphNodeGetGraph;
    cuGraphClone 10000 Legacy => cuGraphClone;
    cuGraphConditionalHandleCreate 12030 Legacy => cuGraphConditionalHandleCreate;
    cuGraphCreate 10000 Legacy => cuGraphCreate;
    cuGraphDestroy 10000 Legacy => cuGraphDestroy;
    cuGraphExecDestroy 10000 Legacy => cuGraphExecDestroy;
    cuGraphExecKernelNodeSetParams 10010 Legacy => cuGraphExecKernelNodeSetParams;
    cuGraphExecKernelNodeSetParams 12000 Legacy => cuGraphExecKernelNodeSetParams_v2;
    cuGraphExecMemcpyNodeSetParams 10020 Legacy => cuGraphExecMemcpyNodeSetParams;
    cuGraphExecNodeSetParams 12020 Legacy => cuGraphExecNodeSetParams;
    cuGraphExecUpdate 10020 Legacy => cuGraphExecUpdate;
    cuGraphExecUpdate 12000 Legacy => cuGraphExecUpdate_v2;
    cuGraphGetNodes 10000 Legacy => cuGraphGetNodes;
    cuGraphInstantiate 10000 Legacy => cuGraphInstantiate;
    cuGraphInstantiate 11000 Legacy => cuGraphInstantiate_v2;
    cuGraphInstantiateWithFlags 11040 Legacy => cuGraphInstantiateWithFlags;
    cuGraphInstantiateWithParams 12000 Legacy => cuGraphInstantiateWithParams;
    cuGraphInstantiateWithParams 12000 PerThread => cuGraphInstantiateWithParams_ptsz;
    cuGraphKernelNodeGetParams 10000 Legacy => cuGraphKernelNodeGetParams;
    cuGraphKernelNodeGetParams 12000 Legacy => cuGraphKernelNodeGetParams_v2;
    cuGraphLaunch 10000 Legacy => cuGraphLaunch;
    cuGraphLaunch 10000 PerThread => cuGraphLaunch_ptsz;
    cuGraphMemAllocNodeGetParams 11040 Legacy => cuGraphMemAllocNodeGetParams;
    cuGraphNodeGetDependencies 10000 Legacy => cuGraphNodeGetDependencies;
    cuGraphNodeGetParams 13020 Legacy => cuGraphNodeGetParams;
    cuGraphNodeGetType 10000 Legacy => cuGraphNodeGetType;
    cuGraphReleaseUserObject 11030 Legacy => cuGraphReleaseUserObject;
    cuGraphRetainUserObject 11030 Legacy => cuGraphRetainUserObject;
    cuGraphUpload 11010 Legacy => cuGraphUpload;
    cuGraphUpload 11010 PerThread => cuGraphUpload_ptsz;
    cuGreenCtxCreate 12040 Legacy => cuGreenCtxCreate;
    cuGreenCtxDestroy 12040 Legacy => cuGreenCtxDestroy;
    cuGreenCtxStreamCreate 12050 Legacy => cuGreenCtxStreamCreate;
    cuImportExternalSemaphore 10000 Legacy => cuImportExternalSemaphore;
    cuInit 2000 Legacy => cuInit;
    cuIpcCloseMemHandle 4010 Legacy => cuIpcCloseMemHandle;
    cuIpcGetEventHandle 4010 Legacy => cuIpcGetEventHandle;
    cuIpcGetMemHandle 4010 Legacy => cuIpcGetMemHandle;
    cuIpcOpenEventHandle 4010 Legacy => cuIpcOpenEventHandle;
    cuIpcOpenMemHandle 4010 Legacy => cuIpcOpenMemHandle;
    cuIpcOpenMemHandle 11000 Legacy => cuIpcOpenMemHandle_v2;
    cuKernelGetAttribute 12000 Legacy => cuKernelGetAttribute;
    cuKernelGetFunction 12000 Legacy => cuKernelGetFunction;
    cuKernelGetParamInfo 12040 Legacy => cuKernelGetParamInfo;
    cuKernelSetAttribute 12000 Legacy => cuKernelSetAttribute;
    cuKernelSetCacheConfig 12000 Legacy => cuKernelSetCacheConfig;
    cuLaunch 2000 Legacy => cuLaunch;
    cuLaunchCooperativeKernel 9000 Legacy => cuLaunchCooperativeKernel;
    cuLaunchCooperativeKernel 9000 PerThread => cuLaunchCooperativeKernel_ptsz;
    cuLaunchCooperativeKernelMultiDevice 9000 Legacy => cuLaunchCooperativeKernelMultiDevice;
    cuLaunchGrid 2000 Legacy => cuLaunchGrid;
    cuLaunchGridAsync 2000 Legacy => cuLaunchGridAsync;
    cuLaunchHostFunc 10000 Legacy => cuLaunchHostFunc;
    cuLaunchHostFunc 13010 Legacy => cuLaunchHostFunc_v2;
    cuLaunchHostFunc 10000 PerThread => cuLaunchHostFunc_ptsz;
    cuLaunchHostFunc 13010 PerThread => cuLaunchHostFunc_v2_ptsz;
    cuLaunchKernel 4000 Legacy => cuLaunchKernel;
    cuLaunchKernel 7000 PerThread => cuLaunchKernel_ptsz;
    cuLaunchKernelEx 11060 Legacy => cuLaunchKernelEx;
    cuLaunchKernelEx 11060 PerThread => cuLaunchKernelEx_ptsz;
    cuLibraryGetGlobal 12000 Legacy => cuLibraryGetGlobal;
    cuLibraryGetKernel 12000 Legacy => cuLibraryGetKernel;
    cuLibraryGetModule 12000 Legacy => cuLibraryGetModule;
    cuLibraryLoadData 12000 Legacy => cuLibraryLoadData;
    cuLibraryUnload 12000 Legacy => cuLibraryUnload;
    cuLinkAddData 5050 Legacy => cuLinkAddData;
    cuLinkAddData 6050 Legacy => cuLinkAddData_v2;
    cuLinkComplete 5050 Legacy => cuLinkComplete;
    cuLinkCreate 5050 Legacy => cuLinkCreate;
    cuLinkCreate 6050 Legacy => cuLinkCreate_v2;
    cuLinkDestroy 5050 Legacy => cuLinkDestroy;
    cuMemAddressFree 10020 Legacy => cuMemAddressFree;
    cuMemAddressReserve 10020 Legacy => cuMemAddressReserve;
    cuMemAdvise 8000 Legacy => cuMemAdvise;
    cuMemAdvise 12020 Legacy => cuMemAdvise_v2;
    cuMemAlloc 2000 Legacy => cuMemAlloc;
    cuMemAlloc 3020 Legacy => cuMemAlloc_v2;
    cuMemAllocAsync 11020 Legacy => cuMemAllocAsync;
    cuMemAllocAsync 11020 PerThread => cuMemAllocAsync_ptsz;
    cuMemAllocFromPoolAsync 11020 Legacy => cuMemAllocFromPoolAsync;
    cuMemAllocFromPoolAsync 11020 PerThread => cuMemAllocFromPoolAsync_ptsz;
    cuMemAllocHost 2000 Legacy => cuMemAllocHost;
    cuMemAllocHost 3020 Legacy => cuMemAllocHost_v2;
    cuMemAllocManaged 6000 Legacy => cuMemAllocManaged;
    cuMemAllocPitch 2000 Legacy => cuMemAllocPitch;
    cuMemAllocPitch 3020 Legacy => cuMemAllocPitch_v2;
    cuMemBatchDecompressAsync 12060 Legacy => cuMemBatchDecompressAsync;
    cuMemBatchDecompressAsync 12060 PerThread => cuMemBatchDecompressAsync_ptsz;
    cuMemCreate 10020 Legacy => cuMemCreate;
    cuMemExportToShareableHandle 10020 Legacy => cuMemExportToShareableHandle;
    cuMemFree 2000 Legacy => cuMemFree;
    cuMemFree 3020 Legacy => cuMemFree_v2;
    cuMemFreeAsync 11020 Legacy => cuMemFreeAsync;
    cuMemFreeAsync 11020 PerThread => cuMemFreeAsync_ptsz;
    cuMemFreeHost 2000 Legacy => cuMemFreeHost;
    cuMemGetAccess 10020 Legacy => cuMemGetAccess;
    cuMemGetAddressRange 2000 Legacy => cuMemGetAddressRange;
    cuMemGetAddressRange 3020 Legacy => cuMemGetAddressRange_v2;
    cuMemGetAllocationGranularity 10020 Legacy => cuMemGetAllocationGranularity;
    cuMemGetAllocationPropertiesFromHandle 10020 Legacy => cuMemGetAllocationPropertiesFromHandle;
    cuMemGetDefaultMemPool 13000 Legacy => cuMemGetDefaultMemPool;
    cuMemGetHandleForAddressRange 11070 Legacy => cuMemGetHandleForAddressRange;
    cuMemGetInfo 2000 Legacy => cuMemGetInfo;
    cuMemGetInfo 3020 Legacy => cuMemGetInfo_v2;
    cuMemGetMemPool 13000 Legacy => cuMemGetMemPool;
    cuMemHostAlloc 2020 Legacy => cuMemHostAlloc;
    cuMemHostGetDevicePointer 3020 Legacy => cuMemHostGetDevicePointer_v2;
    cuMemHostRegister 4000 Legacy => cuMemHostRegister;
    cuMemHostRegister 6050 Legacy => cuMemHostRegister_v2;
    cuMemHostUnregister 4000 Legacy => cuMemHostUnregister;
    cuMemImportFromShareableHandle 10020 Legacy => cuMemImportFromShareableHandle;
    cuMemMap 10020 Legacy => cuMemMap;
    cuMemMapArrayAsync 11010 Legacy => cuMemMapArrayAsync;
    cuMemMapArrayAsync 11010 PerThread => cuMemMapArrayAsync_ptsz;
    cuMemPoolCreate 11020 Legacy => cuMemPoolCreate;
    cuMemPoolDestroy 11020 Legacy => cuMemPoolDestroy;
    cuMemPoolGetAccess 11020 Legacy => cuMemPoolGetAccess;
    cuMemPoolGetAttribute 11020 Legacy => cuMemPoolGetAttribute;
    cuMemPoolImportFromShareableHandle 11020 Legacy => cuMemPoolImportFromShareableHandle;
    cuMemPoolSetAccess 11020 Legacy => cuMemPoolSetAccess;
    cuMemPoolSetAttribute 11020 Legacy => cuMemPoolSetAttribute;
    cuMemPoolTrimTo 11020 Legacy => cuMemPoolTrimTo;
    cuMemPrefetchAsync 8000 Legacy => cuMemPrefetchAsync;
    cuMemPrefetchAsync 12020 Legacy => cuMemPrefetchAsync_v2;
    cuMemPrefetchAsync 8000 PerThread => cuMemPrefetchAsync_ptsz;
    cuMemPrefetchAsync 12020 PerThread => cuMemPrefetchAsync_v2_ptsz;
    cuMemPrefetchBatchAsync 13000 Legacy => cuMemPrefetchBatchAsync;
    cuMemPrefetchBatchAsync 13000 PerThread => cuMemPrefetchBatchAsync_ptsz;
    cuMemRelease 10020 Legacy => cuMemRelease;
    cuMemRetainAllocationHandle 11000 Legacy => cuMemRetainAllocationHandle;
    cuMemSetAccess 10020 Legacy => cuMemSetAccess;
    cuMemUnmap 10020 Legacy => cuMemUnmap;
    cuMemcpy 4000 Legacy => cuMemcpy;
    cuMemcpy 7000 PerThread => cuMemcpy_ptds;
    cuMemcpy2D 3020 Legacy => cuMemcpy2D_v2;
    cuMemcpy2D 7000 PerThread => cuMemcpy2D_v2_ptds;
    cuMemcpy2D 2000 Legacy => cuMemcpy2D;
    cuMemcpy2DAsync 3020 Legacy => cuMemcpy2DAsync_v2;
    cuMemcpy2DAsync 7000 PerThread => cuMemcpy2DAsync_v2_ptsz;
    cuMemcpy2DAsync 2000 Legacy => cuMemcpy2DAsync;
    cuMemcpy2DUnaligned 3020 Legacy => cuMemcpy2DUnaligned_v2;
    cuMemcpy2DUnaligned 7000 PerThread => cuMemcpy2DUnaligned_v2_ptds;
    cuMemcpy2DUnaligned 2000 Legacy => cuMemcpy2DUnaligned;
    cuMemcpy3D 3020 Legacy => cuMemcpy3D_v2;
    cuMemcpy3D 7000 PerThread => cuMemcpy3D_v2_ptds;
    cuMemcpy3D 2000 Legacy => cuMemcpy3D;
    cuMemcpy3DAsync 3020 Legacy => cuMemcpy3DAsync_v2;
    cuMemcpy3DAsync 7000 PerThread => cuMemcpy3DAsync_v2_ptsz;
    cuMemcpy3DAsync 2000 Legacy => cuMemcpy3DAsync;
    cuMemcpy3DBatchAsync 12080 Legacy => cuMemcpy3DBatchAsync;
    cuMemcpy3DBatchAsync 12080 PerThread => cuMemcpy3DBatchAsync_ptsz;
    cuMemcpy3DBatchAsync 13000 Legacy => cuMemcpy3DBatchAsync_v2;
    cuMemcpy3DBatchAsync 13000 PerThread => cuMemcpy3DBatchAsync_v2_ptsz;
    cuMemcpy3DPeer 4000 Legacy => cuMemcpy3DPeer;
    cuMemcpy3DPeer 7000 PerThread => cuMemcpy3DPeer_ptds;
    cuMemcpy3DPeerAsync 4000 Legacy => cuMemcpy3DPeerAsync;
    cuMemcpy3DPeerAsync 7000 PerThread => cuMemcpy3DPeerAsync_ptsz;
    cuMemcpy3DWithAttributesAsync 13020 Legacy => cuMemcpy3DWithAttributesAsync;
    cuMemcpy3DWithAttributesAsync 13020 PerThread => cuMemcpy3DWithAttributesAsync_ptsz;
    cuMemcpyAsync 4000 Legacy => cuMemcpyAsync;
    cuMemcpyAsync 7000 PerThread => cuMemcpyAsync_ptsz;
    cuMemcpyAtoA 3020 Legacy => cuMemcpyAtoA_v2;
    cuMemcpyAtoA 7000 PerThread => cuMemcpyAtoA_v2_ptds;
    cuMemcpyAtoA 2000 Legacy => cuMemcpyAtoA;
    cuMemcpyAtoD 3020 Legacy => cuMemcpyAtoD_v2;
    cuMemcpyAtoD 7000 PerThread => cuMemcpyAtoD_v2_ptds;
    cuMemcpyAtoD 2000 Legacy => cuMemcpyAtoD;
    cuMemcpyBatchAsync 12080 Legacy => cuMemcpyBatchAsync;
    cuMemcpyBatchAsync 12080 PerThread => cuMemcpyBatchAsync_ptsz;
    cuMemcpyBatchAsync 13000 Legacy => cuMemcpyBatchAsync_v2;
    cuMemcpyBatchAsync 13000 PerThread => cuMemcpyBatchAsync_v2_ptsz;
    cuMemcpyDtoA 3020 Legacy => cuMemcpyDtoA_v2;
    cuMemcpyDtoA 7000 PerThread => cuMemcpyDtoA_v2_ptds;
    cuMemcpyDtoA 2000 Legacy => cuMemcpyDtoA;
    cuMemcpyDtoD 3020 Legacy => cuMemcpyDtoD_v2;
    cuMemcpyDtoD 7000 PerThread => cuMemcpyDtoD_v2_ptds;
    cuMemcpyDtoD 2000 Legacy => cuMemcpyDtoD;
    cuMemcpyDtoDAsync 3020 Legacy => cuMemcpyDtoDAsync_v2;
    cuMemcpyDtoDAsync 7000 PerThread => cuMemcpyDtoDAsync_v2_ptsz;
    cuMemcpyDtoDAsync 3000 Legacy => cuMemcpyDtoDAsync;
    cuMemcpyDtoH 2000 Legacy => cuMemcpyDtoH;
    cuMemcpyDtoH 3020 Legacy => cuMemcpyDtoH_v2;
    cuMemcpyDtoH 7000 PerThread => cuMemcpyDtoH_v2_ptds;
    cuMemcpyDtoHAsync 3020 Legacy => cuMemcpyDtoHAsync_v2;
    cuMemcpyDtoHAsync 7000 PerThread => cuMemcpyDtoHAsync_v2_ptsz;
    cuMemcpyHtoD 2000 Legacy => cuMemcpyHtoD;
    cuMemcpyHtoD 3020 Legacy => cuMemcpyHtoD_v2;
    cuMemcpyHtoD 7000 PerThread => cuMemcpyHtoD_v2_ptds;
    cuMemcpyHtoDAsync 3020 Legacy => cuMemcpyHtoDAsync_v2;
    cuMemcpyHtoDAsync 7000 PerThread => cuMemcpyHtoDAsync_v2_ptsz;
    cuMemcpyPeer 4000 Legacy => cuMemcpyPeer;
    cuMemcpyPeer 7000 PerThread => cuMemcpyPeer_ptds;
    cuMemcpyPeerAsync 4000 Legacy => cuMemcpyPeerAsync;
    cuMemcpyPeerAsync 7000 PerThread => cuMemcpyPeerAsync_ptsz;
    cuMemcpyWithAttributesAsync 13020 Legacy => cuMemcpyWithAttributesAsync;
    cuMemcpyWithAttributesAsync 13020 PerThread => cuMemcpyWithAttributesAsync_ptsz;
    cuMemsetD16 3020 Legacy => cuMemsetD16_v2;
    cuMemsetD16 7000 PerThread => cuMemsetD16_v2_ptds;
    cuMemsetD16 2000 Legacy => cuMemsetD16;
    cuMemsetD16Async 3020 Legacy => cuMemsetD16Async;
    cuMemsetD16Async 7000 PerThread => cuMemsetD16Async_ptsz;
    cuMemsetD2D16 3020 Legacy => cuMemsetD2D16_v2;
    cuMemsetD2D16 7000 PerThread => cuMemsetD2D16_v2_ptds;
    cuMemsetD2D16 2000 Legacy => cuMemsetD2D16;
    cuMemsetD2D16Async 3020 Legacy => cuMemsetD2D16Async;
    cuMemsetD2D16Async 7000 PerThread => cuMemsetD2D16Async_ptsz;
    cuMemsetD2D32 3020 Legacy => cuMemsetD2D32_v2;
    cuMemsetD2D32 7000 PerThread => cuMemsetD2D32_v2_ptds;
    cuMemsetD2D32 2000 Legacy => cuMemsetD2D32;
    cuMemsetD2D32Async 3020 Legacy => cuMemsetD2D32Async;
    cuMemsetD2D32Async 7000 PerThread => cuMemsetD2D32Async_ptsz;
    cuMemsetD2D8 3020 Legacy => cuMemsetD2D8_v2;
    cuMemsetD2D8 7000 PerThread => cuMemsetD2D8_v2_ptds;
    cuMemsetD2D8 2000 Legacy => cuMemsetD2D8;
    cuMemsetD2D8Async 3020 Legacy => cuMemsetD2D8Async;
    cuMemsetD2D8Async 7000 PerThread => cuMemsetD2D8Async_ptsz;
    cuMemsetD32 3020 Legacy => cuMemsetD32_v2;
    cuMemsetD32 7000 PerThread => cuMemsetD32_v2_ptds;
    cuMemsetD32 2000 Legacy => cuMemsetD32;
    cuMemsetD32Async 3020 Legacy => cuMemsetD32Async;
    cuMemsetD32Async 7000 PerThread => cuMemsetD32Async_ptsz;
    cuMemsetD8 3020 Legacy => cuMemsetD8_v2;
    cuMemsetD8 7000 PerThread => cuMemsetD8_v2_ptds;
    cuMemsetD8 2000 Legacy => cuMemsetD8;
    cuMemsetD8Async 3020 Legacy => cuMemsetD8Async;
    cuMemsetD8Async 7000 PerThread => cuMemsetD8Async_ptsz;
    cuMipmappedArrayCreate 5000 Legacy => cuMipmappedArrayCreate;
    cuMipmappedArrayDestroy 5000 Legacy => cuMipmappedArrayDestroy;
    cuMipmappedArrayGetLevel 5000 Legacy => cuMipmappedArrayGetLevel;
    cuMipmappedArrayGetMemoryRequirements 11060 Legacy => cuMipmappedArrayGetMemoryRequirements;
    cuModuleGetFunction 2000 Legacy => cuModuleGetFunction;
    cuModuleGetGlobal 3020 Legacy => cuModuleGetGlobal_v2;
    cuModuleGetLoadingMode 11070 Legacy => cuModuleGetLoadingMode;
    cuModuleLoad 2000 Legacy => cuModuleLoad;
    cuModuleLoadData 2000 Legacy => cuModuleLoadData;
    cuModuleLoadDataEx 2010 Legacy => cuModuleLoadDataEx;
    cuModuleUnload 2000 Legacy => cuModuleUnload;
    cuMulticastAddDevice 12010 Legacy => cuMulticastAddDevice;
    cuMulticastBindAddr 12010 Legacy => cuMulticastBindAddr;
    cuMulticastBindAddr 13010 Legacy => cuMulticastBindAddr_v2;
    cuMulticastBindMem 12010 Legacy => cuMulticastBindMem;
    cuMulticastBindMem 13010 Legacy => cuMulticastBindMem_v2;
    cuMulticastCreate 12010 Legacy => cuMulticastCreate;
    cuMulticastUnbind 12010 Legacy => cuMulticastUnbind;
    cuOccupancyAvailableDynamicSMemPerBlock 10020 Legacy => cuOccupancyAvailableDynamicSMemPerBlock;
    cuOccupancyMaxActiveBlocksPerMultiprocessor 6050 Legacy => cuOccupancyMaxActiveBlocksPerMultiprocessor;
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags 7000 Legacy => cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags;
    cuOccupancyMaxActiveClusters 11070 Legacy => cuOccupancyMaxActiveClusters;
    cuOccupancyMaxPotentialBlockSize 6050 Legacy => cuOccupancyMaxPotentialBlockSize;
    cuOccupancyMaxPotentialBlockSizeWithFlags 7000 Legacy => cuOccupancyMaxPotentialBlockSizeWithFlags;
    cuOccupancyMaxPotentialClusterSize 11070 Legacy => cuOccupancyMaxPotentialClusterSize;
    cuPointerGetAttribute 4000 Legacy => cuPointerGetAttribute;
    cuProfilerStart 4000 Legacy => cuProfilerStart;
    cuProfilerStop 4000 Legacy => cuProfilerStop;
    cuSignalExternalSemaphoresAsync 10000 Legacy => cuSignalExternalSemaphoresAsync;
    cuSignalExternalSemaphoresAsync 10000 PerThread => cuSignalExternalSemaphoresAsync_ptsz;
    cuStreamAddCallback 5000 Legacy => cuStreamAddCallback;
    cuStreamAddCallback 7000 PerThread => cuStreamAddCallback_ptsz;
    cuStreamAttachMemAsync 6000 Legacy => cuStreamAttachMemAsync;
    cuStreamAttachMemAsync 7000 PerThread => cuStreamAttachMemAsync_ptsz;
    cuStreamBatchMemOp 8000 Legacy => cuStreamBatchMemOp;
    cuStreamBatchMemOp 11070 Legacy => cuStreamBatchMemOp_v2;
    cuStreamBatchMemOp 8000 PerThread => cuStreamBatchMemOp_ptsz;
    cuStreamBatchMemOp 11070 PerThread => cuStreamBatchMemOp_v2_ptsz;
    cuStreamBeginCapture 10000 Legacy => cuStreamBeginCapture;
    cuStreamBeginCapture 10010 Legacy => cuStreamBeginCapture_v2;
    cuStreamBeginCapture 10000 PerThread => cuStreamBeginCapture_ptsz;
    cuStreamBeginCapture 10010 PerThread => cuStreamBeginCapture_v2_ptsz;
    cuStreamBeginCaptureToCig 13010 Legacy => cuStreamBeginCaptureToCig;
    cuStreamBeginCaptureToCig 13010 PerThread => cuStreamBeginCaptureToCig_ptsz;
    cuStreamBeginCaptureToGraph 12030 Legacy => cuStreamBeginCaptureToGraph;
    cuStreamBeginCaptureToGraph 12030 PerThread => cuStreamBeginCaptureToGraph_ptsz;
    cuStreamBeginRecaptureToGraph 13030 Legacy => cuStreamBeginRecaptureToGraph;
    cuStreamBeginRecaptureToGraph 13030 PerThread => cuStreamBeginRecaptureToGraph_ptsz;
    cuStreamCreate 2000 Legacy => cuStreamCreate;
    cuStreamCreateWithPriority 5050 Legacy => cuStreamCreateWithPriority;
    cuStreamDestroy 2000 Legacy => cuStreamDestroy;
    cuStreamDestroy 4000 Legacy => cuStreamDestroy_v2;
    cuStreamEndCapture 10000 Legacy => cuStreamEndCapture;
    cuStreamEndCapture 10000 PerThread => cuStreamEndCapture_ptsz;
    cuStreamEndCaptureToCig 13010 Legacy => cuStreamEndCaptureToCig;
    cuStreamEndCaptureToCig 13010 PerThread => cuStreamEndCaptureToCig_ptsz;
    cuStreamGetCaptureInfo 10010 Legacy => cuStreamGetCaptureInfo;
    cuStreamGetCaptureInfo 11030 Legacy => cuStreamGetCaptureInfo_v2;
    cuStreamGetCaptureInfo 12030 Legacy => cuStreamGetCaptureInfo_v3;
    cuStreamGetCaptureInfo 10010 PerThread => cuStreamGetCaptureInfo_ptsz;
    cuStreamGetCaptureInfo 11030 PerThread => cuStreamGetCaptureInfo_v2_ptsz;
    cuStreamGetCaptureInfo 12030 PerThread => cuStreamGetCaptureInfo_v3_ptsz;
    cuStreamGetCtx 9020 Legacy => cuStreamGetCtx;
    cuStreamGetCtx 12050 Legacy => cuStreamGetCtx_v2;
    cuStreamGetCtx 9020 PerThread => cuStreamGetCtx_ptsz;
    cuStreamGetCtx 12050 PerThread => cuStreamGetCtx_v2_ptsz;
    cuStreamGetGreenCtx 12040 Legacy => cuStreamGetGreenCtx;
    cuStreamIsCapturing 10000 Legacy => cuStreamIsCapturing;
    cuStreamIsCapturing 10000 PerThread => cuStreamIsCapturing_ptsz;
    cuStreamQuery 2000 Legacy => cuStreamQuery;
    cuStreamQuery 7000 PerThread => cuStreamQuery_ptsz;
    cuStreamSynchronize 2000 Legacy => cuStreamSynchronize;
    cuStreamSynchronize 7000 PerThread => cuStreamSynchronize_ptsz;
    cuStreamWaitEvent 3020 Legacy => cuStreamWaitEvent;
    cuStreamWaitEvent 7000 PerThread => cuStreamWaitEvent_ptsz;
    cuStreamWaitValue32 8000 Legacy => cuStreamWaitValue32;
    cuStreamWaitValue32 11070 Legacy => cuStreamWaitValue32_v2;
    cuStreamWaitValue32 8000 PerThread => cuStreamWaitValue32_ptsz;
    cuStreamWaitValue32 11070 PerThread => cuStreamWaitValue32_v2_ptsz;
    cuStreamWaitValue64 9000 Legacy => cuStreamWaitValue64;
    cuStreamWaitValue64 11070 Legacy => cuStreamWaitValue64_v2;
    cuStreamWaitValue64 9000 PerThread => cuStreamWaitValue64_ptsz;
    cuStreamWaitValue64 11070 PerThread => cuStreamWaitValue64_v2_ptsz;
    cuStreamWriteValue32 8000 Legacy => cuStreamWriteValue32;
    cuStreamWriteValue32 11070 Legacy => cuStreamWriteValue32_v2;
    cuStreamWriteValue32 8000 PerThread => cuStreamWriteValue32_ptsz;
    cuStreamWriteValue32 11070 PerThread => cuStreamWriteValue32_v2_ptsz;
    cuStreamWriteValue64 9000 Legacy => cuStreamWriteValue64;
    cuStreamWriteValue64 11070 Legacy => cuStreamWriteValue64_v2;
    cuStreamWriteValue64 9000 PerThread => cuStreamWriteValue64_ptsz;
    cuStreamWriteValue64 11070 PerThread => cuStreamWriteValue64_v2_ptsz;
    cuSurfObjectCreate 5000 Legacy => cuSurfObjectCreate;
    cuTexObjectCreate 5000 Legacy => cuTexObjectCreate;
    cuThreadExchangeStreamCaptureMode 10010 Legacy => cuThreadExchangeStreamCaptureMode;
    cuUserObjectCreate 11030 Legacy => cuUserObjectCreate;
    cuWaitExternalSemaphoresAsync 10000 Legacy => cuWaitExternalSemaphoresAsync;
    cuWaitExternalSemaphoresAsync 10000 PerThread => cuWaitExternalSemaphoresAsync_ptsz;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_by_name() {
        assert!(VARIANTS.is_sorted_by_key(|v| v.name));
    }

    #[test]
    fn every_hook_is_simulated_with_its_version_and_flavour() {
        for hook in tessera_cuda::hooks::HOOKS {
            let flavour =
                if hook.flavour == "legacy" { Flavour::Legacy } else { Flavour::PerThread };
            let found = VARIANTS
                .iter()
                .any(|v| v.export == hook.export && v.since == hook.since && v.flavour == flavour);
            assert!(found, "{hook:?}");
        }
    }

    #[test]
    fn version_and_flags_choose_the_variant() {
        use crate::exports as e;
        let pointer = |name, version, flavour| match find(name, version, flavour, 13_000) {
            Found::Symbol(p) => p,
            _ => std::ptr::null(),
        };
        let (legacy, own) = (Flavour::Legacy, Flavour::PerThread);
        assert_eq!(pointer("cuMemAlloc", 3000, legacy), e::cuMemAlloc as *const c_void);
        assert_eq!(pointer("cuMemAlloc", 13_000, own), e::cuMemAlloc_v2 as *const c_void);
        assert_eq!(pointer("cuLaunchKernel", 12_000, own), e::cuLaunchKernel_ptsz as *const c_void);
        assert!(matches!(find("cuLaunchKernel", 6_000, own, 13_000), Found::TooNew));
        assert_eq!(pointer("cuCtxCreate", 12_040, legacy), e::cuCtxCreate_v3 as *const c_void);
        assert!(matches!(find("cuCtxCreate_v9", 13_000, legacy, 13_000), Found::Unknown));
        assert!(matches!(find("cuLaunchKernelEx", 11_000, legacy, 13_000), Found::TooNew));
        assert!(matches!(find("cuStreamGetDevice", 12_000, legacy, 12_040), Found::Unknown));
    }
}
