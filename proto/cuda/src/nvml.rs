//! NVML's part: the hooked functions and the structures they fill (nvml.h 12.9).
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

pub type nvmlReturn_t = c_int;
pub const NVML_SUCCESS: nvmlReturn_t = 0;
pub const NVML_ERROR_UNINITIALIZED: nvmlReturn_t = 1;
pub const NVML_ERROR_INVALID_ARGUMENT: nvmlReturn_t = 2;
pub const NVML_ERROR_NOT_SUPPORTED: nvmlReturn_t = 3;
pub const NVML_ERROR_NO_PERMISSION: nvmlReturn_t = 4;
pub const NVML_ERROR_NOT_FOUND: nvmlReturn_t = 6;
pub const NVML_ERROR_INSUFFICIENT_SIZE: nvmlReturn_t = 7;
pub const NVML_ERROR_TIMEOUT: nvmlReturn_t = 10;
pub const NVML_ERROR_GPU_IS_LOST: nvmlReturn_t = 15;
pub const NVML_ERROR_UNKNOWN: nvmlReturn_t = 999;

pub type nvmlDevice_t = *mut c_void;

/// `nvmlMemory_t`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct nvmlMemory_t {
    pub total: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// `nvmlMemory_v2_t`, bytes; `version` is `size | 2 << 24`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct nvmlMemory_v2_t {
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// Expands `$expand! { rows… }` with the NVML table: `class body { export } (arguments);`.
#[macro_export]
macro_rules! for_each_nvml_hook {
    ($expand:path) => {
        $expand! {
            query nvmlDeviceGetMemoryInfo { nvmlDeviceGetMemoryInfo }
                (device: nvmlDevice_t, memory: *mut nvmlMemory_t);
            query nvmlDeviceGetMemoryInfo_v2 { nvmlDeviceGetMemoryInfo_v2 }
                (device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t);
        }
    };
}

macro_rules! names {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $args:tt;)*) => {
        /// Every hooked NVML export, in table order.
        pub const NVML_HOOKS: &[&str] = &[$($(stringify!($export),)+)*];
    };
}
for_each_nvml_hook!(names);
