//! Handles, results and the few descriptors that hooked functions take.
//!
//! Names are the CUDA driver API's own (cuda.h of CUDA 12.9), so the usual naming lints are off.
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// `CUresult`: 0 is success (CUDA Driver API, "Data types used by CUDA driver").
pub type CUresult = c_int;

pub const CUDA_SUCCESS: CUresult = 0;
pub const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
pub const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
pub const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
pub const CUDA_ERROR_NO_DEVICE: CUresult = 100;
pub const CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
pub const CUDA_ERROR_INVALID_IMAGE: CUresult = 200;
pub const CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
pub const CUDA_ERROR_INVALID_HANDLE: CUresult = 400;
pub const CUDA_ERROR_NOT_FOUND: CUresult = 500;
pub const CUDA_ERROR_NOT_READY: CUresult = 600;
pub const CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: CUresult = 701;
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
/// Returned by `cuInit` when Tessera's pages are absent or invalid: "the system is not yet ready".
pub const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;
pub const CUDA_ERROR_UNKNOWN: CUresult = 999;

pub type CUdevice = c_int;
/// A device address; 64 bits since CUDA 3.2 (`_v2` functions).
pub type CUdeviceptr = c_ulonglong;
pub type cuuint32_t = u32;
/// The 32-bit device address of the pre-3.2 functions.
pub type CUdeviceptr_v1 = c_uint;
pub type CUcontext = *mut c_void;
/// A green context, which is no context before `cuCtxFromGreenCtx`.
pub type CUgreenCtx = *mut c_void;
/// What a green context is made of.
pub type CUdevResourceDesc = *mut c_void;
pub type CUmodule = *mut c_void;
pub type CUfunction = *mut c_void;
pub type CUkernel = *mut c_void;
pub type CUlibrary = *mut c_void;
pub type CUstream = *mut c_void;
pub type CUevent = *mut c_void;
pub type CUgraph = *mut c_void;
pub type CUgraphNode = *mut c_void;
pub type CUgraphExec = *mut c_void;
pub type CUmemoryPool = *mut c_void;
pub type cuuint64_t = u64;

pub type CUarray = *mut c_void;
pub type CUmipmappedArray = *mut c_void;
/// What `cuMemCreate` answers.
pub type CUmemGenericAllocationHandle = c_ulonglong;

pub type CUmemLocationType = c_int;
pub const CU_MEM_LOCATION_TYPE_NONE: CUmemLocationType = 0;
pub const CU_MEM_LOCATION_TYPE_DEVICE: CUmemLocationType = 1;
pub const CU_MEM_LOCATION_TYPE_HOST: CUmemLocationType = 2;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: CUmemLocationType = 3;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: CUmemLocationType = 4;
/// CUDA 13.
pub const CU_MEM_LOCATION_TYPE_INVISIBLE: CUmemLocationType = 5;
/// CUDA 13: `id` is two bytes, the device's ordinal and a domain.
pub const CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: CUmemLocationType = 6;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemLocation {
    pub r#type: CUmemLocationType,
    pub id: c_int,
}

pub type CUmemAllocationType = c_int;
pub const CU_MEM_ALLOCATION_TYPE_PINNED: CUmemAllocationType = 1;
pub const CU_MEM_ALLOCATION_TYPE_MANAGED: CUmemAllocationType = 2;

pub type CUlimit = c_int;

pub type CUmemAllocationHandleType = c_int;
pub const CU_MEM_HANDLE_TYPE_NONE: CUmemAllocationHandleType = 0;
/// An `int` descriptor.
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: CUmemAllocationHandleType = 1;
/// A [`CUmemFabricHandle`].
pub const CU_MEM_HANDLE_TYPE_FABRIC: CUmemAllocationHandleType = 8;

/// `CUmemPoolProps` (cuda.h 12.9; CUDA 13 names one byte of `reserved`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    pub allocType: CUmemAllocationType,
    pub handleTypes: CUmemAllocationHandleType,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}
const _: () = assert!(core::mem::size_of::<CUmemPoolProps>() == 88);

pub type CUmemPool_attribute = c_int;
pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: CUmemPool_attribute = 4;
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: CUmemPool_attribute = 5;
pub const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: CUmemPool_attribute = 7;

