//! Utilisation and processes: `nvmlDeviceGetUtilizationRates`, `…RunningProcesses`.
//!
//! Pids are in the caller's pid namespace, as the kernel translates the owner of a file lock;
//! processes that are not visible from there are left out.

use crate::abi::{Result, exports, get, put};
use crate::device::without_mig;
use crate::state::{Listed, device, device_or_instance};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tessera_cuda::nvml::*;

/// `nvmlUtilization_t`, percent.
#[repr(C)]
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

/// "The CPU timestamp in microseconds": drivers give Unix time.
fn unix_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// What a question found: its time, Unix microseconds, and the busy time of each process until then, nanoseconds.
type Question = (u64, Vec<(i32, u64)>);

/// The last questions of this process, by unit.
static QUESTIONS: Mutex<BTreeMap<usize, VecDeque<Question>>> = Mutex::new(BTreeMap::new());
/// So many are remembered of a unit, and so far before `lastSeenTimeStamp` one may be.
const REMEMBERED: usize = 64;
const NEAR_US: u64 = 1_000_000;

/// Percent of the time since `since_us` in which each process kept the GPU busy: "Set lastSeenTimeStamp to a timeStamp
/// retrieved from a previous query to read utilization since the previous query." Else, of the last second: "based on
/// all the samples maintained by the driver's internal sample buffer".
fn utilisation_since(unit: usize, since_us: u64, now_us: u64, processes: &[Listed]) -> Vec<c_uint> {
    let mut all = QUESTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let questions = all.entry(unit).or_default();
    let before = questions.iter().rev().find(|(at, _)| *at <= since_us);
    let before = before.filter(|(at, _)| since_us - at < NEAR_US);
    let percent = |p: &Listed| {
        let Some((at, then)) = before else { return p.process.percent };
        let of = then.iter().find(|(pid, _)| *pid == p.process.pid);
        let busy_ns = p.process.busy_ns.saturating_sub(of.map_or(0, |(_, ns)| *ns));
        let part = busy_ns / 10 / now_us.saturating_sub(*at).max(1);
        c_uint::try_from(part.min(100)).unwrap_or(100)
    };
    let percents = processes.iter().map(percent).collect();
    let busy = processes.iter().map(|p| (p.process.pid, p.process.busy_ns)).collect();
    questions.push_back((now_us, busy));
    if questions.len() > REMEMBERED {
        questions.pop_front();
    }
    percents
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) { computing(d, n, out, first) }
    fn nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { computing(d, n, out, second) }
    fn nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetMPSComputeRunningProcesses(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) { nobody(d, n, out, first) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2,
       nvmlDeviceGetGraphicsRunningProcesses_v3,
       nvmlDeviceGetMPSComputeRunningProcesses_v2,
       nvmlDeviceGetMPSComputeRunningProcesses_v3(d: nvmlDevice_t, n: *mut c_uint, out: *mut nvmlProcessInfo_t) { nobody(d, n, out, second) }

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
        let processes = d.processes();
        let now_us = unix_us();
        let percents = utilisation_since(d.units.start, since_us, now_us, &processes);
        // "had some non-zero utilization during the last sample period"
        let samples: Vec<_> = processes.iter().zip(percents).filter(|(_, percent)| *percent > 0).collect();
        if samples.is_empty() || now_us <= since_us {
            return Err(NVML_ERROR_NOT_FOUND);
        }
        let room = get(count)? as usize;
        put(count, c_uint::try_from(samples.len()).unwrap_or(c_uint::MAX))?;
        if out.is_null() || samples.len() > room {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (i, (p, percent)) in samples.into_iter().enumerate() {
            let sample = nvmlProcessUtilizationSample_t {
                pid: pid(p),
                timeStamp: now_us,
                smUtil: percent,
                ..Default::default()
            };
            put(out.wrapping_add(i), sample)?;
        }
        Ok(())
    }
}
