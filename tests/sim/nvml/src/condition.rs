//! A GPU's condition: clocks, power, temperature, PCIe, plausible constants, some following the load; ECC, rows and
//! repair (NVML API Reference, "Field Value Queries"), only what `simgpu-ctl` makes happen.

use crate::abi::{Result, exports, get, put};
use crate::mig::without_mig;
use crate::state::{Device, device};
use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};
use tessera_cuda::nvml::{
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED,
    NVML_SUCCESS, nvmlDevice_t,
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
#[allow(missing_docs, reason = "nvml.h's structure")]
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