pub type CUgraphMem_attribute = c_int;
pub const CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: CUgraphMem_attribute = 0;
pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: CUgraphMem_attribute = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    pub r#type: CUmemAllocationType,
    pub requestedHandleTypes: CUmemAllocationHandleType,
    pub location: CUmemLocation,
    pub win32HandleMetaData: *mut c_void,
    pub compressionType: u8,
    pub gpuDirectRDMACapable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}
const _: () = assert!(core::mem::size_of::<CUmemAllocationProp>() == 32);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmulticastObjectProp {
    pub numDevices: c_uint,
    pub size: usize,
    pub handleTypes: c_ulonglong,
    pub flags: c_ulonglong,
}
const _: () = assert!(core::mem::size_of::<CUmulticastObjectProp>() == 32);

pub type CUmemRangeHandleType = c_int;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUarrayMapInfo {
    pub resourceType: c_int,
    /// `CUarray` or `CUmipmappedArray`.
    pub resource: *mut c_void,
    pub subresourceType: c_int,
    /// A union: for levels eight words (level, layer, three offsets, three extents), for mip tails a
    /// word (the layer) and two of 64 bits (offset, size), aligned.
    pub subresource: [u64; 4],
    pub memOperationType: c_int,
    pub memHandleType: c_int,
    pub memHandle: CUmemGenericAllocationHandle,
    pub offset: c_ulonglong,
    pub deviceBitMask: c_uint,
    pub flags: c_uint,
    pub reserved: [c_uint; 2],
}
const _: () = assert!(core::mem::size_of::<CUarrayMapInfo>() == 96);
pub const CU_MEM_OPERATION_TYPE_MAP: c_int = 1;

/// `CUipcMemHandle`: passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUipcMemHandle {
    pub reserved: [u8; 64],
}

pub type CUarray_format = c_int;

/// `CUDA_ARRAY_DESCRIPTOR` of any version: height 0 is one dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArrayDescriptor<N> {
    pub Width: N,
    pub Height: N,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
}
pub type CUDA_ARRAY_DESCRIPTOR = ArrayDescriptor<usize>;
/// Of before CUDA 3.2.
pub type CUDA_ARRAY_DESCRIPTOR_v1 = ArrayDescriptor<c_uint>;
const _: () = assert!(core::mem::size_of::<CUDA_ARRAY_DESCRIPTOR>() == 24);

/// `CUDA_ARRAY3D_DESCRIPTOR` of any version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Array3dDescriptor<N> {
    pub Width: N,
    pub Height: N,
    pub Depth: N,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
    pub Flags: c_uint,
}
pub type CUDA_ARRAY3D_DESCRIPTOR = Array3dDescriptor<usize>;
/// Of before CUDA 3.2.
pub type CUDA_ARRAY3D_DESCRIPTOR_v1 = Array3dDescriptor<c_uint>;
const _: () = assert!(core::mem::size_of::<CUDA_ARRAY3D_DESCRIPTOR>() == 40);

impl<N: Default> From<ArrayDescriptor<N>> for Array3dDescriptor<N> {
    fn from(flat: ArrayDescriptor<N>) -> Self {
        let ArrayDescriptor { Width, Height, Format, NumChannels } = flat;
        Self { Width, Height, Depth: N::default(), Format, NumChannels, Flags: 0 }
    }
}

/// The depth counts layers.
pub const CUDA_ARRAY3D_LAYERED: c_uint = 0x01;
/// The depth counts faces, six a cube.
pub const CUDA_ARRAY3D_CUBEMAP: c_uint = 0x04;
/// Memory comes tile by tile with `cuMemMapArrayAsync`.
pub const CUDA_ARRAY3D_SPARSE: c_uint = 0x40;
/// Memory comes with `cuMemMapArrayAsync`.
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: c_uint = 0x80;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUDA_ARRAY_MEMORY_REQUIREMENTS {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [c_uint; 4],
}

