//! The driver functions this client calls, found by `dlsym` or through `cuGetProcAddress`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use tessera_cuda::types::{
    CU_GET_PROC_ADDRESS_DEFAULT, CUDA_SUCCESS, CUcontext, CUdevice, CUdeviceptr,
    CUdriverProcAddressQueryResult, CUevent, CUfunction, CUgraphExec, CUmemoryPool, CUmodule,
    CUresult, CUstream, CUuuid, cuuint64_t,
};

use crate::exit::{self, Exit};

/// How functions are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// `dlsym` of the export, as a program linked against libcuda does.
    Dlsym,
    /// `cuGetProcAddress` for CUDA 12.0, as the runtime library does.
    ProcAddress,
}

/// The version asked of `cuGetProcAddress`.
const CUDA_12_0: c_int = 12000;

type GetProcAddressV2 = unsafe extern "C" fn(
    *const c_char,
    *mut *mut c_void,
    c_int,
    cuuint64_t,
    *mut CUdriverProcAddressQueryResult,
) -> CUresult;
type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, cuuint64_t) -> CUresult;

/// Declares [`Driver`]: field, export, the name `cuGetProcAddress` knows it by, arguments.
macro_rules! driver {
    (
        required { $( $field:ident $export:literal $name:literal ($($arg:ty),* $(,)?); )* }
        optional { $( $late:ident $late_export:literal $late_name:literal ($($late_arg:ty),* $(,)?); )* }
    ) => {
        /// Typed pointers into libcuda (signatures of cuda.h, CUDA 12.9).
        #[derive(Clone, Copy)]
        pub struct Driver {
            $(
                #[doc = concat!("`", $export, "`")]
                pub $field: unsafe extern "C" fn($($arg),*) -> CUresult,
            )*
            $(
                #[doc = concat!("`", $late_export, "`, where the driver has it")]
                pub $late: Option<unsafe extern "C" fn($($late_arg),*) -> CUresult>,
            )*
        }

        impl Driver {
            /// Loads `libcuda.so.1` and finds every function.
            pub fn load(resolve: Resolve) -> Result<Self, Exit> {
                let library = Library::open(c"libcuda.so.1")?;
                let finder = Finder::new(&library, resolve)?;
                Ok(Self {
                    $($field: {
                        let pointer = finder.find($export, $name)?;
                        // SAFETY: not null, and the driver's function of this name has this type.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> CUresult,
                            >(pointer)
                        }
                    },)*
                    $($late: finder.find($late_export, $late_name).ok().map(|pointer| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($late_arg),*) -> CUresult,
                            >(pointer)
                        }
                    }),)*
                })
            }
        }
    };
}

