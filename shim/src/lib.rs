//! `libtessera.so`: the table of hooked functions, expanded into exports. Nothing else is here;
//! what a hook does is in `tessera-shim-core`.
//!
//! Exported are the table's names and `dlsym`, no more (`tests/suites/shipped/shim.rs`). `dlvsym` is not
//! hooked: driver symbols carry no versions, and it is how the shim, like every other preloaded
//! library, finds the real `dlsym`.
#![allow(non_snake_case, missing_docs, reason = "exports carry the driver's own names")]
#![cfg_attr(not(feature = "std"), no_std)]
#![allow(clippy::too_many_arguments, reason = "the driver's signatures")]

use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use tessera_cuda::nvml::*;
use tessera_cuda::types::*;
use tessera_shim_core::gate::Stream;
use tessera_shim_core::{exports, hooks, launch, real, resolve::Export, work};

#[cfg(not(feature = "std"))]
mod alone;
mod dlsym;

/// The stream of a launch, from its arguments.
macro_rules! stream_of {
    (legacy $body:ident $args:tt) => { stream_of!(@ false $body $args) };
    (ptsz $body:ident $args:tt) => { stream_of!(@ true $body $args) };
    (@ $ptsz:literal cuLaunchKernelEx ($config:ident $($rest:ident)*)) => {
        // SAFETY: the caller's own configuration, which the driver reads as well.
        unsafe { Stream::of_config($config, $ptsz) }
    };
    (@ $ptsz:literal cuGraphLaunch ($exec:ident $stream:ident)) => { Stream::new($stream, $ptsz) };
    (@ $ptsz:literal cuLaunch ($f:ident)) => { Stream::LEGACY };
    (@ $ptsz:literal cuLaunchGrid ($f:ident $x:ident $y:ident)) => { Stream::LEGACY };
    (@ $ptsz:literal cuLaunchGridAsync ($f:ident $x:ident $y:ident $stream:ident)) => {
        Stream::new($stream, $ptsz)
    };
    (@ $ptsz:literal $kernel:ident
        ($f:ident $gx:ident $gy:ident $gz:ident $bx:ident $by:ident $bz:ident $shared:ident
         $stream:ident $($rest:ident)*)) => { Stream::new($stream, $ptsz) };
}

/// What a launch launches, from its arguments.
macro_rules! kernel_of {
    (cuLaunchKernelEx $config:ident $f:ident $($rest:ident)*) => {
        $f
    };
    ($body:ident $f:ident $($rest:ident)*) => {
        $f
    };
}

/// The configuration of a launch that has one.
macro_rules! config_of {
    (cuLaunchKernelEx $config:ident $($rest:ident)*) => {
        $config
    };
    ($body:ident $($rest:ident)*) => {
        core::ptr::null()
    };
}

