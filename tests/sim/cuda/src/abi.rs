//! The boundary to C: exports, the pointers and the handles that callers hand in, the names of errors.
//!
//! A handle is the address of an object that is never unmapped, only recycled, so that checking a
//! stale handle's magic reads valid memory. An address that never was an object is the caller's
//! error, as with the real driver, but null and misaligned ones are refused.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUresult};

pub(crate) type Result<T> = std::result::Result<T, CUresult>;

simgpu::pointers!(CUDA_ERROR_INVALID_VALUE);

/// As [`put`], where the manual allows null.
pub(crate) fn put_if<T>(to: *mut T, value: T) {
    if !to.is_null() {
        let _ = put(to, value);
    }
}

/// Writes `text`, cut to `len` bytes with its terminator.
pub(crate) fn put_text(to: *mut c_char, len: i32, text: &str) -> Result<()> {
    let len = usize::try_from(len).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if to.is_null() || len == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let n = text.len().min(len - 1);
    // SAFETY: the caller promises `len` writable bytes, and n + 1 ≤ len.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), to, n);
        *to.add(n) = 0;
    }
    Ok(())
}

/// Declares exported driver functions, which fail before `cuInit`:
/// - `fn name, its_other_name(args) { body }`, whose body is a `Result<()>`;
/// - `fn name(args) -> T { body }`: a `Result<T>`, which is put where a first argument points, that must not be null.
macro_rules! exports {
    ($(fn $($name:ident),+ ($($args:tt)*) $(-> $out:ty)? $body:block)*) => {
        $($crate::abi::exports! { @each [$($name)+] ($($args)*) [$($out)?] $body })*
    };
    (@each [$($name:ident)+] $args:tt $out:tt $body:block) => {
        $($crate::abi::exports! { @one $name $args $out $body })+
    };
    (@one $name:ident ($($arg:ident: $ty:ty),* $(,)?) [] $body:block) => {
        $crate::abi::export! { $name($($arg: $ty),*) {
            $crate::driver::driver()?;
            $body
        } }
    };
    (@one $name:ident ($($arg:ident: $ty:ty),* $(,)?) [$out:ty] $body:block) => {
        $crate::abi::export! { $name(out: *mut $out $(, $arg: $ty)*) {
            $crate::driver::driver()?;
            if out.is_null() {
                return Err(tessera_cuda::types::CUDA_ERROR_INVALID_VALUE);
            }
            let answer = || -> $crate::abi::Result<$out> { $body };
            $crate::abi::put(out, answer()?)
        } }
    };
}
pub(crate) use exports;

/// Declares one that may be called before `cuInit`.
macro_rules! export {
    ($name:ident ($($arg:ident: $ty:ty),*) $body:block) => {
        #[allow(non_snake_case, clippy::too_many_arguments,
                reason = "the driver API's own names and signatures")]
        #[unsafe(no_mangle)]
        // A section of its own keeps the compiler from giving two equal variants one address:
        // libcuda's exports have distinct ones, and a pointer tells which variant was chosen.
        #[unsafe(link_section = concat!(".text.", stringify!($name)))]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> tessera_cuda::types::CUresult {
            let _whole = simgpu::lock::Deferred::new();
            let act = || -> $crate::abi::Result<()> { $body };
            act().err().unwrap_or(tessera_cuda::types::CUDA_SUCCESS)
        }
    };
}
pub(crate) use export;

/// [`exports`] that differ only in their default stream, by pairs, `fn legacy, ptsz; …(args, s: CUstream)`: with
/// `|s| { … }` the argument is the stream behind the handle, with `|s, flavour| { … }` the handle as it is.
macro_rules! exports_both {
    ($(fn $($name:ident, $ptsz:ident);+ ($($args:tt)*) $(-> $out:ty)? |$s:ident $(, $flavour:ident)?| $body:block)*) => {
        $(
            $crate::abi::exports! {
                fn $($name),+ ($($args)*) $(-> $out)? { $crate::abi::bind!(Legacy $s $($flavour)?); $body }
                fn $($ptsz),+ ($($args)*) $(-> $out)? { $crate::abi::bind!(PerThread $s $($flavour)?); $body }
            }
        )*
    };
}
pub(crate) use exports_both;

