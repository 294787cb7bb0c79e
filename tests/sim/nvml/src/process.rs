//! Utilisation and processes: `nvmlDeviceGetUtilizationRates`, `…RunningProcesses`.
//!
//! Pids are in the caller's pid namespace, as the kernel translates the owner of a file lock;
//! processes that are not visible from there are left out.

use crate::abi::{Result, exports, get, put};
use crate::mig::without_mig;
use crate::state::{Listed, device, device_or_instance};
use std::ffi::{c_uint, c_ulonglong};
use tessera_cuda::nvml::*;

/// `nvmlUtilization_t`, percent.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessDetailList_v1`: the structure's size and version 1.
const DETAIL_LIST_V1: c_uint = 24 | 1 << 24;

fn pid(p: &Listed) -> c_uint {
    c_uint::try_from(p.process.pid).unwrap_or(0)
}

fn first(p: &Listed) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: pid(p), usedGpuMemory: p.process.used_bytes }
}

fn second(p: &Listed) -> nvmlProcessInfo_t {
    nvmlProcessInfo_t {
        pid: pid(p),
        usedGpuMemory: p.process.used_bytes,
        gpuInstanceId: p.gpu_instance,
        computeInstanceId: p.compute_instance,
    }
}

fn detail(p: &Listed) -> nvmlProcessDetail_v1_t {
    nvmlProcessDetail_v1_t {
        pid: pid(p),
        usedGpuMemory: p.process.used_bytes,
        gpuInstanceId: p.gpu_instance,
        computeInstanceId: p.compute_instance,
        usedGpuCcProtectedMemory: 0,
    }
}

/// Fills the caller's array; "`NVML_ERROR_INSUFFICIENT_SIZE` if infoCount indicates that the infos
/// array is too small; infoCount will contain minimal amount of space necessary".
fn list<T>(
    processes: &[Listed],
    count: *mut c_uint,
    out: *mut T,
    entry: fn(&Listed) -> T,
) -> Result<()> {
    let room = get(count)? as usize;
    put(count, c_uint::try_from(processes.len()).unwrap_or(c_uint::MAX))?;
    if processes.len() > room {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    for (i, p) in processes.iter().enumerate() {
        put(out.wrapping_add(i), entry(p))?;
    }
    Ok(())
}

fn visible(handle: nvmlDevice_t) -> Result<Vec<Listed>> {
    Ok(device_or_instance(handle)?.processes())
}

fn computing<T>(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    out: *mut T,
    entry: fn(&Listed) -> T,
) -> Result<()> {
    list(&visible(handle)?, count, out, entry)
}

/// No graphics and no MPS here.
fn nobody<T>(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    out: *mut T,
    entry: fn(&Listed) -> T,
) -> Result<()> {
    device_or_instance(handle)?.walk_clients();
    list(&[], count, out, entry)
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) { computing(d, n, out, first) }
    fn nvmlDeviceGetComputeRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { computing(d, n, out, second) }
    fn nvmlDeviceGetComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { computing(d, n, out, second) }
    fn nvmlDeviceGetGraphicsRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) { nobody(d, n, out, first) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { nobody(d, n, out, second) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { nobody(d, n, out, second) }
    fn nvmlDeviceGetMPSComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) { nobody(d, n, out, first) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { nobody(d, n, out, second) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { nobody(d, n, out, second) }

    fn nvmlDeviceGetRunningProcessDetailList(handle: nvmlDevice_t, out: *mut nvmlProcessDetailList_v1_t) {
        let asked = get(out)?;
        if asked.version != DETAIL_LIST_V1 {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let processes = match asked.mode {
            NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL => visible(handle)?,
            NVML_PROCESS_MODE_GRAPHICS | NVML_PROCESS_MODE_MPS => {
                device_or_instance(handle)?.walk_clients();
                Vec::new()
            }
            _ => return Err(NVML_ERROR_INVALID_ARGUMENT),
        };
        let mut count = asked.numProcArrayEntries;
        let result = list(&processes, &raw mut count, asked.procArray, detail);
        put(out, nvmlProcessDetailList_v1_t { numProcArrayEntries: count, ..asked })?;
        result
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(handle: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_v1_t) {
        let _ = get(info)?;
        device(handle)?;
        Err(NVML_ERROR_NOT_SUPPORTED)
    }

    fn nvmlDeviceGetAccountingPids(handle: nvmlDevice_t, count: *mut c_uint, pids: *mut c_uint) {
        let (_, _) = (get(count)?, pids);
        device(handle)?;
        // Accounting is off.
        Err(NVML_ERROR_NOT_SUPPORTED)
    }

    fn nvmlDeviceGetUtilizationRates(handle: nvmlDevice_t, out: *mut Utilization) {
        // "On MIG-enabled GPUs, querying device utilization rates is not currently supported."
        let gpu = without_mig(handle)?.utilisation_percent();
        put(out, Utilization { gpu, memory: gpu / 2 })
    }

    fn nvmlDeviceGetProcessUtilization(handle: nvmlDevice_t, out: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, since_us: c_ulonglong) {
        // "On MIG-enabled GPUs, querying process utilization is not currently supported."
        let d = without_mig(handle)?;
        let now_us = simgpu::clock::now_ns() / 1_000;
        let samples: Vec<_> = d
            .processes()
            .into_iter()
            .filter(|p| p.process.percent > 0 && now_us > since_us)
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
            let sample = nvmlProcessUtilizationSample_t {
                pid: pid(p),
                timeStamp: now_us,
                smUtil: p.process.percent,
                ..Default::default()
            };
            put(out.wrapping_add(i), sample)?;
        }
        Ok(())
    }
}
