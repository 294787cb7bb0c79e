//! The boundary to C: exports, and the pointers that callers hand in.

use std::ffi::{c_char, c_uint};
use tessera_cuda::nvml::{
    NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_INVALID_ARGUMENT, nvmlDevice_t, nvmlMemory_v2_t,
    nvmlReturn_t,
};

pub(crate) type Result<T> = std::result::Result<T, nvmlReturn_t>;

simgpu::pointers!(NVML_ERROR_INVALID_ARGUMENT);

/// Writes `text` with its terminator, or says that there is not room enough.
pub(crate) fn put_text(to: *mut c_char, len: c_uint, text: &str) -> Result<()> {
    if to.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    if text.len() >= len as usize {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller promises `len` writable bytes, and the text is shorter.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), to, text.len());
        *to.add(text.len()) = 0;
    }
    Ok(())
}

/// A fixed-size C string.
pub(crate) fn text_field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0u8; N];
    for (to, from) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from;
    }
    field
}

/// Declares exported NVML functions: `fn name(args) { body: Result<()> }`, or `fn name, its_other_name(args) …`.
macro_rules! exports {
    ($(fn $($name:ident),+($($args:tt)*) $body:block)*) => {
        $($crate::abi::exports! { @each [$($name)+] ($($args)*) $body })*
    };
    (@each [$($name:ident)+] $args:tt $body:block) => {
        $($crate::abi::exports! { @one $name $args $body })+
    };
    (@one $name:ident ($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        #[allow(non_snake_case, reason = "NVML's own names and signatures")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> tessera_cuda::nvml::nvmlReturn_t {
            let _whole = simgpu::lock::Deferred::new();
            let _call = $crate::state::Call::begin(stringify!($name));
            let act = || -> $crate::abi::Result<()> { $body };
            act().err().unwrap_or(tessera_cuda::nvml::NVML_SUCCESS)
        }
    };
}
pub(crate) use exports;

/// Calls to our own exports through the dynamic symbol table: NVIDIA's library calls some of its exports
/// this way, so a library that interposes them (a preloaded shim) sees calls that no application made.
/// Rust would link such a call directly; these jumps leave the choice to the dynamic linker. For x86-64
/// only.
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
