//! Calls to our own exports through the dynamic symbol table.
//!
//! NVIDIA's library calls some of its exports this way, so a library that interposes them (a preloaded
//! shim) sees calls that no application made. Rust would link such a call directly; these jumps
//! leave the choice to the dynamic linker. For x86-64 only.

use std::ffi::c_uint;
use tessera_cuda::nvml::{nvmlDevice_t, nvmlMemory_v2_t, nvmlReturn_t};

macro_rules! jumps {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) => $symbol:literal;)*) => {
        $(
            $(#[$meta])*
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> nvmlReturn_t {
                core::arch::naked_asm!(concat!("jmp ", $symbol, "@PLT"))
            }
        )*
    };
}

jumps! {
    /// `nvmlInitWithFlags`, as `nvmlInit_v2` calls it.
    fn init_with_flags(flags: c_uint) => "nvmlInitWithFlags";
    /// `nvmlDeviceGetMemoryInfo_v2`, as `nvmlDeviceGetMemoryInfo` calls it.
    fn memory_info_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) => "nvmlDeviceGetMemoryInfo_v2";
}
