//! A GPU's condition: clocks, power, temperature, PCIe, plausible constants, some following the load; ECC, rows and
//! repair (NVML API Reference, "Field Value Queries"), only what `simgpu-ctl` makes happen; and event sets
//! ("Event Handling Methods"), of which only XIDs happen.

use crate::abi::{Result, exports, get, put};
use crate::device::without_mig;
use crate::state::{Device, device, device_even_lost, handle_of, session};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tessera_cuda::nvml::{
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED,
    NVML_ERROR_TIMEOUT, NVML_SUCCESS, nvmlDevice_t,
};

/// Graphics, SM, memory, video clocks in MHz.
const CLOCKS_MHZ: [c_uint; 4] = [1980, 1980, 3201, 1545];
const IDLE_MW: c_uint = 75_000;
const LIMIT_MW: c_uint = 700_000;

/// `nvmlTemperature_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Temperature {
    version: c_uint,
    sensor: c_uint,
    degrees: c_int,
}
const TEMPERATURE_V1: c_uint = 12 | 1 << 24;

fn constant(handle: nvmlDevice_t, out: *mut c_uint, value: c_uint) -> Result<()> {
    device(handle)?;
    put(out, value)
}

/// Energy since the last reset, millijoules: milliwatts times seconds.
fn energy_mj(d: &Device) -> u64 {
    let (ns, busy_ns) = d.session.since_reset(d.index);
    let used = |ns: u64, mw: u32| ns / 1_000_000 * u64::from(mw) / 1_000;
    used(ns, IDLE_MW) + used(busy_ns, LIMIT_MW - IDLE_MW)
}

exports! {
    fn nvmlDeviceGetClockInfo, nvmlDeviceGetMaxClockInfo(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        device(handle)?;
        put(out, *CLOCKS_MHZ.get(which as usize).ok_or(NVML_ERROR_INVALID_ARGUMENT)?)
    }
    fn nvmlDeviceGetPerformanceState(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, 0)
    }

    fn nvmlDeviceGetTemperatureV(handle: nvmlDevice_t, out: *mut Temperature) {
        let asked = get(out)?;
        if asked.version != TEMPERATURE_V1 {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let busy = device(handle)?.utilisation_percent();
        if asked.sensor != 0 {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        put(out, Temperature { degrees: (30 + busy * 35 / 100).cast_signed(), ..asked })
    }
    fn nvmlDeviceGetPowerUsage(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, IDLE_MW + (LIMIT_MW - IDLE_MW) / 100 * device(handle)?.utilisation_percent())
    }
    fn nvmlDeviceGetPowerManagementLimit(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, LIMIT_MW)
    }

    fn nvmlDeviceGetPcieThroughput(handle: nvmlDevice_t, _counter: c_uint, out: *mut c_uint) { constant(handle, out, 0) }
    fn nvmlDeviceGetEncoderUtilization, nvmlDeviceGetDecoderUtilization(handle: nvmlDevice_t, out: *mut c_uint, period_us: *mut c_uint) {
        without_mig(handle)?;
        constant(handle, out, 0)?;
        put(period_us, 100_000)
    }
}

