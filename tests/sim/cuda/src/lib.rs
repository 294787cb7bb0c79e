//! The simulated `libcuda.so.1`: NVIDIA's driver API over [`simgpu`]'s shared state.
//!
//! One module per noun of the API. Every export converts its arguments, decides in safe code, and
//! returns a `CUresult`; [`abi`] is the only place that follows a caller's pointers, [`handle`] the
//! one that follows its handles. `docs/internals/simulator.md` says what is simulated and what is not.

mod abi;
mod arena;
mod array;
mod capture;
mod context;
mod copy;
mod device;
mod driver;
mod errors;
mod event;
mod graph;
mod green;
mod handle;
mod host_function;
mod ipc;
mod ipc_event;
mod launch;
mod link;
mod memory;
mod module;
mod pointer;
mod pool;
mod proc_address;
mod ptx;
mod semaphore;
mod shared;
mod stream;
mod stream_memory;
mod unbuilt;
mod visible;
mod vmm;
mod work;

/// Every exported function.
mod exports {
    pub(crate) use crate::array::*;
    pub(crate) use crate::capture::calls::*;
    pub(crate) use crate::context::*;
    pub(crate) use crate::copy::*;
    pub(crate) use crate::device::*;
    pub(crate) use crate::driver::*;
    pub(crate) use crate::errors::*;
    pub(crate) use crate::event::*;
    pub(crate) use crate::graph::add::*;
    pub(crate) use crate::graph::conditional::*;
    pub(crate) use crate::graph::exec::*;
    pub(crate) use crate::graph::instantiate::*;
    pub(crate) use crate::graph::memory::*;
    pub(crate) use crate::graph::params::*;
    pub(crate) use crate::graph::update::*;
    pub(crate) use crate::graph::user_object::*;
    pub(crate) use crate::graph::*;
    pub(crate) use crate::green::*;
    pub(crate) use crate::host_function::*;
    pub(crate) use crate::ipc::*;
    pub(crate) use crate::ipc_event::*;
    pub(crate) use crate::launch::*;
    pub(crate) use crate::link::*;
    pub(crate) use crate::memory::*;
    pub(crate) use crate::module::*;
    pub(crate) use crate::pointer::*;
    pub(crate) use crate::pool::*;
    pub(crate) use crate::proc_address::*;
    pub(crate) use crate::semaphore::*;
    pub(crate) use crate::stream::*;
    pub(crate) use crate::stream_memory::*;
    pub(crate) use crate::unbuilt::*;
    pub(crate) use crate::vmm::*;
}

pub(crate) use tessera_cuda::types::CUDA_ERROR_NOT_FOUND as NOT_FOUND;

/// Each hooked export has the signature that the shim's table gives it; the compiler checks.
mod signatures {
    use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
    use tessera_cuda::types::*;

    macro_rules! check {
        ($($class:ident $body:ident { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $args:tt;)*) => {
            $($(check!(@one $export $args);)+)*
        };
        (@one $export:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
            const _: unsafe extern "C" fn($($ty),*) -> CUresult = crate::exports::$export;
        };
    }
    tessera_cuda::for_each_hook!(check);
}
