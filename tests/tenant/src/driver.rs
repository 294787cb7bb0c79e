//! The driver functions this client calls, found by `dlsym`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use tessera_cuda::coverage::base_name;
use tessera_cuda::types::*;

use crate::exit::{self, Exit};

/// A function of the driver, which may be older than it.
#[derive(Clone, Copy)]
pub struct Function<F> {
    pub(crate) name: &'static str,
    pub(crate) pointer: Option<F>,
}

/// Calls a function of the driver; the error names it, where it is missing too.
macro_rules! call {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        let function = $driver.$function;
        match function.pointer {
            Some(pointer) => $crate::cuda::check(function.name, pointer($($arg),*)),
            None => Err($crate::exit::CudaError {
                call: function.name,
                code: tessera_cuda::types::CUDA_ERROR_NOT_FOUND,
            }),
        }
    }};
}
pub(crate) use call;

/// Declares [`Driver`]: field, export, arguments.
macro_rules! driver {
    ($($field:ident $export:literal ($($arg:ty),* $(,)?);)*) => {
        /// Typed pointers into libcuda (signatures of cuda.h, CUDA 12.9).
        #[derive(Clone, Copy)]
        pub struct Driver {
            $(
                #[doc = concat!("`", $export, "`")]
                pub $field: Function<unsafe extern "C" fn($($arg),*) -> CUresult>,
            )*
        }

        impl Driver {
            /// Loads `libcuda.so.1` and finds every function that it has.
            pub fn load() -> Result<Self, Exit> {
                let library = Library::open(c"libcuda.so.1")?;
                Ok(Self {
                    $($field: Function {
                        name: base_name($export),
                        // SAFETY: not null, and the driver's function of this name has this type.
                        pointer: library.symbol($export).map(|pointer| unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> CUresult,
                            >(pointer)
                        }),
                    },)*
                })
            }
        }
    };
}

driver! {
    init "cuInit" (c_uint);
    driver_version "cuDriverGetVersion" (*mut c_int);
    device_count "cuDeviceGetCount" (*mut c_int);
    device_get "cuDeviceGet" (*mut CUdevice, c_int);
    device_name "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    device_uuid "cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
    device_total_mem "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
    primary_retain "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    primary_release "cuDevicePrimaryCtxRelease_v2" (CUdevice);
    ctx_set_current "cuCtxSetCurrent" (CUcontext);
    mem_get_info "cuMemGetInfo_v2" (*mut usize, *mut usize);
    mem_alloc "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    mem_alloc_pitch "cuMemAllocPitch_v2" (*mut CUdeviceptr, *mut usize, usize, usize, c_uint);
    mem_alloc_managed "cuMemAllocManaged" (*mut CUdeviceptr, usize, c_uint);
    mem_alloc_async "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
    mem_free "cuMemFree_v2" (CUdeviceptr);
    mem_free_async "cuMemFreeAsync" (CUdeviceptr, CUstream);
    copy_to_device "cuMemcpyHtoD_v2" (CUdeviceptr, *const c_void, usize);
    copy_to_host "cuMemcpyDtoH_v2" (*mut c_void, CUdeviceptr, usize);
    module_load_data "cuModuleLoadData" (*mut CUmodule, *const c_void);
    module_get_function "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    launch_kernel "cuLaunchKernel" (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
        CUstream, *mut *mut c_void, *mut *mut c_void);
    stream_create "cuStreamCreate" (*mut CUstream, c_uint);
    stream_synchronize "cuStreamSynchronize" (CUstream);
    event_create "cuEventCreate" (*mut CUevent, c_uint);
    event_record "cuEventRecord" (CUevent, CUstream);
    event_synchronize "cuEventSynchronize" (CUevent);
    copy_2d "cuMemcpy2D_v2" (*const CUDA_MEMCPY2D);
    default_mem_pool "cuDeviceGetDefaultMemPool" (*mut CUmemoryPool, CUdevice);
    mem_pool_create "cuMemPoolCreate" (*mut CUmemoryPool, *const CUmemPoolProps);
    mem_pool_trim "cuMemPoolTrimTo" (CUmemoryPool, usize);
    mem_alloc_from_pool "cuMemAllocFromPoolAsync" (*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
    mem_granularity "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_int);
    mem_address_reserve "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    mem_address_free "cuMemAddressFree" (CUdeviceptr, usize);
    mem_create "cuMemCreate" (*mut u64, usize, *const CUmemAllocationProp, c_ulonglong);
    mem_release "cuMemRelease" (u64);
    mem_map "cuMemMap" (CUdeviceptr, usize, usize, u64, c_ulonglong);
    mem_unmap "cuMemUnmap" (CUdeviceptr, usize);
    mem_set_access "cuMemSetAccess" (CUdeviceptr, usize, *const c_void, usize);
    array_create "cuArray3DCreate_v2" (*mut CUarray, *const CUDA_ARRAY3D_DESCRIPTOR);
    array_destroy "cuArrayDestroy" (*mut c_void);
    mipmap_create "cuMipmappedArrayCreate" (*mut *mut c_void, *const CUDA_ARRAY3D_DESCRIPTOR, c_uint);
    mipmap_level "cuMipmappedArrayGetLevel" (*mut *mut c_void, *mut c_void, c_uint);
    mipmap_destroy "cuMipmappedArrayDestroy" (*mut c_void);
    stream_begin_capture "cuStreamBeginCapture_v2" (CUstream, c_int);
    stream_end_capture "cuStreamEndCapture" (CUstream, *mut *mut c_void);
    graph_create "cuGraphCreate" (*mut *mut c_void, c_uint);
    graph_destroy "cuGraphDestroy" (*mut c_void);
    graph_add_mem_alloc "cuGraphAddMemAllocNode"
        (*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *mut CUDA_MEM_ALLOC_NODE_PARAMS);
    graph_instantiate "cuGraphInstantiateWithFlags" (*mut CUgraphExec, *mut c_void, c_ulonglong);
    graph_launch "cuGraphLaunch" (CUgraphExec, CUstream);
    graph_exec_destroy "cuGraphExecDestroy" (CUgraphExec);
    graph_mem_trim "cuDeviceGraphMemTrim" (CUdevice);
    device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
    event_query "cuEventQuery" (CUevent);
    host_alloc "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_register "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_device_pointer "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    write_value "cuStreamWriteValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
    launch_host_func "cuLaunchHostFunc" (CUstream, Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void);
    copy_batch "cuMemcpyBatchAsync_v2" (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut c_void,
        *mut usize, usize, CUstream);
    wait_value "cuStreamWaitValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
}

/// A library that stays loaded until the process ends.
pub struct Library(*mut c_void);

impl Library {
    /// `dlopen`s `name`; the error names what `dlerror` says.
    pub fn open(name: &CStr) -> Result<Self, Exit> {
        // SAFETY: a NUL-terminated name; running the library's constructors is the purpose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror returns null or a NUL-terminated string valid until the next call.
            let reason = unsafe {
                let text = libc::dlerror();
                if text.is_null() {
                    String::from("unknown reason")
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            };
            return Err(Exit::new(exit::NO_DRIVER, format!("cannot load the driver: {reason}")));
        }
        Ok(Self(handle))
    }

    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open for the process's life and the name NUL-terminated.
        let pointer = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!pointer.is_null()).then_some(pointer)
    }
}
