//! The simulated `libnvidia-ml.so.1`: NVML over [`simgpu`]'s shared state.
//!
//! One module per noun of the API. As the real library does, some functions call others through
//! the dynamic symbol table, so that an interposed function sees those calls; see [`abi`].
//! `docs/internals/simulator.md` says what is simulated and what is not.

mod abi;
mod condition;
mod device;
mod process;
mod state;

/// Every exported function, which the integration tests call.
pub mod exports {
    pub use crate::condition::*;
    pub use crate::device::*;
    pub use crate::process::*;
    pub use crate::state::*;
}

/// Each hooked export has the signature that the shim's table gives it; the compiler checks.
mod signatures {
    use std::ffi::{c_uint, c_ulonglong};
    use tessera_cuda::nvml::*;

    macro_rules! check {
        ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
            $($(check!(@one $export $args);)+)*
        };
        (@one $export:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
            const _: unsafe extern "C" fn($($ty),*) -> nvmlReturn_t = crate::exports::$export;
        };
    }
    tessera_cuda::for_each_nvml_hook!(check);
}
