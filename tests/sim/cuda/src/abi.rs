//! The boundary to C: exports, and the pointers that callers hand in.
//!
//! A CUDA function's caller promises that the pointers it passes are null or valid for what the
//! manual says is read or written. `put`, `get` and `cstr` are where that promise is relied on;
//! null is refused with `CUDA_ERROR_INVALID_VALUE`.

use crate::errors::Result;
use std::ffi::{CStr, c_char};
use tessera_cuda::types::CUDA_ERROR_INVALID_VALUE;

pub(crate) fn put<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the C function promises that it is writable; it may be
    // unaligned in packed structures.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// As [`put`], where the manual allows null.
pub(crate) fn put_if<T>(to: *mut T, value: T) {
    if !to.is_null() {
        let _ = put(to, value);
    }
}

pub(crate) fn get<T: Copy>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the C function promises that it is readable.
    Ok(unsafe { from.read_unaligned() })
}

pub(crate) fn cstr<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the C function promises a terminated string that lives
    // for the call.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)
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

/// Declares exported driver functions: `fn name(args) { body: Result<()> }`, or `fn name, its_other_name(args) …`.
macro_rules! exports {
    ($(fn $($name:ident),+($($args:tt)*) $body:block)*) => {
        $($crate::abi::exports! { @each [$($name)+] ($($args)*) $body })*
    };
    (@each [$($name:ident)+] $args:tt $body:block) => {
        $($crate::abi::exports! { @one $name $args $body })+
    };
    (@one $name:ident ($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        #[allow(non_snake_case, clippy::too_many_arguments,
                reason = "the driver API's own names and signatures")]
        #[unsafe(no_mangle)]
        // A section of its own keeps the compiler from giving two equal variants one address:
        // libcuda's exports have distinct ones, and a pointer tells which variant was chosen.
        #[unsafe(link_section = concat!(".text.", stringify!($name)))]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> tessera_cuda::types::CUresult {
            let _whole = simgpu::lock::Deferred::new();
            let act = || -> $crate::errors::Result<()> { $body };
            act().err().unwrap_or(tessera_cuda::types::CUDA_SUCCESS)
        }
    };
}
pub(crate) use exports;

/// Exports that differ only in their default stream, by pairs: `fn legacy, ptsz; …(args) |flavour| { … }`.
macro_rules! exports_both {
    ($(fn $($name:ident, $ptsz:ident);+($($args:tt)*) |$flavour:ident| $body:block)*) => {
        $(
            $crate::abi::exports! {
                fn $($name),+($($args)*) {
                    let $flavour = $crate::stream::Flavour::Legacy;
                    $body
                }
                fn $($ptsz),+($($args)*) {
                    let $flavour = $crate::stream::Flavour::PerThread;
                    $body
                }
            }
        )*
    };
}
pub(crate) use exports_both;
