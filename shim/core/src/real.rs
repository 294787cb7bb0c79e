//! Typed pointers to the driver's own functions, and where they come from.
//!
//! There is no NEEDED entry for a driver library: the shim sits in processes that never use a GPU.
//! A library is looked for when a lookup asks for one of its hooked names, and loaded when a hook is
//! called before anything loaded it. Once found it is pinned, because real pointers point into it.
//!
//! Every hooked variant has its own [`Real`], because variants of one function differ (a `_ptsz`
//! twin launches into another stream). A pointer that the driver does not have stays null, and only
//! that one export answers "not found"; the others are untouched.
#![allow(non_upper_case_globals, missing_docs, reason = "statics carry the driver's own names")]

use crate::libdl;
use crate::resolve::real_dlsym;
use crate::work::{Kind, Work, work_of};
use core::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use tessera_cuda::nvml::*;
use tessera_cuda::types::*;

#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    Cuda,
    Nvml,
}

#[repr(C)]
#[derive(Debug)]
pub struct Symbol {
    /// NUL-terminated. A bare pointer: every word of every symbol costs a relocation in every process.
    name: *const c_char,
    pointer: AtomicPtr<c_void>,
    library: Library,
    /// What the gate asks of it, if it is the gate's affair.
    pub(crate) work: Work,
}

// SAFETY: the name is a literal, which is never written.
unsafe impl Sync for Symbol {}

impl Symbol {
    pub fn name(&self) -> &'static CStr {
        // SAFETY: `Real::new` was given a CStr that lives forever.
        unsafe { CStr::from_ptr(self.name) }
    }

    pub fn library(&self) -> Library {
        self.library
    }

    /// The driver's own export; null before the driver is loaded, and where it has none.
    #[inline(always)]
    pub fn pointer(&self) -> *mut c_void {
        // Acquire: pairs with the Release in `bind`, so that the library it points into is mapped.
        self.pointer.load(Ordering::Acquire)
    }

    /// As [`Symbol::pointer`], looking for the library, and loading it, when it is asked for first.
    #[inline(always)]
    pub(crate) fn found(&self) -> *mut c_void {
        let pointer = self.pointer();
        if pointer.is_null() { self.find() } else { pointer }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        bind(self.library, Wanted::Load);
        self.pointer()
    }
}

/// How far to go for a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Only if the process has it already.
    IfLoaded,
    /// Load it: a hook was called.
    Load,
}

/// Release-stored once every symbol of the library has its pointer.
static CUDA_BOUND: AtomicBool = AtomicBool::new(false);
static NVML_BOUND: AtomicBool = AtomicBool::new(false);

/// Binds all symbols of `library`; false where it is not loaded (and not `wanted` enough) or absent.
///
/// Racing threads bind the same pointers twice, which is harmless.
pub(crate) fn bind(library: Library, wanted: Wanted) -> bool {
    let (bound, soname) = match library {
        Library::Cuda => (&CUDA_BOUND, c"libcuda.so.1"),
        Library::Nvml => (&NVML_BOUND, c"libnvidia-ml.so.1"),
    };
    if bound.load(Ordering::Acquire) {
        return true;
    }
    let Some(dlsym) = real_dlsym() else { return false };
    // Pinned for the life of the process.
    let open = |flags: c_int| {
        let flags = libc::RTLD_LAZY | libc::RTLD_NODELETE | flags;
        // SAFETY: a NUL-terminated name; the driver's constructors are what the host asked for.
        unsafe { libdl::dlopen(soname.as_ptr(), flags) }
    };
    let mut handle = open(libc::RTLD_NOLOAD);
    if handle.is_null() && wanted == Wanted::Load {
        handle = open(0);
    }
    if handle.is_null() {
        return false;
    }
    for symbol in symbols(library) {
        // SAFETY: a live handle and a NUL-terminated name; the real dlsym has no other demands.
        let pointer = unsafe { dlsym(handle, symbol.name) };
        symbol.pointer.store(pointer, Ordering::Release);
    }
    bound.store(true, Ordering::Release);
    true
}