/// `CUgraphNodeType`.
pub const CU_GRAPH_NODE_TYPE_KERNEL: c_int = 0;
pub const CU_GRAPH_NODE_TYPE_GRAPH: c_int = 4;
pub const CU_GRAPH_NODE_TYPE_MEM_ALLOC: c_int = 10;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_KERNEL_NODE_PARAMS_v1 {
    pub func: CUfunction,
    /// Grid, block, bytes of shared memory.
    pub shape: [c_uint; 7],
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}
const _: () = assert!(core::mem::size_of::<CUDA_KERNEL_NODE_PARAMS_v1>() == 56);

/// `CUDA_KERNEL_NODE_PARAMS_v2` and, as far as it goes, `_v3` (cuda.h 12.9).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_KERNEL_NODE_PARAMS {
    pub func: CUfunction,
    /// Grid, block, bytes of shared memory.
    pub shape: [c_uint; 7],
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kern: CUkernel,
    pub ctx: CUcontext,
}
const _: () = assert!(core::mem::size_of::<CUDA_KERNEL_NODE_PARAMS>() == 72);

impl From<CUDA_KERNEL_NODE_PARAMS_v1> for CUDA_KERNEL_NODE_PARAMS {
    fn from(v1: CUDA_KERNEL_NODE_PARAMS_v1) -> Self {
        let CUDA_KERNEL_NODE_PARAMS_v1 { func, shape, kernelParams, extra } = v1;
        let (kern, ctx) = (core::ptr::null_mut(), core::ptr::null_mut());
        Self { func, shape, kernelParams, extra, kern, ctx }
    }
}

/// `CUgraphNodeParams` (cuda.h 12.9), with a kernel node's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUgraphNodeParams {
    pub r#type: c_int,
    pub reserved0: [c_int; 3],
    /// Where `type` is `CU_GRAPH_NODE_TYPE_KERNEL`.
    pub kernel: CUDA_KERNEL_NODE_PARAMS,
    pub rest: [u8; 168],
}
const _: () = assert!(core::mem::size_of::<CUgraphNodeParams>() == 256);

/// `CUDA_MEM_ALLOC_NODE_PARAMS_v1` (cuda.h 12.9).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS {
    pub poolProps: CUmemPoolProps,
    /// `const CUmemAccessDesc *`, opaque here.
    pub accessDescs: *const c_void,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: CUdeviceptr,
}
const _: () = assert!(core::mem::size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == 120);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    pub flags: cuuint64_t,
    pub hUploadStream: CUstream,
    pub hErrNode_out: CUgraphNode,
    pub result_out: c_int,
}
const _: () = assert!(core::mem::size_of::<CUDA_GRAPH_INSTANTIATE_PARAMS>() == 32);
pub const CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD: cuuint64_t = 2;
/// `CUgraphInstantiateResult`.
pub const CUDA_GRAPH_INSTANTIATE_ERROR: c_int = 1;

pub type CUgraphExecUpdateResult = c_int;
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUgraphExecUpdateResultInfo {
    pub result: CUgraphExecUpdateResult,
    pub errorNode: CUgraphNode,
    pub errorFromNode: CUgraphNode,
}

// Passed through.
pub type CUexecAffinityParam = c_void;
pub type CUctxCreateParams = c_void;
pub type CUDA_LAUNCH_PARAMS = c_void;

/// `CUlaunchConfig` (cuda.h 12.9): what `cuLaunchKernelEx` takes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUlaunchConfig {
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    /// `CUlaunchAttribute *`, opaque here.
    pub attrs: *mut c_void,
    pub numAttrs: c_uint,
}
const _: () = assert!(core::mem::size_of::<CUlaunchConfig>() == 56);

pub type CUmemorytype = c_uint;
pub const CU_MEMORYTYPE_HOST: CUmemorytype = 1;
pub const CU_MEMORYTYPE_DEVICE: CUmemorytype = 2;
pub const CU_MEMORYTYPE_ARRAY: CUmemorytype = 3;
/// An address that may be of either; the driver knows which.
pub const CU_MEMORYTYPE_UNIFIED: CUmemorytype = 4;

/// `CUpointer_attribute`: a [`CUmemorytype`].
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;