/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED`.
const UNCORRECTED: c_uint = 1;
/// `NVML_FI_DEV_ECC_DBE_VOL_TOTAL`.
const DBE_VOL_TOTAL: c_uint = 4;
/// `NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION`.
const TOTAL_ENERGY: c_uint = 83;
/// `NVML_FI_DEV_REMAPPED_COR` and `NVML_FI_DEV_REMAPPED_UNC`.
const REMAPPED: [c_uint; 2] = [142, 143];
/// `NVML_FI_DEV_REMAPPED_PENDING`.
const REMAPPED_PENDING: c_uint = 144;
/// `NVML_FI_DEV_REMAPPED_FAILURE`.
const REMAPPED_FAILURE: c_uint = 145;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
const RECOVERY_ACTION: c_uint = 230;

/// `nvmlFieldValue_t`.
#[repr(C)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: c_longlong,
    latency_usec: c_longlong,
    value_type: c_uint,
    outcome: c_int,
    value: c_ulonglong,
}
const _: () = assert!(size_of::<FieldValue>() == 40);

/// `NVML_VALUE_TYPE_UNSIGNED_INT` and `NVML_VALUE_TYPE_UNSIGNED_LONG_LONG`.
const UNSIGNED_INT: c_uint = 1;
const UNSIGNED_LONG_LONG: c_uint = 3;

fn field(d: &Device, id: c_uint) -> Option<(c_uint, u64)> {
    let faults = d.session.faults(d.index);
    match id {
        DBE_VOL_TOTAL => Some((UNSIGNED_LONG_LONG, faults.uncorrectable)),
        TOTAL_ENERGY => Some((UNSIGNED_LONG_LONG, energy_mj(d))),
        REMAPPED_PENDING => Some((UNSIGNED_INT, 0)),
        REMAPPED_FAILURE => Some((UNSIGNED_INT, u64::from(faults.remap_failed))),
        RECOVERY_ACTION => Some((UNSIGNED_INT, u64::from(faults.recovery))),
        id if REMAPPED.contains(&id) => Some((UNSIGNED_INT, 0)),
        _ => None,
    }
}

fn fill(d: &Device, count: c_int, values: *mut FieldValue) -> Result<()> {
    let count = usize::try_from(count).map_err(|_| NVML_ERROR_INVALID_ARGUMENT)?;
    if count == 0 || values.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    for i in 0..count {
        // SAFETY: not null, and the caller promises `count` readable and writable values.
        let value = unsafe { &mut *values.add(i) };
        (value.timestamp, value.latency_usec) = (0, 0);
        match field(d, value.field) {
            Some((kind, number)) => {
                (value.value_type, value.value, value.outcome) = (kind, number, NVML_SUCCESS);
            }
            None => value.outcome = NVML_ERROR_NOT_SUPPORTED,
        }
    }
    Ok(())
}

exports! {
    fn nvmlDeviceGetFieldValues(handle: nvmlDevice_t, count: c_int, values: *mut FieldValue) {
        fill(&device(handle)?, count, values)
    }
    fn nvmlDeviceGetTotalEccErrors(handle: nvmlDevice_t, kind: c_uint, _counter: c_uint, out: *mut c_ulonglong) {
        let d = device(handle)?;
        put(out, if kind == UNCORRECTED { d.session.faults(d.index).uncorrectable } else { 0 })
    }
}

/// `nvmlEventTypeXidCriticalError`: events of no other type can be registered.
const XID: c_ulonglong = 8;

/// `nvmlEventData_t`.
#[repr(C)]
pub struct EventData {
    device: nvmlDevice_t,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}
const _: () = assert!(size_of::<EventData>() == 32);

struct Set {
    /// Bit by GPU.
    gpus: u64,
    /// Next XID event to look at.
    next: u32,
}

type SetHandle = *mut c_void;

/// By handle; those of sets that are gone mean nothing any more.
static SETS: Mutex<BTreeMap<usize, Set>> = Mutex::new(BTreeMap::new());

fn sets() -> MutexGuard<'static, BTreeMap<usize, Set>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(handle: SetHandle, act: impl FnOnce(&mut Set) -> T) -> Result<T> {
    sets().get_mut(&(handle as usize)).map(act).ok_or(NVML_ERROR_INVALID_ARGUMENT)
}

/// The set's next event that has happened.
fn next(handle: SetHandle) -> Result<Option<EventData>> {
    let session = session()?;
    with(handle, |set| {
        let written = session.xids_written();
        while set.next < written {
            let event = session.xid(set.next);
            set.next += 1;
            if let Some(e) = event.filter(|e| set.gpus >> e.gpu & 1 == 1) {
                return Some(EventData {
                    device: handle_of(e.gpu as usize),
                    kind: XID,
                    data: c_ulonglong::from(e.code),
                    gpu_instance: e.gpu_instance.unwrap_or(c_uint::MAX),
                    compute_instance: c_uint::MAX,
                });
            }
        }
        None
    })
}

fn wait(handle: SetHandle, out: *mut EventData, timeout_ms: c_uint) -> Result<()> {
    let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        let session = session()?;
        let seen = session.xids_written();
        if let Some(event) = next(handle)? {
            return put(out, event);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NVML_ERROR_TIMEOUT);
        }
        session.wait_for_xid(seen, left);
    }
}

exports! {
    fn nvmlEventSetCreate(out: *mut SetHandle) {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let next = session()?.xids_written();
        let handle = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        sets().insert(handle, Set { gpus: 0, next });
        put(out, handle as SetHandle)
    }

    fn nvmlEventSetFree(set: SetHandle) {
        session()?;
        sets().remove(&(set as usize)).map(drop).ok_or(NVML_ERROR_INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetSupportedEventTypes(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        device_even_lost(handle)?;
        put(out, XID)
    }

    // "This API does not currently support per-instance event reporting using MIG device handles."
    fn nvmlDeviceRegisterEvents(handle: nvmlDevice_t, types: c_ulonglong, set: SetHandle) {
        let d = device_even_lost(handle)?;
        if types & !XID != 0 {
            return Err(NVML_ERROR_NOT_SUPPORTED);
        }
        with(set, |s| if types & XID != 0 { s.gpus |= 1 << d.index })
    }

    fn nvmlEventSetWait_v2(set: SetHandle, out: *mut EventData, timeout_ms: c_uint) {
        wait(set, out, timeout_ms)
    }
}