macro_rules! bind {
    ($which:ident $s:ident) => {
        let $s = $crate::stream::stream($s, $crate::stream::Flavour::$which)?;
    };
    ($which:ident $s:ident $flavour:ident) => {
        let $flavour = $crate::stream::Flavour::$which;
    };
}
pub(crate) use bind;

/// What every object begins with.
#[repr(C)]
pub(crate) struct Header {
    magic: AtomicU32,
}

/// An object with a handle. `repr(C)`, its [`Header`] first.
pub(crate) trait Object: Sized + 'static {
    /// Distinguishes kinds of live objects.
    const MAGIC: u32;
    /// The error for something else.
    const INVALID: CUresult = CUDA_ERROR_INVALID_HANDLE;
    fn header(&self) -> &Header;
}

/// `object!(Type, MAGIC)`, and the error for something else: of a type with a field `header`.
macro_rules! object {
    ($object:ty, $magic:literal $(, $invalid:ident)?) => {
        impl $crate::abi::Object for $object {
            const MAGIC: u32 = $magic;
            $(const INVALID: tessera_cuda::types::CUresult = $invalid;)?
            fn header(&self) -> &$crate::abi::Header {
                &self.header
            }
        }
    };
}
pub(crate) use object;

impl Header {
    /// Of an object that is not alive yet.
    pub(crate) const fn new() -> Header {
        Header { magic: AtomicU32::new(0) }
    }
}

/// The handle's object, if it is alive.
#[inline]
pub(crate) fn resolve<T: Object>(handle: *mut c_void) -> Result<&'static T> {
    let address = handle as usize;
    if address < 4096 || !address.is_multiple_of(std::mem::align_of::<T>()) {
        return Err(T::INVALID);
    }
    // SAFETY: the caller of the C function promises a handle that the driver gave out: the address
    // of an object that is never unmapped. `repr(C)` puts the header first.
    let object = unsafe { &*handle.cast::<T>() };
    if object.header().magic.load(Ordering::Acquire) == T::MAGIC {
        Ok(object)
    } else {
        Err(T::INVALID)
    }
}

pub(crate) fn handle<T: Object>(object: &'static T) -> *mut c_void {
    std::ptr::from_ref(object).cast_mut().cast()
}

/// Makes an object's handle valid.
pub(crate) fn enliven<T: Object>(object: &'static T) -> &'static T {
    object.header().magic.store(T::MAGIC, Ordering::Release);
    object
}

/// Ends a handle; false if it was not alive.
pub(crate) fn kill<T: Object>(object: &'static T) -> bool {
    let magic = &object.header().magic;
    magic.compare_exchange(T::MAGIC, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Dead objects to use again.
pub(crate) struct Recycler<T: 'static>(Mutex<Vec<&'static T>>);

impl<T> Recycler<T> {
    pub(crate) const fn new() -> Self {
        Recycler(Mutex::new(Vec::new()))
    }

    /// A dead object, made if there is none.
    pub(crate) fn take(&self, make: impl FnOnce() -> T) -> &'static T {
        let recycled = crate::driver::lock(&self.0).pop();
        recycled.unwrap_or_else(|| Box::leak(Box::new(make())))
    }

    pub(crate) fn give(&self, object: &'static T) {
        crate::driver::lock(&self.0).push(object);
    }
}

/// The `CUresult`s that this driver returns, or the shim in its place: CUDA Driver API, "Error Handling".
const ERRORS: &[(CUresult, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (205, c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed"),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this architecture"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"),
    (914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"one or more resources passed in are not valid resource types for the operation"),
    (915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"one or more resources are insufficient or non-applicable for the operation"),
    (917, c"CUDA_ERROR_STREAM_DETACHED", c"operation not permitted on a stream detached from its context"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn say(
    error: CUresult,
    to: *mut *const c_char,
    which: fn(&(CUresult, &CStr, &CStr)) -> *const c_char,
) -> Result<()> {
    let found = ERRORS.iter().find(|(code, ..)| *code == error);
    put(to, found.map_or(std::ptr::null(), which))?;
    found.map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
}

export! {
    cuGetErrorName(error: CUresult, text: *mut *const c_char) { say(error, text, |known| known.1.as_ptr()) }
}

export! {
    cuGetErrorString(error: CUresult, text: *mut *const c_char) { say(error, text, |known| known.2.as_ptr()) }
}