/// `CUDA_MEMCPY2D` of any version.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Memcpy2d<N, P> {
    pub srcXInBytes: N,
    pub srcY: N,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: P,
    pub srcArray: CUarray,
    pub srcPitch: N,
    pub dstXInBytes: N,
    pub dstY: N,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: P,
    pub dstArray: CUarray,
    pub dstPitch: N,
    pub WidthInBytes: N,
    pub Height: N,
}
pub type CUDA_MEMCPY2D = Memcpy2d<usize, CUdeviceptr>;
/// Of before CUDA 3.2.
pub type CUDA_MEMCPY2D_v1 = Memcpy2d<c_uint, CUdeviceptr_v1>;
const _: () = assert!(core::mem::size_of::<CUDA_MEMCPY2D>() == 128);

/// `CUDA_MEMCPY3D` of any version.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Memcpy3d<N, P> {
    pub srcXInBytes: N,
    pub srcY: N,
    pub srcZ: N,
    pub srcLOD: N,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: P,
    pub srcArray: CUarray,
    /// The context, in a [`CUDA_MEMCPY3D_PEER`].
    pub reserved0: *mut c_void,
    pub srcPitch: N,
    pub srcHeight: N,
    pub dstXInBytes: N,
    pub dstY: N,
    pub dstZ: N,
    pub dstLOD: N,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: P,
    pub dstArray: CUarray,
    /// As `reserved0`.
    pub reserved1: *mut c_void,
    pub dstPitch: N,
    pub dstHeight: N,
    pub WidthInBytes: N,
    pub Height: N,
    pub Depth: N,
}
pub type CUDA_MEMCPY3D = Memcpy3d<usize, CUdeviceptr>;
/// Of before CUDA 3.2.
pub type CUDA_MEMCPY3D_v1 = Memcpy3d<c_uint, CUdeviceptr_v1>;
/// The same fields, the reserved ones being contexts.
pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D;
const _: () = assert!(core::mem::size_of::<CUDA_MEMCPY3D>() == 200);

pub type CUmemcpy3DOperandType = c_int;
pub const CU_MEMCPY_OPERAND_TYPE_POINTER: CUmemcpy3DOperandType = 1;
pub const CU_MEMCPY_OPERAND_TYPE_ARRAY: CUmemcpy3DOperandType = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemcpy3DOperand {
    pub r#type: CUmemcpy3DOperandType,
    /// A union: an address, a row's length, a layer's height and a [`CUmemLocation`]; or an array and
    /// an offset of three words.
    pub op: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_MEMCPY3D_BATCH_OP {
    pub src: CUmemcpy3DOperand,
    pub dst: CUmemcpy3DOperand,
    /// Width, height and depth.
    pub extent: [usize; 3],
    pub srcAccessOrder: c_int,
    pub flags: c_uint,
}
const _: () = assert!(core::mem::size_of::<CUDA_MEMCPY3D_BATCH_OP>() == 112);

// Passed through, from here to `CUuuid`.
pub type CUmemcpyAttributes = c_void;
pub type CUDA_FABRIC_COPY_BATCH_OP = c_void;
pub type CUmemDecompressParams = c_void;

pub type CUstreamCaptureMode = c_int;
pub type CUgraphEdgeData = [u8; 8];
pub type CUstreamBatchMemOpParams = c_void;
pub type CUexternalSemaphore = *mut c_void;
pub type CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS = c_void;
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;
pub type CUstreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;
pub type CUgraphRecaptureCallback = *mut c_void;
pub type CUstreamCigCaptureParams = c_void;

/// `CUuuid`: 16 bytes, printed by NVML as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUuuid {
    pub bytes: [u8; 16],
}

pub type CUdriverProcAddressQueryResult = c_int;
pub const CU_GET_PROC_ADDRESS_SUCCESS: CUdriverProcAddressQueryResult = 0;
pub const CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND: CUdriverProcAddressQueryResult = 1;
pub const CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT: CUdriverProcAddressQueryResult = 2;

/// `cuGetProcAddress` flags: which default-stream flavour the caller wants.
pub const CU_GET_PROC_ADDRESS_DEFAULT: cuuint64_t = 0;
pub const CU_GET_PROC_ADDRESS_LEGACY_STREAM: cuuint64_t = 1;
pub const CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM: cuuint64_t = 2;
