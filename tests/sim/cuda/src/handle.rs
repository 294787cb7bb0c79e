//! Objects behind opaque handles.
//!
//! A handle is the address of an object that is never unmapped, only recycled, so that checking a
//! stale handle's magic reads valid memory. An address that never was an object is the caller's
//! error, as with the real driver, but null and misaligned ones are refused.

use crate::errors::Result;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::{CUDA_ERROR_INVALID_HANDLE, CUresult};

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
        impl $crate::handle::Object for $object {
            const MAGIC: u32 = $magic;
            $(const INVALID: tessera_cuda::types::CUresult = $invalid;)?
            fn header(&self) -> &$crate::handle::Header {
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
pub(crate) fn resolve<T: Object>(handle: *mut std::ffi::c_void) -> Result<&'static T> {
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

pub(crate) fn handle<T: Object>(object: &'static T) -> *mut std::ffi::c_void {
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
