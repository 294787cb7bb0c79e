//! What NVML reports about MIG instances and `nvml-wrapper` does not pass on: their ids, and which of them an
//! event is about. The plugin itself forbids unsafe code.
#![warn(missing_docs)]

use std::mem;

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, EventSet, Nvml};

/// "gpuInstanceId is set to 0xFFFFFFFF otherwise" (`nvmlEventData_t`).
const NO_INSTANCE: u32 = u32::MAX;
/// `nvmlEventTypeXidCriticalError`.
const XID: u64 = 8;

/// The ids of a MIG device: of its GPU instance, unique on the GPU, and of its compute instance,
/// unique in the GPU instance (NVML, "Multi Instance GPU Management").
///
/// # Errors
/// NVML's, such as `NotSupported` for a whole GPU; a library without the functions.
pub fn instance_ids(nvml: &Nvml, device: &Device<'_>) -> Result<(u32, u32), NvmlError> {
    let gpu_instance = symbol(nvml.lib().nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute_instance = symbol(nvml.lib().nvmlDeviceGetComputeInstanceId.as_ref())?;
    let (mut gi, mut ci) = (0, 0);
    // SAFETY: the handle is used while `device` lives, and the places are valid for the answers.
    unsafe {
        nvml_try(gpu_instance(device.handle(), &raw mut gi))?;
        nvml_try(compute_instance(device.handle(), &raw mut ci))?;
    }
    Ok((gi, ci))
}

/// What distinguishes a device from others for as long as the library is initialised, also when the GPU is lost and
/// answers nothing: its handle.
#[must_use]
pub fn identity(device: &Device<'_>) -> usize {
    // SAFETY: the handle is compared, not used.
    unsafe { device.handle() }.addr()
}

/// A critical error on a GPU.
#[derive(Debug)]
pub struct XidEvent<'nvml> {
    /// The GPU; never an instance ("does not currently support per-instance event reporting").
    pub device: Device<'nvml>,
    /// NVIDIA's number.
    pub xid: u64,
    /// "If MIG is enabled and the event is attributable to a GPU instance", its id.
    pub gpu_instance: Option<u32>,
    /// The same for a compute instance.
    pub compute_instance: Option<u32>,
}

/// Waits for an event of `set` for up to `timeout_ms` milliseconds. Other kinds than XIDs are `None`.
///
/// # Errors
/// `Timeout`, and what else NVML says.
pub fn wait<'nvml>(
    nvml: &'nvml Nvml,
    set: &EventSet<'nvml>,
    timeout_ms: u32,
) -> Result<Option<XidEvent<'nvml>>, NvmlError> {
    let wait = symbol(nvml.lib().nvmlEventSetWait_v2.as_ref())?;
    // SAFETY: all-zero bytes are a valid `nvmlEventData_t` (a null handle and integers); the set's handle
    // is used while the set lives, and NVML fills the structure when it succeeds.
    let data = unsafe {
        let mut data = mem::zeroed();
        nvml_try(wait(set.handle(), &raw mut data, timeout_ms))?;
        data
    };
    if data.eventType & XID == 0 {
        return Ok(None);
    }
    let known = |id: u32| Some(id).filter(|id| *id != NO_INSTANCE);
    Ok(Some(XidEvent {
        // SAFETY: a handle that this library has just given.
        device: unsafe { Device::new(data.device, nvml) },
        xid: data.eventData,
        gpu_instance: known(data.gpuInstanceId),
        compute_instance: known(data.computeInstanceId),
    }))
}

fn symbol<F: Copy, E>(found: Result<&F, E>) -> Result<F, NvmlError> {
    // The library is older than the function.
    found.copied().map_err(|_| NvmlError::NotSupported)
}