/// A driver function of type `F`.
#[repr(transparent)]
#[derive(Debug)]
pub struct Real<F> {
    symbol: Symbol,
    signature: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    /// Names a driver function, with what the gate asks of it.
    ///
    /// # Safety
    /// `F` must be an `extern "C"` function pointer type with the signature that `library`
    /// documents for `name`.
    const unsafe fn new(name: &'static CStr, library: Library, work: Work) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let (name, pointer) = (name.as_ptr(), AtomicPtr::new(core::ptr::null_mut()));
        Self { symbol: Symbol { name, library, pointer, work }, signature: PhantomData }
    }

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
        self.bound().or_else(|| {
            self.symbol.find();
            self.bound()
        })
    }

    /// Has `call` call the driver where its answer changes nothing, if it has the function.
    #[inline]
    pub(crate) fn tell<R>(&self, call: impl FnOnce(F) -> R) {
        if let Some(function) = self.get() {
            call(function);
        }
    }

    /// What the driver says when `call` asks it for something: `place` is where it writes.
    ///
    /// # Errors
    /// The driver's own; `CUDA_ERROR_NOT_SUPPORTED` where it has no such function.
    #[inline]
    pub(crate) fn ask<T>(
        &self,
        mut place: T,
        call: impl FnOnce(F, *mut T) -> c_int,
    ) -> Result<T, c_int> {
        let function = self.get().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
        // NVML's success is 0, too.
        match call(function, &raw mut place) {
            CUDA_SUCCESS => Ok(place),
            error => Err(error),
        }
    }
}

/// Statics of one section, which [`symbols`] goes through: lists of pointers to them would be a quarter
/// of the shim's relocations.
macro_rules! real {
    ($library:ident $name:ident ($($arg:ident : $ty:ty),* $(,)?) -> $result:ty) => {
        real!($library $name ($($arg : $ty),*) -> $result, Work::NONE);
    };
    ($library:ident $name:ident ($($arg:ident : $ty:ty),* $(,)?) -> $result:ty, $work:expr) => {
        // Used: they are set through the section alone, of which the optimiser knows nothing. It would
        // take them for null for good, and every hook for one without a driver.
        #[used]
        #[unsafe(link_section = "tessera_symbols")]
        // SAFETY: the type is the row's signature, which is the header's; the bytes end in NUL.
        pub static $name: Real<unsafe extern "C" fn($($ty),*) -> $result> = unsafe {
            Real::new(
                CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()),
                Library::$library,
                $work,
            )
        };
    };
}

macro_rules! cuda {
    ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        $($(cuda!(@one $class $body $export $flavour $args);)+)*
    };
    (@one work $body:ident $export:ident $flavour:ident $args:tt) => {
        real!(Cuda $export $args -> CUresult, work_of!($body $flavour $args));
    };
    (@one $class:ident $body:ident $export:ident $flavour:ident $args:tt) => {
        real!(Cuda $export $args -> CUresult);
    };
}
tessera_cuda::for_each_hook!(cuda);

macro_rules! nvml {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
        $($(real!(Nvml $export $args -> nvmlReturn_t);)+)*
    };
}
tessera_cuda::for_each_nvml_hook!(nvml);

// The linker defines them in every library that asks, and would export them.
core::arch::global_asm!(".hidden __start_tessera_symbols", ".hidden __stop_tessera_symbols");

unsafe extern "C" {
    #[link_name = "__start_tessera_symbols"]
    static FIRST: Symbol;
    #[link_name = "__stop_tessera_symbols"]
    static END: Symbol;
}