/// One exported function: the row's class decides what it is handed to.
macro_rules! export {
    (launch cuLaunchCooperativeKernelMultiDevice $export:ident $flavour:ident
        ($launches:ident : $ty:ty, $devices:ident : $devices_ty:ty, $flags:ident : $flags_ty:ty)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export(
            $launches: $ty, $devices: $devices_ty, $flags: $flags_ty,
        ) -> CUresult {
            // SAFETY: the caller's own arguments.
            let launches = unsafe { Stream::of_launches($launches, $devices) };
            // SAFETY: the same, for a function of this very signature.
            launch::on_several(&real::$export, launches, |real| unsafe {
                real($launches, $devices, $flags)
            })
        }
    };
    (launch cuGraphLaunch $export:ident $flavour:ident ($exec:ident : $exec_ty:ty, $stream:ident : $stream_ty:ty)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($exec: $exec_ty, $stream: $stream_ty) -> CUresult {
            /// As below; also where some graph of the process allocates memory.
            #[cold]
            #[inline(never)]
            unsafe extern "C" fn otherwise($exec: $exec_ty, $stream: $stream_ty) -> CUresult {
                // SAFETY: the caller's own arguments, for a function of this very signature.
                let call = |real: unsafe extern "C" fn($exec_ty, $stream_ty) -> CUresult| unsafe {
                    real($exec, $stream)
                };
                hooks::launch(&real::$export, $exec, $stream, call)
            }
            let stream = stream_of!($flavour cuGraphLaunch ($exec $stream));
            match launch::graph_at_once(&real::$export, stream) {
                // SAFETY: as above.
                Some((real, _busy)) => unsafe { real($exec, $stream) },
                // SAFETY: as above.
                None => unsafe { otherwise($exec, $stream) },
            }
        }
    };
    (launch $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> CUresult {
            /// A first launch, a closed gate, a frame to be charged, pass-through: apart, and called with the very same
            /// arguments, so that the hot path leaves them where they are.
            #[cold]
            #[inline(never)]
            unsafe extern "C" fn otherwise($($arg: $ty),*) -> CUresult {
                // SAFETY: the caller's own arguments, for a function of this very signature.
                let call = |real: unsafe extern "C" fn($($ty),*) -> CUresult| unsafe { real($($arg),*) };
                let stream = stream_of!($flavour $body ($($arg)*));
                let config = config_of!($body $($arg)*);
                // SAFETY: the caller's own configuration.
                let is_chained = unsafe { launch::is_chained(config) };
                launch::otherwise(&real::$export, kernel_of!($body $($arg)*), stream, is_chained, call)
            }
            match launch::at_once(&real::$export, stream_of!($flavour $body ($($arg)*))) {
                // SAFETY: as above.
                Some((real, _busy)) => unsafe { real($($arg),*) },
                // SAFETY: as above.
                None => unsafe { otherwise($($arg),*) },
            }
        }
    };
    (work $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> CUresult {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                "lea r11, [rip + {real}]",
                "jmp {trampoline}",
                real = sym real::$export,
                trampoline = sym work::trampoline,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "adrp x16, {real}",
                "add x16, x16, :lo12:{real}",
                "b {trampoline}",
                real = sym real::$export,
                trampoline = sym work::trampoline,
            );
        }
    };
    (lookup $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> CUresult {
            // SAFETY: the caller's own arguments, for a function of this very signature.
            unsafe { hooks::$body(cuda_exports(), &real::$export, $($arg),*) }
        }
    };
    ($class:ident $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> c_int {
            // SAFETY: the caller's own arguments, for a function of this very signature.
            unsafe { hooks::$body(&real::$export, $($arg),*) }
        }
    };
}

macro_rules! cuda {
    ($($class:ident $body:ident { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        $($(export!($class $body $export $flavour $args);)+)*
        exports!("tessera_cuda_exports" $($(real::$export => $export),+),*);
        const CUDA: usize = [$($(stringify!($export)),+),*].len();
    };
}
tessera_cuda::for_each_hook!(cuda);

macro_rules! nvml {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
        $($(export!($class $body $export legacy $args);)+)*
        exports!("tessera_nvml_exports" $($(real::$export => $export),+),*);
        const NVML: usize = [$($(stringify!($export)),+),*].len();
    };
}
tessera_cuda::for_each_nvml_hook!(nvml);

unsafe extern "C" {
    #[link_name = "tessera_cuda_exports"]
    static CUDA_EXPORTS: [Export; CUDA];
    #[link_name = "tessera_nvml_exports"]
    static NVML_EXPORTS: [Export; NVML];
}

/// Every hook of libcuda's, for lookups.
fn cuda_exports() -> &'static [Export] {
    // SAFETY: the table above, of as many.
    unsafe { &CUDA_EXPORTS }
}

/// Every hook of libnvidia-ml's.
fn nvml_exports() -> &'static [Export] {
    // SAFETY: the table above, of as many.
    unsafe { &NVML_EXPORTS }
}
