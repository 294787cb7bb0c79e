//! `cuGetProcAddress`: CUDA Driver API, "Driver Entry Point Access".
//!
//! A name means the newest variant that the caller's CUDA version knows. The versions of what the shim does not hook
//! are cudaTypedefs.h's of CUDA 13.0 (`PFN_<name>_v<version>[_ptsz|_ptds]`).

use crate::abi::{Result, cstr, export, put, put_if};
use crate::driver::cuda_version;
use crate::stream::Flavour;
use std::ffi::{c_char, c_int, c_void};
use tessera_cuda::coverage::base_name;
use tessera_cuda::types::{
    CU_GET_PROC_ADDRESS_DEFAULT, CU_GET_PROC_ADDRESS_LEGACY_STREAM,
    CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CU_GET_PROC_ADDRESS_SUCCESS,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUdriverProcAddressQueryResult, cuuint64_t,
};

/// One export, and the CUDA version from which it is what its name means.
struct Variant {
    export: &'static str,
    since: u32,
    address: Address,
}

struct Address(*const c_void);
// SAFETY: addresses of functions, which any thread may read.
unsafe impl Sync for Address {}

impl Variant {
    fn flavour(&self) -> Flavour {
        let own = self.export.ends_with("_ptsz") || self.export.ends_with("_ptds");
        if own { Flavour::PerThread } else { Flavour::Legacy }
    }
}

macro_rules! variant {
    ($export:ident, $since:literal) => {
        Variant {
            export: stringify!($export),
            since: $since,
            address: Address(crate::exports::$export as *const c_void),
        }
    };
}

/// What the shim hooks: its table is compared with NVIDIA's driver 550.
macro_rules! hooked {
    ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        static HOOKED: &[Variant] = &[$($(variant!($export, $since),)+)*];
    };
}
tessera_cuda::for_each_hook!(hooked);

macro_rules! unhooked {
    ($($since:literal: $($export:ident)+;)*) => {
        static UNHOOKED: &[Variant] = &[$($(variant!($export, $since),)+)*];
    };
}

enum Found {
    Symbol(*const c_void),
    Unknown,
    TooNew,
}

/// The variant of `name` for a caller of `version`, from a driver of version `driver`.
fn find(name: &str, version: u32, flavour: Flavour, driver: u32) -> Found {
    // An older driver has never heard of what came later.
    let all = HOOKED.iter().chain(UNHOOKED).filter(|v| v.since <= driver);
    let mine: Vec<&Variant> = all.filter(|v| base_name(v.export) == name).collect();
    if mine.is_empty() {
        return Found::Unknown;
    }
    // A function with a per-thread variant has only that for a caller who wants it, even if it is
    // too new; one without has only the legacy variant. (So does NVIDIA's 550.163.01.)
    let own = flavour == Flavour::PerThread && mine.iter().any(|v| v.flavour() == flavour);
    let wanted = if own { Flavour::PerThread } else { Flavour::Legacy };
    let known = mine.iter().filter(|v| v.flavour() == wanted && v.since <= version);
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
    // A negative version reads as a huge one.
    Ok(find(name, version.cast_unsigned(), flavour, cuda_version()))
}

// As NVIDIA's 550.163.01 does: v1 fails and leaves the pointer alone …
export! { cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t) {
    match look_up(symbol, pfn, cuda_version, flags)? {
        Found::Symbol(p) => put(pfn, p.cast_mut()),
        Found::Unknown | Found::TooNew => Err(CUDA_ERROR_NOT_FOUND),
    }
} }

