//! Clocks, power, temperature, PCIe: plausible constants, some following the load.

use crate::abi::{Result, exports, get, put};
use crate::mig::without_mig;
use crate::state::{Device, device};
use std::ffi::{c_int, c_uint, c_ulonglong};
use tessera_cuda::nvml::{
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NVML_ERROR_INSUFFICIENT_SIZE,
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, nvmlDevice_t,
};

/// Graphics, SM, memory, video clocks in MHz.
const CLOCKS_MHZ: [c_uint; 4] = [1980, 1980, 3201, 1545];
const IDLE_MW: c_uint = 75_000;
const LIMIT_MW: c_uint = 700_000;

fn clock(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) -> Result<()> {
    device(handle)?;
    let mhz = CLOCKS_MHZ.get(which as usize).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    put(out, *mhz)
}

/// `nvmlTemperature_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Temperature {
    version: c_uint,
    sensor: c_uint,
    degrees: c_int,
}
const TEMPERATURE_V1: c_uint = 12 | 1 << 24;

fn temperature(handle: nvmlDevice_t, sensor: c_uint) -> Result<c_uint> {
    let busy = utilisation(handle)?;
    if sensor == 0 { Ok(30 + busy * 35 / 100) } else { Err(NVML_ERROR_INVALID_ARGUMENT) }
}

/// The one clock that there is to choose from.
fn only_clock(count: *mut c_uint, out: *mut c_uint, mhz: c_uint) -> Result<()> {
    let room = get(count)?;
    put(count, 1)?;
    if room == 0 { Err(NVML_ERROR_INSUFFICIENT_SIZE) } else { put(out, mhz) }
}

fn utilisation(handle: nvmlDevice_t) -> Result<c_uint> {
    let d = device(handle)?;
    Ok(d.utilisation_percent())
}

fn constant(handle: nvmlDevice_t, out: *mut c_uint, value: c_uint) -> Result<()> {
    device(handle)?;
    put(out, value)
}

/// Energy since the last reset, millijoules: milliwatts times seconds.
pub(crate) fn energy_mj(d: &Device) -> u64 {
    let (ns, busy_ns) = d.session.since_reset(d.index);
    let used = |ns: u64, mw: u32| ns / 1_000_000 * u64::from(mw) / 1_000;
    used(ns, IDLE_MW) + used(busy_ns, LIMIT_MW - IDLE_MW)
}

