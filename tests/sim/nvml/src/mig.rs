//! MIG: NVML API Reference, "Multi Instance GPU Management". Instances are what the configuration says
//! and can't be changed.

use crate::abi::{Result, exports, put};
use crate::state::{
    Device, any_even_lost, device, device_or_instance, handle_of, instance_handle, works,
};
use simgpu::Config;
use simgpu::config::MAX_INSTANCES;
use std::ffi::{c_uint, c_ulonglong};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED, nvmlDevice_t,
};

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Attributes {
    multiprocessors: c_uint,
    copy_engines: c_uint,
    decoders: c_uint,
    encoders: c_uint,
    jpegs: c_uint,
    ofas: c_uint,
    gpu_instance_slices: c_uint,
    compute_instance_slices: c_uint,
    memory_mb: c_ulonglong,
}
const _: () = assert!(size_of::<Attributes>() == 40);

/// A GPU that is not in MIG mode, for what does not work on "MIG-enabled GPUs".
pub(crate) fn without_mig(handle: nvmlDevice_t) -> Result<Device> {
    let device = device(handle)?;
    if device.config.mig.is_some() { Err(NVML_ERROR_NOT_SUPPORTED) } else { Ok(device) }
}

/// The unit of the instance with this UUID.
pub(crate) fn by_uuid(config: &Config, text: &str) -> Option<usize> {
    (0..config.units.len()).find(|&unit| {
        let gpu = &config.gpus[config.units[unit].gpu];
        config.instance(unit).is_some_and(|m| m.uuid_text(gpu, &config.driver_version) == text)
    })
}

fn id(
    handle: nvmlDevice_t,
    out: *mut c_uint,
    id: fn(&simgpu::config::MigConfig) -> u32,
) -> Result<()> {
    put(out, id(any_even_lost(handle)?.instance.ok_or(NVML_ERROR_NOT_SUPPORTED)?))
}

fn attributes(handle: nvmlDevice_t, out: *mut Attributes) -> Result<()> {
    // "This API currently only supports MIG device handles."
    let mig = device_or_instance(handle)?.instance.ok_or(NVML_ERROR_NOT_SUPPORTED)?;
    put(
        out,
        Attributes {
            multiprocessors: mig.sm_count,
            copy_engines: mig.gpu_slices,
            decoders: mig.gpu_slices / 2,
            encoders: 0,
            jpegs: 0,
            ofas: 0,
            gpu_instance_slices: mig.gpu_slices,
            compute_instance_slices: mig.compute_slices,
            memory_mb: mig.memory_bytes >> 20,
        },
    )
}

exports! {
    fn nvmlDeviceGetMigMode(handle: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) {
        let on = c_uint::from(device(handle)?.config.mig.is_some());
        put(current, on)?;
        put(pending, on)
    }
    fn nvmlDeviceGetMaxMigDeviceCount(handle: nvmlDevice_t, out: *mut c_uint) {
        // "Returns zero if MIG is not supported or enabled."
        let on = device(handle)?.config.mig.is_some();
        put(out, if on { c_uint::try_from(MAX_INSTANCES).unwrap_or(0) } else { 0 })
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(handle: nvmlDevice_t, index: c_uint, out: *mut nvmlDevice_t) {
        let d = device(handle)?;
        let mig = d.config.mig.as_ref().ok_or(NVML_ERROR_NOT_FOUND)?;
        if index as usize >= MAX_INSTANCES {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        if index as usize >= mig.len() {
            return Err(NVML_ERROR_NOT_FOUND);
        }
        works(d.session, d.index, Some(index))?;
        put(out, instance_handle(d.units.start + index as usize))
    }
    fn nvmlDeviceIsMigDeviceHandle(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, c_uint::from(any_even_lost(handle)?.instance.is_some()))
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: nvmlDevice_t, out: *mut nvmlDevice_t) {
        let d = any_even_lost(handle)?;
        d.instance.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
        put(out, handle_of(d.index))
    }
    fn nvmlDeviceGetGpuInstanceId(handle: nvmlDevice_t, out: *mut c_uint) {
        id(handle, out, |mig| mig.gpu_instance)
    }
    fn nvmlDeviceGetComputeInstanceId(handle: nvmlDevice_t, out: *mut c_uint) {
        id(handle, out, |mig| mig.compute_instance)
    }
    fn nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2(handle: nvmlDevice_t, out: *mut Attributes) { attributes(handle, out) }
}
