//! Finds the driver's libraries and binds every [`Symbol`](crate::real::Symbol) of theirs.
//!
//! There is no NEEDED entry for a driver library: the shim sits in processes that never use a GPU.
//! A library is looked for when a lookup asks for one of its hooked names, and loaded when a hook is
//! called before anything loaded it. Once found it is pinned, because real pointers point into it.

use crate::libdl;
use crate::real::{self, Library};
use crate::resolve::real_dlsym;
use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

/// How far to go for a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
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
pub fn bind(library: Library, wanted: Wanted) -> bool {
    let (bound, soname) = match library {
        Library::Cuda => (&CUDA_BOUND, c"libcuda.so.1"),
        Library::Nvml => (&NVML_BOUND, c"libnvidia-ml.so.1"),
    };
    if bound.load(Ordering::Acquire) {
        return true;
    }
    let Some(dlsym) = real_dlsym() else { return false };
    let handle = open(soname, wanted);
    if handle.is_null() {
        return false;
    }
    for symbol in real::symbols(library) {
        // SAFETY: a live handle and a NUL-terminated name; the real dlsym has no other demands.
        symbol.set(unsafe { dlsym(handle, symbol.name().as_ptr()) });
    }
    bound.store(true, Ordering::Release);
    true
}

/// A handle on the library, pinned for the life of the process; null where there is none.
fn open(soname: &'static CStr, wanted: Wanted) -> *mut c_void {
    let dlopen = |flags: c_int| {
        // SAFETY: a NUL-terminated name; the driver's constructors are what the host asked for.
        unsafe { libdl::dlopen(soname.as_ptr(), libc::RTLD_LAZY | flags) }
    };
    let handle = dlopen(libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
    if !handle.is_null() || wanted == Wanted::IfLoaded {
        return handle;
    }
    dlopen(libc::RTLD_NODELETE)
}
