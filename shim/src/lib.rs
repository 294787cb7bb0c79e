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

/// Whether NULL is the thread's own default stream.
macro_rules! is_per_thread {
    (legacy) => {
        false
    };
    ($flavour:ident) => {
        true
    };
}

/// An argument as hooks take it.
macro_rules! given {
    ($flavour:ident $arg:ident stream) => {
        Stream::new($arg, is_per_thread!($flavour))
    };
    ($flavour:ident $arg:ident $name:ident) => {
        $arg
    };
}

/// The stream among the arguments, each of which is there twice; without one the legacy one.
macro_rules! stream_in {
    ($flavour:ident) => { Stream::LEGACY };
    ($flavour:ident $arg:ident stream $($rest:ident)*) => { given!($flavour $arg stream) };
    ($flavour:ident $arg:ident $name:ident $($rest:ident)*) => { stream_in!($flavour $($rest)*) };
}

/// The stream of a launch, from its arguments.
macro_rules! stream_of {
    ($flavour:ident cuLaunchKernelEx ($config:ident $($rest:ident)*)) => {
        // SAFETY: the caller's own configuration, which the driver reads as well.
        unsafe { Stream::of_config($config, is_per_thread!($flavour)) }
    };
    ($flavour:ident $body:ident ($($arg:ident)*)) => { stream_in!($flavour $($arg $arg)*) };
}

/// What a launch launches, and its configuration if it has one, from its arguments.
macro_rules! launched {
    (cuLaunchKernelEx $config:ident $f:ident $($rest:ident)*) => {
        ($f, $config)
    };
    ($body:ident $f:ident $($rest:ident)*) => {
        ($f, core::ptr::null())
    };
}

/// One exported function: the row's class decides what it is handed to.
macro_rules! export {
    (launch cuLaunchCooperativeKernelMultiDevice $export:ident $flavour:ident
        ($launches:ident : $ty:ty, $devices:ident : $devices_ty:ty, $flags:ident : $flags_ty:ty)) => {
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
                hooks::launch(&real::$export, $exec, stream_of!($flavour cuGraphLaunch ($exec $stream)), call)
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
                let (kernel, config) = launched!($body $($arg)*);
                // SAFETY: the caller's own configuration.
                let is_chained = unsafe { launch::is_chained(config) };
                launch::otherwise(&real::$export, kernel, stream, is_chained, call)
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
        const _: () = assert!(
            [$(stringify!($arg)),*].len() <= work::ARGUMENTS,
            "arguments on the stack: not for the trampoline"
        );
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
    (lookup $body:ident $export:ident $flavour:ident
        ($symbol:ident : $symbol_ty:ty, $pfn:ident : $pfn_ty:ty $(, $arg:ident : $ty:ty)* $(,)?)) => {
        export!(@hook $export ($symbol: $symbol_ty, $pfn: $pfn_ty $(, $arg: $ty)*) call {
            // SAFETY: the driver's function writes to `pfn`.
            unsafe { hooks::lookup(cuda_exports(), &call, $pfn) }
        });
    };
    (stream $body:ident $export:ident $flavour:ident $args:tt) => {
        export!(capture $body $export $flavour $args);
    };
    (capture $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        export!(@hook $export ($($arg: $ty),*) call {
            hooks::$body(&call, stream_in!($flavour $($arg $arg)*))
        });
    };
    (batch $body:ident $export:ident $flavour:ident
        ($dsts:ident : $dst:ty, $srcs:ident : $src:ty, $sizes:ident : $size:ty, $count:ident : $n:ty
         $(, $arg:ident : $ty:ty)* $(,)?)) => {
        export!(@hook $export ($dsts: $dst, $srcs: $src, $sizes: $size, $count: $n $(, $arg: $ty)*) call {
            let stream = stream_in!($flavour $($arg $arg)*);
            // SAFETY: the caller's own arguments.
            unsafe { hooks::batch(&call, $dsts, $srcs, $sizes, $count, stream) }
        });
    };
    (graph cuGraphInstantiateWithParams $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        export!(@hook $export ($($arg: $ty),*) call {
            // SAFETY: the caller's own arguments.
            unsafe { hooks::cuGraphInstantiateWithParams(&call, is_per_thread!($flavour), $($arg),*) }
        });
    };
    (query $body:ident $export:ident $flavour:ident $args:tt) => {
        export!(@query $body $export { CUDA_ERROR_NOT_FOUND } $args);
    };
    (nvml $body:ident $export:ident $flavour:ident $args:tt) => {
        export!(@query $body $export { hooks::missing() } $args);
    };
    (@query $body:ident $export:ident $missing:block ($($arg:ident : $ty:ty),* $(,)?)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> c_int {
            let Some(real) = real::$export.get() else { return $missing };
            // SAFETY: the caller's own arguments, or places of as many bytes, for a function of this very signature.
            let call = move |$($arg: $ty),*| hooks::answer(unsafe { real($($arg),*) });
            // SAFETY: the caller's own arguments.
            hooks::result(unsafe { hooks::$body(&call, $($arg),*) })
        }
    };
    (@hook $export:ident ($($arg:ident : $ty:ty),*) $call:ident $hook:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> CUresult {
            let Some(real) = real::$export.get() else { return CUDA_ERROR_NOT_FOUND };
            // SAFETY: the caller's own arguments, for a function of this very signature.
            let $call = || hooks::answer(unsafe { real($($arg),*) });
            hooks::result($hook)
        }
    };
    ($class:ident $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        export!(@taking ($($arg),*) $body $export $flavour ($($arg: $ty),*));
    };
    (@taking ($($taken:ident),*) $body:ident $export:ident $flavour:ident ($($arg:ident : $ty:ty),* $(,)?)) => {
        export!(@hook $export ($($arg: $ty),*) call {
            // SAFETY: the caller's own arguments.
            unsafe { hooks::$body(&call $(, given!($flavour $taken $taken))*) }
        });
    };
    (@row $class:ident $body:ident [] { $($export:ident $flavour:ident),+ } $args:tt) => {
        $(export!($class $body $export $flavour $args);)+
    };
    (@row $class:ident $body:ident [$taken:tt] { $($export:ident $flavour:ident),+ } $args:tt) => {
        $(export!(@taking $taken $body $export $flavour $args);)+
    };
}

macro_rules! cuda {
    ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
        $(export!(@row $class $body [$(($($taken),*))?] { $($export $flavour),+ } $args);)*
        exports!("tessera_cuda_exports" $($(real::$export => $export),+),*);
        const CUDA: usize = [$($(stringify!($export)),+),*].len();
    };
}
tessera_cuda::for_each_hook!(cuda);

macro_rules! nvml {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
        $($(export!(nvml $body $export legacy $args);)+)*
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
