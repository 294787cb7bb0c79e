//! The simulated `libnvidia-ml.so.1`: NVML over [`simgpu`]'s shared state.
//!
//! One module per noun of the API. As the real library does, some functions call others through
//! the dynamic symbol table, so that an interposed function sees those calls; see [`abi`].
//! `docs/internals/simulator.md` says what is simulated and what is not.

mod abi;
mod clocks;
mod device;
mod ecc;
mod event;
mod mig;
mod process;
mod state;
mod system;
mod topology;

/// Each hooked export has the signature that the shim's table gives it; the compiler checks.
mod signatures {
    use std::ffi::{c_uint, c_ulonglong};
    use tessera_cuda::nvml::*;

    mod exports {
        pub use crate::device::*;
        pub use crate::process::*;
    }

    macro_rules! check {
        ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
            $($(check!(@one $export $args);)+)*
        };
        (@one $export:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
            const _: unsafe extern "C" fn($($ty),*) -> nvmlReturn_t = exports::$export;
        };
    }
    tessera_cuda::for_each_nvml_hook!(check);
}