/// Every symbol of `library` that this program has a use for.
fn symbols(library: Library) -> impl Iterator<Item = &'static Symbol> {
    let (first, end) = (&raw const FIRST, &raw const END);
    let count = (end.addr() - first.addr()) / size_of::<Symbol>();
    // SAFETY: the linker puts these around the section, which `real!` alone fills, with statics that
    // are a `Symbol` each, without gaps, because they are aligned to less than their size.
    let all = unsafe { core::slice::from_raw_parts(first, count) };
    all.iter().filter(move |symbol| symbol.library == library)
}

/// Functions that the shim asks for itself and does not hook.
macro_rules! asked {
    ($library:ident $result:ty; $($name:ident $args:tt;)*) => {
        $(real!($library $name $args -> $result);)*
    };
}
asked! { Cuda CUresult;
    cuArrayGetMemoryRequirements
        (needs: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, dev: CUdevice);
    cuCtxFromGreenCtx (ctx: *mut CUcontext, green: CUgreenCtx);
    cuCtxGetCurrent (ctx: *mut CUcontext);
    cuCtxGetDevice (dev: *mut CUdevice);
    cuCtxGetLimit (value: *mut usize, limit: CUlimit);
    cuCtxPopCurrent_v2 (ctx: *mut CUcontext);
    cuCtxPushCurrent_v2 (ctx: CUcontext);
    cuDeviceGetAttribute (value: *mut c_int, attribute: c_int, dev: CUdevice);
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
    cuFuncGetAttribute (value: *mut c_int, attribute: c_int, function: CUfunction);
    cuFuncIsLoaded (state: *mut c_int, function: CUfunction);
    cuFuncLoad (function: CUfunction);
    cuGraphChildGraphNodeGetGraph (node: CUgraphNode, graph: *mut CUgraph);
    cuGraphGetNodes (graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
    cuGraphKernelNodeGetParams (node: CUgraphNode, params: *mut CUDA_KERNEL_NODE_PARAMS);
    cuGraphKernelNodeGetParams_v2 (node: CUgraphNode, params: *mut CUDA_KERNEL_NODE_PARAMS);
    cuGraphMemAllocNodeGetParams (node: CUgraphNode, params: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
    cuGraphNodeGetType (node: CUgraphNode, kind: *mut c_int);
    cuKernelGetAttribute
        (value: *mut c_int, attribute: c_int, kernel: CUkernel, dev: CUdevice);
    cuMemGetAddressRange_v2 (base: *mut CUdeviceptr, size: *mut usize, pointer: CUdeviceptr);
    cuMemHostGetDevicePointer_v2 (address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
    cuMemHostRegister_v2 (host: *mut c_void, bytes: usize, flags: c_uint);
    cuMemGetAllocationPropertiesFromHandle
        (prop: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
    cuMemPoolGetAttribute (pool: CUmemoryPool, attribute: c_int, value: *mut c_void);
    cuMipmappedArrayGetMemoryRequirements
        (needs: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUmipmappedArray, dev: CUdevice);
    cuPointerGetAttribute (value: *mut c_void, attribute: c_int, pointer: CUdeviceptr);
    cuStreamGetCtx (stream: CUstream, ctx: *mut CUcontext);
    cuStreamGetGreenCtx (stream: CUstream, green: *mut CUgreenCtx);
    cuStreamIsCapturing (stream: CUstream, status: *mut c_int);
    cuStreamWriteValue64_v2
        (stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    cuThreadExchangeStreamCaptureMode (mode: *mut c_int);
}
asked! { Nvml nvmlReturn_t;
    nvmlDeviceGetComputeInstanceId (device: nvmlDevice_t, id: *mut c_uint);
    nvmlDeviceGetGpuInstanceId (device: nvmlDevice_t, id: *mut c_uint);
    nvmlDeviceGetMaxMigDeviceCount (device: nvmlDevice_t, count: *mut c_uint);
    nvmlDeviceGetMigDeviceHandleByIndex
        (device: nvmlDevice_t, index: c_uint, instance: *mut nvmlDevice_t);
    nvmlDeviceGetUUID (device: nvmlDevice_t, uuid: *mut c_char, length: c_uint);
}
