//! The simulated `libcuda.so.1`: NVIDIA's driver API over [`simgpu`]'s shared state.
//!
//! One module per noun of the API. Every export converts its arguments, decides in safe code, and
//! returns a `CUresult`; [`abi`] is the only place that follows a caller's pointers and
//! handles. `docs/internals/simulator.md` says what is simulated and what is not.

mod abi;
mod arena;
mod array;
mod capture;
mod context;
mod copy;
mod device;
mod driver;
mod event;
mod graph;
mod green;
mod ipc;
mod launch;
mod memory;
mod module;
mod pool;
mod proc_address;
mod ptx;
mod stream;
mod stream_memory;
mod unbuilt;
mod vmm;
mod work;

/// Every exported function, which the integration tests call.
pub mod exports {
    pub use crate::abi::*;
    pub use crate::array::*;
    pub use crate::capture::*;
    pub use crate::context::*;
    pub use crate::copy::*;
    pub use crate::device::*;
    pub use crate::driver::*;
    pub use crate::event::*;
    pub use crate::graph::add::*;
    pub use crate::graph::exec::*;
    pub use crate::graph::memory::*;
    pub use crate::graph::*;
    pub use crate::green::*;
    pub use crate::ipc::*;
    pub use crate::launch::*;
    pub use crate::memory::*;
    pub use crate::module::*;
    pub use crate::pool::*;
    pub use crate::proc_address::*;
    pub use crate::stream::*;
    pub use crate::stream_memory::*;
    pub use crate::unbuilt::*;
    pub use crate::vmm::*;
    pub use crate::work::*;
}

/// Each hooked export has the signature that the shim's table gives it; the compiler checks.
mod signatures {
    use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
    use tessera_cuda::types::*;

    macro_rules! check {
        ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
            $($(check!(@one $export $args);)+)*
        };
        (@one $export:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
            const _: unsafe extern "C" fn($($ty),*) -> CUresult = crate::exports::$export;
        };
    }
    tessera_cuda::for_each_hook!(check);
}
