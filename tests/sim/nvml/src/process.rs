//! Utilisation and processes: `nvmlDeviceGetUtilizationRates`, `…RunningProcesses`.
//!
//! Pids are in the caller's pid namespace, as the kernel translates the owner of a file lock;
//! processes that are not visible from there are left out.

use crate::abi::{Result, exports, get, put};
use crate::state::device;
use simgpu::inspect::ProcessOnGpu;
use std::ffi::{c_uint, c_ulonglong};
use tessera_cuda::nvml::{NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_NOT_FOUND, nvmlDevice_t};

/// `nvmlUtilization_t`, percent.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct ProcessV1 {
    pid: c_uint,
    used: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t`, `nvmlProcessInfo_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct ProcessV2 {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}
const _: () = assert!(size_of::<ProcessV1>() == 16 && size_of::<ProcessV2>() == 24);

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Sample {
    pid: c_uint,
    time_us: c_ulonglong,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// Not a MIG instance.
const NO_INSTANCE: c_uint = c_uint::MAX;

impl From<&ProcessOnGpu> for ProcessV1 {
    fn from(p: &ProcessOnGpu) -> Self {
        ProcessV1 { pid: c_uint::try_from(p.pid).unwrap_or(0), used: p.used_bytes }
    }
}

impl From<&ProcessOnGpu> for ProcessV2 {
    fn from(p: &ProcessOnGpu) -> Self {
        ProcessV2 {
            pid: c_uint::try_from(p.pid).unwrap_or(0),
            used: p.used_bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        }
    }
}

/// Fills the caller's array; "`NVML_ERROR_INSUFFICIENT_SIZE` if infoCount indicates that the infos
/// array is too small; infoCount will contain minimal amount of space necessary".
fn list<T: for<'a> From<&'a ProcessOnGpu>>(
    processes: &[ProcessOnGpu],
    count: *mut c_uint,
    out: *mut T,
) -> Result<()> {
    let room = get(count)? as usize;
    put(count, c_uint::try_from(processes.len()).unwrap_or(c_uint::MAX))?;
    if processes.len() > room {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    for (i, p) in processes.iter().enumerate() {
        put(out.wrapping_add(i), T::from(p))?;
    }
    Ok(())
}

fn computing<T: for<'a> From<&'a ProcessOnGpu>>(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    out: *mut T,
) -> Result<()> {
    let d = device(handle)?;
    let mut visible = d.session.processes(d.index);
    visible.retain(|p| p.pid > 0);
    list(&visible, count, out)
}

/// No graphics and no MPS here.
fn nobody<T: for<'a> From<&'a ProcessOnGpu>>(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    out: *mut T,
) -> Result<()> {
    device(handle)?;
    list(&[], count, out)
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV1) { computing(d, n, out) }
    fn nvmlDeviceGetComputeRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { computing(d, n, out) }
    fn nvmlDeviceGetComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { computing(d, n, out) }
    fn nvmlDeviceGetGraphicsRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV1) { nobody(d, n, out) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { nobody(d, n, out) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { nobody(d, n, out) }
    fn nvmlDeviceGetMPSComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV1) { nobody(d, n, out) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { nobody(d, n, out) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut ProcessV2) { nobody(d, n, out) }

    fn nvmlDeviceGetUtilizationRates(handle: nvmlDevice_t, out: *mut Utilization) {
        let d = device(handle)?;
        let gpu = d.session.utilisation_percent(d.index);
        put(out, Utilization { gpu, memory: gpu / 2 })
    }

    fn nvmlDeviceGetProcessUtilization(handle: nvmlDevice_t, out: *mut Sample, count: *mut c_uint, since_us: c_ulonglong) {
        let d = device(handle)?;
        let now_us = simgpu::clock::now_ns() / 1_000;
        let samples: Vec<_> = d
            .session
            .processes(d.index)
            .into_iter()
            .filter(|p| p.pid > 0 && p.percent > 0 && now_us > since_us)
            .collect();
        if samples.is_empty() {
            return Err(NVML_ERROR_NOT_FOUND);
        }
        let room = get(count)? as usize;
        put(count, c_uint::try_from(samples.len()).unwrap_or(c_uint::MAX))?;
        if out.is_null() || samples.len() > room {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (i, p) in samples.iter().enumerate() {
            let pid = c_uint::try_from(p.pid).unwrap_or(0);
            let sample = Sample { pid, time_us: now_us, sm: p.percent, memory: 0, encoder: 0, decoder: 0 };
            put(out.wrapping_add(i), sample)?;
        }
        Ok(())
    }
}