exports! {
    fn nvmlDeviceGetClockInfo(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        clock(handle, which, out)
    }
    fn nvmlDeviceGetMaxClockInfo(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        clock(handle, which, out)
    }
    fn nvmlDeviceGetApplicationsClock(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        clock(handle, which, out)
    }
    fn nvmlDeviceGetDefaultApplicationsClock(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        clock(handle, which, out)
    }
    fn nvmlDeviceGetClock(handle: nvmlDevice_t, which: c_uint, _id: c_uint, out: *mut c_uint) {
        clock(handle, which, out)
    }
    fn nvmlDeviceGetPerformanceState(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, 0)
    }
    fn nvmlDeviceGetPowerState(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 0) }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        // nvmlClocksThrottleReasonGpuIdle when nothing runs.
        let idle = utilisation(handle)? == 0;
        put(out, c_ulonglong::from(idle))
    }
    fn nvmlDeviceGetCurrentClocksEventReasons(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        let idle = utilisation(handle)? == 0;
        put(out, c_ulonglong::from(idle))
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        device(handle)?;
        put(out, 1)
    }

    fn nvmlDeviceGetTemperature(handle: nvmlDevice_t, sensor: c_uint, out: *mut c_uint) {
        put(out, temperature(handle, sensor)?)
    }
    fn nvmlDeviceGetTemperatureV(handle: nvmlDevice_t, out: *mut Temperature) {
        let asked = get(out)?;
        if asked.version != TEMPERATURE_V1 {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let degrees = c_int::try_from(temperature(handle, asked.sensor)?).unwrap_or(c_int::MAX);
        put(out, Temperature { degrees, ..asked })
    }
    fn nvmlDeviceGetSupportedMemoryClocks(handle: nvmlDevice_t, count: *mut c_uint, out: *mut c_uint) {
        device(handle)?;
        only_clock(count, out, CLOCKS_MHZ[2])
    }
    fn nvmlDeviceGetSupportedGraphicsClocks(handle: nvmlDevice_t, memory: c_uint, count: *mut c_uint, out: *mut c_uint) {
        device(handle)?;
        if memory != CLOCKS_MHZ[2] {
            return Err(NVML_ERROR_NOT_FOUND);
        }
        only_clock(count, out, CLOCKS_MHZ[0])
    }
    fn nvmlDeviceGetSupportedClocksEventReasons(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        device(handle)?;
        put(out, 1)
    }
    fn nvmlDeviceGetTemperatureThreshold(handle: nvmlDevice_t, which: c_uint, out: *mut c_uint) {
        // Shutdown, slowdown, memory, GPU maximum.
        constant(handle, out, *[92, 89, 95, 87].get(which as usize).unwrap_or(&87))
    }
    fn nvmlDeviceGetPowerUsage(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, IDLE_MW + (LIMIT_MW - IDLE_MW) / 100 * utilisation(handle)?)
    }
    fn nvmlDeviceGetPowerManagementMode(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, 1)
    }
    fn nvmlDeviceGetPowerManagementLimit(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, LIMIT_MW)
    }
    fn nvmlDeviceGetPowerManagementDefaultLimit(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, LIMIT_MW)
    }
    fn nvmlDeviceGetEnforcedPowerLimit(handle: nvmlDevice_t, out: *mut c_uint) {
        constant(handle, out, LIMIT_MW)
    }
    fn nvmlDeviceGetPowerManagementLimitConstraints(handle: nvmlDevice_t, min: *mut c_uint, max: *mut c_uint) {
        device(handle)?;
        put(min, 200_000)?;
        put(max, LIMIT_MW)
    }
    fn nvmlDeviceGetTotalEnergyConsumption(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        let d = device(handle)?;
        put(out, energy_mj(&d))
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 5) }
    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 5) }
    fn nvmlDeviceGetPcieSpeed(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 32_000) }
    fn nvmlDeviceGetPcieLinkMaxSpeed(handle: nvmlDevice_t, out: *mut c_uint) {
        // NVML_PCIE_LINK_MAX_SPEED_32000MBPS.
        constant(handle, out, 5)
    }
    fn nvmlDeviceGetBusType(handle: nvmlDevice_t, out: *mut c_uint) {
        // NVML_BUS_TYPE_PCIE.
        constant(handle, out, 2)
    }
    fn nvmlDeviceGetCurrPcieLinkGeneration(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 5) }
    fn nvmlDeviceGetMaxPcieLinkWidth(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 16) }
    fn nvmlDeviceGetCurrPcieLinkWidth(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 16) }
    fn nvmlDeviceGetPcieReplayCounter(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 0) }
    fn nvmlDeviceGetPcieThroughput(handle: nvmlDevice_t, _counter: c_uint, out: *mut c_uint) { constant(handle, out, 0) }
    fn nvmlDeviceGetMemoryBusWidth(handle: nvmlDevice_t, out: *mut c_uint) { constant(handle, out, 6144) }
    fn nvmlDeviceGetEncoderUtilization(handle: nvmlDevice_t, out: *mut c_uint, period_us: *mut c_uint) {
        without_mig(handle)?;
        constant(handle, out, 0)?;
        put(period_us, 100_000)
    }
    fn nvmlDeviceGetDecoderUtilization(handle: nvmlDevice_t, out: *mut c_uint, period_us: *mut c_uint) {
        without_mig(handle)?;
        constant(handle, out, 0)?;
        put(period_us, 100_000)
    }
    fn nvmlDeviceGetJpgUtilization(handle: nvmlDevice_t, out: *mut c_uint, period_us: *mut c_uint) {
        without_mig(handle)?;
        constant(handle, out, 0)?;
        put(period_us, 100_000)
    }
    fn nvmlDeviceGetOfaUtilization(handle: nvmlDevice_t, out: *mut c_uint, period_us: *mut c_uint) {
        without_mig(handle)?;
        constant(handle, out, 0)?;
        put(period_us, 100_000)
    }
    fn nvmlDeviceGetAPIRestriction(handle: nvmlDevice_t, _api: c_uint, out: *mut c_uint) { constant(handle, out, 1) }
    fn nvmlDeviceGetAutoBoostedClocksEnabled(handle: nvmlDevice_t, on: *mut c_int, default_on: *mut c_int) {
        device(handle)?;
        put(on, 0)?;
        put(default_on, 0)
    }
}