// … and v2 succeeds with a null pointer and a status that says why.
export! { cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: cuuint64_t, status: *mut CUdriverProcAddressQueryResult) {
    let (pointer, found) = match look_up(symbol, pfn, cuda_version, flags)? {
        Found::Symbol(p) => (p, CU_GET_PROC_ADDRESS_SUCCESS),
        Found::Unknown => (std::ptr::null(), CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
        Found::TooNew => (std::ptr::null(), CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
    };
    put(pfn, pointer.cast_mut())?;
    put_if(status, found);
    Ok(())
} }

unhooked! {
    2000:
        cuCtxGetDevice cuCtxPopCurrent cuCtxPushCurrent cuDeviceComputeCapability cuDeviceGet
        cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuEventCreate cuEventDestroy
        cuEventElapsedTime cuEventQuery cuEventRecord cuMemFreeHost
        cuModuleLoadData cuModuleUnload cuStreamCreate cuStreamQuery;
    2020: cuDriverGetVersion cuFuncGetAttribute cuMemHostAlloc;
    3000: cuGetExportTable;
    3010: cuCtxGetLimit;
    3020:
        cuMemAllocHost_v2 cuMemGetAddressRange_v2 cuMemHostGetDevicePointer_v2
        cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2;
    4000:
        cuCtxGetCurrent cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxSetCurrent cuEventDestroy_v2
        cuMemHostRegister cuMemHostUnregister cuPointerGetAttribute;
    4010: cuIpcGetEventHandle cuIpcOpenEventHandle;
    5000: cuMipmappedArrayGetLevel;
    5050:
        cuCtxGetStreamPriorityRange cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy
        cuStreamCreateWithPriority;
    6000: cuGetErrorName cuGetErrorString;
    6050:
        cuLinkAddData_v2 cuLinkCreate_v2 cuMemHostRegister_v2
        cuOccupancyMaxActiveBlocksPerMultiprocessor;
    7000:
        cuDevicePrimaryCtxGetState cuEventRecord_ptsz cuMemcpyDtoHAsync_v2_ptsz
        cuMemcpyDtoH_v2_ptds cuMemcpyHtoDAsync_v2_ptsz cuMemcpyHtoD_v2_ptds cuStreamQuery_ptsz;
    8000: cuStreamWriteValue32 cuStreamWriteValue32_ptsz;
    9000: cuStreamWriteValue64 cuStreamWriteValue64_ptsz;
    9020: cuDeviceGetUuid cuStreamGetCtx cuStreamGetCtx_ptsz;
    10000:
        cuDestroyExternalSemaphore cuGraphAddEmptyNode cuGraphAddKernelNode
        cuGraphChildGraphNodeGetGraph cuGraphCreate cuGraphDestroy cuGraphGetNodes
        cuGraphKernelNodeGetParams cuGraphNodeGetDependencies cuGraphNodeGetType
        cuImportExternalSemaphore cuSignalExternalSemaphoresAsync
        cuSignalExternalSemaphoresAsync_ptsz cuStreamIsCapturing cuStreamIsCapturing_ptsz;
    10010: cuThreadExchangeStreamCaptureMode;
    10020:
        cuMemAddressFree cuMemAddressReserve cuMemGetAllocationGranularity
        cuMemGetAllocationPropertiesFromHandle cuMemSetAccess;
    11020:
        cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool cuMemPoolGetAttribute;
    11030: cuGraphReleaseUserObject cuGraphRetainUserObject cuUserObjectCreate;
    11040:
        cuDeviceGetGraphMemAttribute cuDeviceGetUuid_v2 cuGraphAddMemAllocNode
        cuGraphAddMemFreeNode cuGraphMemAllocNodeGetParams;
    11060: cuArrayGetMemoryRequirements cuMipmappedArrayGetMemoryRequirements;
    11070:
        cuModuleGetLoadingMode cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz
        cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz;
    12000:
        cuGraphAddKernelNode_v2 cuGraphKernelNodeGetParams_v2 cuKernelGetAttribute
        cuLibraryLoadData cuLibraryUnload;
    12010: cuMulticastAddDevice;
    12020: cuGraphAddNode;
    12030:
        cuGraphAddNode_v2 cuGraphConditionalHandleCreate cuStreamGetCaptureInfo_v3
        cuStreamGetCaptureInfo_v3_ptsz;
    12040:
        cuCtxFromGreenCtx cuDevResourceGenerateDesc cuDevSmResourceSplitByCount
        cuDeviceGetDevResource cuFuncIsLoaded cuFuncLoad cuKernelGetParamInfo
        cuStreamGetGreenCtx;
    12050: cuGreenCtxStreamCreate;
    12080: cuEventElapsedTime_v2;
}

#[cfg(test)]
mod tests {
    use super::*;

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
