//! ECC, rows and repair: NVML API Reference, "Device Queries" and "Field Value Queries". Only what
//! `simgpu-ctl` makes happen.

use crate::abi::{Result, exports, put};
use crate::clocks::energy_mj;
use crate::state::{Device, device};
use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlDevice_t,
};

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
    // On, and not to be switched off: NVML_FEATURE_ENABLED.
    fn nvmlDeviceGetEccMode(handle: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) {
        device(handle)?;
        put(current, 1)?;
        put(pending, 1)
    }
    fn nvmlDeviceGetTotalEccErrors(handle: nvmlDevice_t, kind: c_uint, _counter: c_uint, out: *mut c_ulonglong) {
        let d = device(handle)?;
        put(out, if kind == UNCORRECTED { d.session.faults(d.index).uncorrectable } else { 0 })
    }
    fn nvmlDeviceGetRemappedRows(handle: nvmlDevice_t, correctable: *mut c_uint, uncorrectable: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint) {
        let d = device(handle)?;
        put(correctable, 0)?;
        put(uncorrectable, 0)?;
        put(pending, 0)?;
        put(failed, c_uint::from(d.session.faults(d.index).remap_failed))
    }
}
