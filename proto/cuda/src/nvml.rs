//! NVML's part: the hooked functions and the structures they fill (nvml.h 12.9).
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

pub type nvmlReturn_t = c_int;
pub const NVML_SUCCESS: nvmlReturn_t = 0;
pub const NVML_ERROR_UNINITIALIZED: nvmlReturn_t = 1;
pub const NVML_ERROR_INVALID_ARGUMENT: nvmlReturn_t = 2;
pub const NVML_ERROR_NOT_SUPPORTED: nvmlReturn_t = 3;
pub const NVML_ERROR_NOT_FOUND: nvmlReturn_t = 6;
pub const NVML_ERROR_INSUFFICIENT_SIZE: nvmlReturn_t = 7;
pub const NVML_ERROR_ARGUMENT_VERSION_MISMATCH: nvmlReturn_t = 25;
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

/// An id that is no GPU or compute instance's: not a MIG device.
pub const NVML_NO_INSTANCE: c_uint = c_uint::MAX;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct nvmlProcessInfo_v1_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t`, which is `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct nvmlProcessInfo_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct nvmlProcessDetail_v1_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
    pub usedGpuCcProtectedMemory: c_ulonglong,
}

/// `nvmlProcessMode_t`: with a compute context, a graphics context, under MPS, all of them.
pub const NVML_PROCESS_MODE_COMPUTE: c_uint = 0;
pub const NVML_PROCESS_MODE_GRAPHICS: c_uint = 1;
pub const NVML_PROCESS_MODE_MPS: c_uint = 2;
pub const NVML_PROCESS_MODE_ALL: c_uint = 3;

/// `nvmlProcessDetailList_v1_t`; `version` is `size | 1 << 24`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlProcessDetailList_v1_t {
    pub version: c_uint,
    pub mode: c_uint,
    pub numProcArrayEntries: c_uint,
    pub procArray: *mut nvmlProcessDetail_v1_t,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct nvmlProcessUtilizationSample_t {
    pub pid: c_uint,
    pub timeStamp: c_ulonglong,
    pub smUtil: c_uint,
    pub memUtil: c_uint,
    pub encUtil: c_uint,
    pub decUtil: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlProcessesUtilizationInfo_v1_t {
    pub version: c_uint,
    pub processSamplesCount: c_uint,
    pub lastSeenTimeStamp: c_ulonglong,
    /// `nvmlProcessUtilizationInfo_v1_t *`, opaque here.
    pub procUtilArray: *mut c_void,
}

const _: () = {
    use core::mem::size_of;
    assert!(size_of::<nvmlProcessInfo_v1_t>() == 16 && size_of::<nvmlProcessInfo_t>() == 24);
    assert!(size_of::<nvmlProcessDetail_v1_t>() == 32);
    assert!(size_of::<nvmlProcessDetailList_v1_t>() == 24);
    assert!(size_of::<nvmlProcessUtilizationSample_t>() == 32);
    assert!(size_of::<nvmlProcessesUtilizationInfo_v1_t>() == 24);
};

/// Expands `$expand! { rows… }` with the NVML table: `class body { export } (arguments);`.
#[macro_export]
macro_rules! for_each_nvml_hook {
    ($expand:path) => {
        $expand! {
            query nvmlDeviceGetMemoryInfo { nvmlDeviceGetMemoryInfo }
                (device: nvmlDevice_t, memory: *mut nvmlMemory_t);
            query nvmlDeviceGetMemoryInfo_v2 { nvmlDeviceGetMemoryInfo_v2 }
                (device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t);
            query nvmlComputeProcesses { nvmlDeviceGetComputeRunningProcesses }
                (device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t);
            query nvmlComputeProcesses { nvmlDeviceGetComputeRunningProcesses_v2,
                nvmlDeviceGetComputeRunningProcesses_v3 }
                (device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t);
            query nvmlOtherProcesses { nvmlDeviceGetGraphicsRunningProcesses,
                nvmlDeviceGetMPSComputeRunningProcesses }
                (device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t);
            query nvmlOtherProcesses { nvmlDeviceGetGraphicsRunningProcesses_v2,
                nvmlDeviceGetGraphicsRunningProcesses_v3,
                nvmlDeviceGetMPSComputeRunningProcesses_v2,
                nvmlDeviceGetMPSComputeRunningProcesses_v3 }
                (device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t);
            query nvmlDeviceGetRunningProcessDetailList { nvmlDeviceGetRunningProcessDetailList }
                (device: nvmlDevice_t, list: *mut nvmlProcessDetailList_v1_t);
            query nvmlDeviceGetProcessUtilization { nvmlDeviceGetProcessUtilization }
                (device: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t,
                 count: *mut c_uint, since_us: c_ulonglong);
            query nvmlDeviceGetProcessesUtilizationInfo { nvmlDeviceGetProcessesUtilizationInfo }
                (device: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_v1_t);
            query nvmlOtherProcesses { nvmlDeviceGetAccountingPids }
                (device: nvmlDevice_t, count: *mut c_uint, pids: *mut c_uint);
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
