//! Typed pointers to the driver's own functions.
//!
//! Every hooked variant has its own [`Real`], because variants of one function differ (a `_ptsz`
//! twin launches into another stream). A pointer that the driver does not have stays null, and only
//! that one export answers "not found"; the others are untouched.
#![allow(non_upper_case_globals, missing_docs, reason = "statics carry the driver's own names")]

use crate::driver;
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use core::marker::PhantomData;
use core::sync::atomic::{AtomicPtr, Ordering};
use tessera_cuda::nvml::*;
use tessera_cuda::types::*;

/// Whose symbol it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// libcuda.so.1
    Cuda,
    /// libnvidia-ml.so.1
    Nvml,
}

/// A function of the driver, by name.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    library: Library,
    pointer: AtomicPtr<c_void>,
}

impl Symbol {
    /// The exported name.
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// Whose it is.
    pub fn library(&self) -> Library {
        self.library
    }

    /// The driver's own export; null before the driver is loaded, and where it has none.
    #[inline(always)]
    pub fn pointer(&self) -> *mut c_void {
        // Acquire: pairs with the Release in `set`, so that the library it points into is mapped.
        self.pointer.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, pointer: *mut c_void) {
        self.pointer.store(pointer, Ordering::Release);
    }
}

/// A driver function of type `F`.
#[derive(Debug)]
pub struct Real<F> {
    symbol: Symbol,
    signature: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    /// Names a driver function.
    ///
    /// # Safety
    /// `F` must be an `extern "C"` function pointer type with the signature that `library`
    /// documents for `name`.
    pub const unsafe fn new(name: &'static CStr, library: Library) -> Self {
        // SAFETY: a null pointer is "not found yet".
        unsafe { Self::at(name, library, core::ptr::null_mut()) }
    }

    /// Names a driver function that is already at `pointer`, as the benches do.
    ///
    /// # Safety
    /// As [`Real::new`]; `pointer` must be null or such a function.
    pub const unsafe fn at(name: &'static CStr, library: Library, pointer: *mut c_void) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let symbol = Symbol { name, library, pointer: AtomicPtr::new(pointer) };
        Self { symbol, signature: PhantomData }
    }

    /// The untyped part.
    pub const fn symbol(&self) -> &Symbol {
        &self.symbol
    }

    /// The driver's function, if the library is bound and has it.
    #[inline(always)]
    pub fn bound(&self) -> Option<F> {
        let pointer = self.symbol.pointer();
        if pointer.is_null() {
            return None;
        }
        // SAFETY: non-null, so by the contract of `new` it is a function of type F; sizes are equal.
        Some(unsafe { core::mem::transmute_copy::<*mut c_void, F>(&pointer) })
    }

    /// The driver's function, looking for the library, and loading it, when called for the first
    /// time. `None` where this driver has no such function.
    #[inline(always)]
    pub fn get(&self) -> Option<F> {
        self.bound().or_else(|| self.find())
    }

    #[cold]
    fn find(&self) -> Option<F> {
        driver::bind(self.symbol.library, driver::Wanted::Load);
        self.bound()
    }
}

macro_rules! real {
    ($library:ident $name:ident ($($arg:ident : $ty:ty),* $(,)?) -> $result:ty) => {
        // SAFETY: the type is the row's signature, which is the header's; the bytes end in NUL.
        pub static $name: Real<unsafe extern "C" fn($($ty),*) -> $result> = unsafe {
            Real::new(
                CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()),
                Library::$library,
            )
        };
    };
}

macro_rules! cuda {
    ($($class:ident $body:ident { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        $($(real!(Cuda $export $args -> CUresult);)+)*
        pub(crate) static CUDA_HOOKED: &[&Symbol] = &[$($($export.symbol()),+),*];
    };
}
tessera_cuda::for_each_hook!(cuda);

macro_rules! nvml {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
        $($(real!(Nvml $export $args -> nvmlReturn_t);)+)*
        pub(crate) static NVML_HOOKED: &[&Symbol] = &[$($($export.symbol()),+),*];
    };
}
tessera_cuda::for_each_nvml_hook!(nvml);

/// Functions that the shim asks for itself and does not hook.
macro_rules! asked {
    ($list:ident $library:ident $result:ty; $($name:ident $args:tt;)*) => {
        $(real!($library $name $args -> $result);)*
        pub(crate) static $list: &[&Symbol] = &[$($name.symbol()),*];
    };
}
asked! { CUDA_ASKED Cuda CUresult;
    cuArrayGetMemoryRequirements
        (needs: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, dev: CUdevice);
    cuCtxGetCurrent (ctx: *mut CUcontext);
    cuCtxGetDevice (dev: *mut CUdevice);
    cuCtxPopCurrent_v2 (ctx: *mut CUcontext);
    cuCtxPushCurrent_v2 (ctx: CUcontext);
    cuDeviceGet (dev: *mut CUdevice, ordinal: c_int);
    cuDeviceGetCount (count: *mut c_int);
    cuDeviceGetDefaultMemPool (pool: *mut CUmemoryPool, dev: CUdevice);
    cuDeviceGetGraphMemAttribute (dev: CUdevice, attribute: c_int, value: *mut c_void);
    cuDeviceGetMemPool (pool: *mut CUmemoryPool, dev: CUdevice);
    cuDeviceGetUuid (uuid: *mut CUuuid, dev: CUdevice);
    cuDeviceGetUuid_v2 (uuid: *mut CUuuid, dev: CUdevice);
    cuDevicePrimaryCtxGetState (dev: CUdevice, flags: *mut c_uint, active: *mut c_int);
    cuEventCreate (event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2 (event: CUevent);
    cuEventQuery (event: CUevent);
    cuEventRecord (event: CUevent, stream: CUstream);
    cuGraphChildGraphNodeGetGraph (node: CUgraphNode, graph: *mut CUgraph);
    cuGraphGetNodes (graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
    cuGraphMemAllocNodeGetParams (node: CUgraphNode, params: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
    cuGraphNodeGetType (node: CUgraphNode, kind: *mut c_int);
    cuMemGetAddressRange_v2 (base: *mut CUdeviceptr, size: *mut usize, pointer: CUdeviceptr);
    cuMemGetAllocationPropertiesFromHandle
        (prop: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
    cuMemPoolGetAttribute (pool: CUmemoryPool, attribute: c_int, value: *mut c_void);
    cuMipmappedArrayGetMemoryRequirements
        (needs: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUmipmappedArray, dev: CUdevice);
    cuStreamGetCtx (stream: CUstream, ctx: *mut CUcontext);
    cuStreamIsCapturing (stream: CUstream, status: *mut c_int);
    cuStreamIsCapturing_ptsz (stream: CUstream, status: *mut c_int);
    cuThreadExchangeStreamCaptureMode (mode: *mut c_int);
}
asked! { NVML_ASKED Nvml nvmlReturn_t;
    nvmlDeviceGetComputeInstanceId (device: nvmlDevice_t, id: *mut c_uint);
    nvmlDeviceGetGpuInstanceId (device: nvmlDevice_t, id: *mut c_uint);
    nvmlDeviceGetMaxMigDeviceCount (device: nvmlDevice_t, count: *mut c_uint);
    nvmlDeviceGetMigDeviceHandleByIndex
        (device: nvmlDevice_t, index: c_uint, instance: *mut nvmlDevice_t);
    nvmlDeviceGetUUID (device: nvmlDevice_t, uuid: *mut c_char, length: c_uint);
}