driver! {
    required {
        init "cuInit" "cuInit" (c_uint);
        driver_version "cuDriverGetVersion" "cuDriverGetVersion" (*mut c_int);
        device_count "cuDeviceGetCount" "cuDeviceGetCount" (*mut c_int);
        device_get "cuDeviceGet" "cuDeviceGet" (*mut CUdevice, c_int);
        device_name "cuDeviceGetName" "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        device_uuid "cuDeviceGetUuid_v2" "cuDeviceGetUuid" (*mut CUuuid, CUdevice);
        device_total_mem "cuDeviceTotalMem_v2" "cuDeviceTotalMem" (*mut usize, CUdevice);
        primary_retain "cuDevicePrimaryCtxRetain" "cuDevicePrimaryCtxRetain"
            (*mut CUcontext, CUdevice);
        primary_release "cuDevicePrimaryCtxRelease_v2" "cuDevicePrimaryCtxRelease" (CUdevice);
        ctx_set_current "cuCtxSetCurrent" "cuCtxSetCurrent" (CUcontext);
        mem_get_info "cuMemGetInfo_v2" "cuMemGetInfo" (*mut usize, *mut usize);
        mem_alloc "cuMemAlloc_v2" "cuMemAlloc" (*mut CUdeviceptr, usize);
        mem_alloc_pitch "cuMemAllocPitch_v2" "cuMemAllocPitch"
            (*mut CUdeviceptr, *mut usize, usize, usize, c_uint);
        mem_alloc_managed "cuMemAllocManaged" "cuMemAllocManaged"
            (*mut CUdeviceptr, usize, c_uint);
        mem_alloc_async "cuMemAllocAsync" "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
        mem_free "cuMemFree_v2" "cuMemFree" (CUdeviceptr);
        mem_free_async "cuMemFreeAsync" "cuMemFreeAsync" (CUdeviceptr, CUstream);
        copy_to_device "cuMemcpyHtoD_v2" "cuMemcpyHtoD" (CUdeviceptr, *const c_void, usize);
        copy_to_host "cuMemcpyDtoH_v2" "cuMemcpyDtoH" (*mut c_void, CUdeviceptr, usize);
        module_load_data "cuModuleLoadData" "cuModuleLoadData" (*mut CUmodule, *const c_void);
        module_get_function "cuModuleGetFunction" "cuModuleGetFunction"
            (*mut CUfunction, CUmodule, *const c_char);
        launch_kernel "cuLaunchKernel" "cuLaunchKernel"
            (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
             *mut *mut c_void, *mut *mut c_void);
        stream_create "cuStreamCreate" "cuStreamCreate" (*mut CUstream, c_uint);
        stream_synchronize "cuStreamSynchronize" "cuStreamSynchronize" (CUstream);
        event_create "cuEventCreate" "cuEventCreate" (*mut CUevent, c_uint);
        event_record "cuEventRecord" "cuEventRecord" (CUevent, CUstream);
        event_synchronize "cuEventSynchronize" "cuEventSynchronize" (CUevent);
    }
    optional {
        copy_2d "cuMemcpy2D_v2" "cuMemcpy2D" (*const c_void);
        default_mem_pool "cuDeviceGetDefaultMemPool" "cuDeviceGetDefaultMemPool"
            (*mut CUmemoryPool, CUdevice);
        mem_pool_create "cuMemPoolCreate" "cuMemPoolCreate" (*mut CUmemoryPool, *const c_void);
        mem_pool_destroy "cuMemPoolDestroy" "cuMemPoolDestroy" (CUmemoryPool);
        mem_pool_trim "cuMemPoolTrimTo" "cuMemPoolTrimTo" (CUmemoryPool, usize);
        mem_alloc_from_pool "cuMemAllocFromPoolAsync" "cuMemAllocFromPoolAsync"
            (*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        mem_granularity "cuMemGetAllocationGranularity" "cuMemGetAllocationGranularity"
            (*mut usize, *const c_void, c_int);
        mem_address_reserve "cuMemAddressReserve" "cuMemAddressReserve"
            (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        mem_address_free "cuMemAddressFree" "cuMemAddressFree" (CUdeviceptr, usize);
        mem_create "cuMemCreate" "cuMemCreate" (*mut u64, usize, *const c_void, c_ulonglong);
        mem_release "cuMemRelease" "cuMemRelease" (u64);
        mem_map "cuMemMap" "cuMemMap" (CUdeviceptr, usize, usize, u64, c_ulonglong);
        mem_unmap "cuMemUnmap" "cuMemUnmap" (CUdeviceptr, usize);
        mem_set_access "cuMemSetAccess" "cuMemSetAccess" (CUdeviceptr, usize, *const c_void, usize);
        array_create "cuArray3DCreate_v2" "cuArray3DCreate" (*mut *mut c_void, *const c_void);
        array_destroy "cuArrayDestroy" "cuArrayDestroy" (*mut c_void);
        mipmap_create "cuMipmappedArrayCreate" "cuMipmappedArrayCreate"
            (*mut *mut c_void, *const c_void, c_uint);
        mipmap_level "cuMipmappedArrayGetLevel" "cuMipmappedArrayGetLevel"
            (*mut *mut c_void, *mut c_void, c_uint);
        mipmap_destroy "cuMipmappedArrayDestroy" "cuMipmappedArrayDestroy" (*mut c_void);
        stream_begin_capture "cuStreamBeginCapture_v2" "cuStreamBeginCapture" (CUstream, c_int);
        stream_end_capture "cuStreamEndCapture" "cuStreamEndCapture" (CUstream, *mut *mut c_void);
        graph_create "cuGraphCreate" "cuGraphCreate" (*mut *mut c_void, c_uint);
        graph_destroy "cuGraphDestroy" "cuGraphDestroy" (*mut c_void);
        graph_add_mem_alloc "cuGraphAddMemAllocNode" "cuGraphAddMemAllocNode"
            (*mut *mut c_void, *mut c_void, *const c_void, usize, *mut c_void);
        graph_instantiate "cuGraphInstantiateWithFlags" "cuGraphInstantiateWithFlags"
            (*mut CUgraphExec, *mut c_void, c_ulonglong);
        graph_launch "cuGraphLaunch" "cuGraphLaunch" (CUgraphExec, CUstream);
        graph_exec_destroy "cuGraphExecDestroy" "cuGraphExecDestroy" (CUgraphExec);
        graph_mem_trim "cuDeviceGraphMemTrim" "cuDeviceGraphMemTrim" (CUdevice);
        device_attribute "cuDeviceGetAttribute" "cuDeviceGetAttribute"
            (*mut c_int, c_int, CUdevice);
        event_query "cuEventQuery" "cuEventQuery" (CUevent);
        stream_query "cuStreamQuery" "cuStreamQuery" (CUstream);
        host_alloc "cuMemHostAlloc" "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_register "cuMemHostRegister_v2" "cuMemHostRegister" (*mut c_void, usize, c_uint);
        host_device_pointer "cuMemHostGetDevicePointer_v2" "cuMemHostGetDevicePointer"
            (*mut CUdeviceptr, *mut c_void, c_uint);
        write_value "cuStreamWriteValue64_v2" "cuStreamWriteValue64"
            (CUstream, CUdeviceptr, u64, c_uint);
        launch_host_func "cuLaunchHostFunc" "cuLaunchHostFunc"
            (CUstream, Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void);
        copy_batch "cuMemcpyBatchAsync_v2" "cuMemcpyBatchAsync"
            (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut c_void, *mut usize, usize, CUstream);
        wait_value "cuStreamWaitValue64_v2" "cuStreamWaitValue64"
            (CUstream, CUdeviceptr, u64, c_uint);
    }
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

    /// An exported function, if there is one of that name.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open for the process's life and the name NUL-terminated.
        let pointer = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!pointer.is_null()).then_some(pointer)
    }
}

enum Finder<'a> {
    Dlsym(&'a Library),
    V2(GetProcAddressV2),
    V1(GetProcAddress),
}

impl<'a> Finder<'a> {
    fn new(library: &'a Library, resolve: Resolve) -> Result<Self, Exit> {
        if resolve == Resolve::Dlsym {
            return Ok(Self::Dlsym(library));
        }
        if let Some(pointer) = library.symbol("cuGetProcAddress_v2") {
            // SAFETY: the driver's export of this name has this type (cuda.h 12.0).
            return Ok(Self::V2(unsafe {
                std::mem::transmute::<*mut c_void, GetProcAddressV2>(pointer)
            }));
        }
        let pointer = library
            .symbol("cuGetProcAddress")
            .ok_or_else(|| Exit::new(exit::NO_DRIVER, "the driver has no cuGetProcAddress"))?;
        // SAFETY: the driver's export of this name has this type (cuda.h 11.3).
        Ok(Self::V1(unsafe { std::mem::transmute::<*mut c_void, GetProcAddress>(pointer) }))
    }

    fn find(&self, export: &str, name: &str) -> Result<*mut c_void, Exit> {
        let missing = || Exit::new(exit::NO_DRIVER, format!("the driver has no {export}"));
        let c_name = CString::new(name).map_err(|_| missing())?;
        let mut pointer = std::ptr::null_mut();
        let code = match self {
            Self::Dlsym(library) => return library.symbol(export).ok_or_else(missing),
            // SAFETY: a NUL-terminated name and two live out-parameters.
            Self::V2(get) => unsafe {
                let mut status = 0;
                get(
                    c_name.as_ptr(),
                    &raw mut pointer,
                    CUDA_12_0,
                    CU_GET_PROC_ADDRESS_DEFAULT,
                    &raw mut status,
                )
            },
            // SAFETY: as above, without the status.
            Self::V1(get) => unsafe {
                get(c_name.as_ptr(), &raw mut pointer, CUDA_12_0, CU_GET_PROC_ADDRESS_DEFAULT)
            },
        };
        if code != CUDA_SUCCESS || pointer.is_null() {
            return Err(missing());
        }
        Ok(pointer)
    }
}
