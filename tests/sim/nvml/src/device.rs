//! Finding devices, and what they are: NVML API Reference, "Device Queries"; their memory, of which v1
//! counts what the driver reserves as used, v2 apart.

use crate::abi::{
    Result, cstr, exports, get, memory_info_v2, put, put_text, text_field, unsupported,
};
use crate::mig::without_mig;
use crate::state::{
    any_even_lost, device, device_even_lost, device_or_instance, handle_of, instance_handle,
    session,
};
use simgpu::config::{GpuConfig, parse_pci, parse_uuid};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, NVML_SUCCESS, nvmlDevice_t, nvmlMemory_t,
    nvmlMemory_v2_t,
};

/// `nvmlPciInfo_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [u8; 32],
}
const _: () = assert!(size_of::<PciInfo>() == 68);

/// H200's PCI device and vendor id.
const DEVICE_ID: c_uint = 0x2335_10de;
/// `NVML_DEVICE_ARCH_*` by compute capability (major, minor).
fn architecture((major, minor): (u32, u32)) -> c_uint {
    match (major, minor) {
        (5, _) => 3,
        (6, _) => 4,
        (7, 5) => 6,
        (7, _) => 5,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10.., _) => 10,
        _ => 0xffff_ffff,
    }
}

fn count(out: *mut c_uint) -> Result<()> {
    put(out, c_uint::try_from(session()?.config().gpus.len()).unwrap_or(0))
}

fn by_index(index: c_uint, out: *mut nvmlDevice_t) -> Result<()> {
    if index as usize >= session()?.config().gpus.len() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    found(Some(index as usize), out)
}

fn found(index: Option<usize>, out: *mut nvmlDevice_t) -> Result<()> {
    let handle = handle_of(index.ok_or(NVML_ERROR_NOT_FOUND)?);
    device(handle)?;
    put(out, handle)
}

fn by_pci(id: *const c_char, out: *mut nvmlDevice_t) -> Result<()> {
    let wanted = parse_pci(cstr(id)?).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    found(session()?.config().gpus.iter().position(|g| g.pci == wanted), out)
}

fn pci_info(handle: nvmlDevice_t, out: *mut PciInfo) -> Result<()> {
    put(out, PciInfo::of(device_even_lost(handle)?.config))
}

impl PciInfo {
    pub(crate) fn of(config: &GpuConfig) -> Self {
        let (domain, bus, dev) = config.pci;
        PciInfo {
            legacy: text_field(&format!("{domain:04X}:{bus:02X}:{dev:02X}.0")),
            domain,
            bus,
            device: dev,
            device_id: DEVICE_ID,
            subsystem_id: DEVICE_ID,
            bus_id: text_field(&format!("{domain:08X}:{bus:02X}:{dev:02X}.0")),
        }
    }
}

exports! {
    fn nvmlDeviceGetCount(out: *mut c_uint) { count(out) }
    fn nvmlDeviceGetCount_v2(out: *mut c_uint) { count(out) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, out: *mut nvmlDevice_t) { by_index(index, out) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut nvmlDevice_t) { by_index(index, out) }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut nvmlDevice_t) {
        let text = cstr(uuid)?;
        if let Some(unit) = crate::mig::by_uuid(session()?.config(), text) {
            device_or_instance(instance_handle(unit))?;
            return put(out, instance_handle(unit));
        }
        let wanted = parse_uuid(text).filter(|_| text.starts_with("GPU-"));
        let wanted = wanted.ok_or(NVML_ERROR_NOT_FOUND)?;
        found(session()?.config().gpus.iter().position(|g| g.uuid == wanted), out)
    }
    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, out: *mut nvmlDevice_t) {
        let wanted = cstr(serial)?;
        found(session()?.config().gpus.iter().position(|g| g.serial == wanted), out)
    }
    fn nvmlDeviceGetHandleByPciBusId(id: *const c_char, out: *mut nvmlDevice_t) { by_pci(id, out) }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, out: *mut nvmlDevice_t) { by_pci(id, out) }

    fn nvmlDeviceGetName(handle: nvmlDevice_t, text: *mut c_char, len: c_uint) {
        let d = device_or_instance(handle)?;
        put_text(text, len, &d.instance.map_or(d.config.name.clone(), |mig| mig.name(d.config)))
    }
    fn nvmlDeviceGetUUID(handle: nvmlDevice_t, text: *mut c_char, len: c_uint) {
        let d = device_or_instance(handle)?;
        let driver = &d.session.config().driver_version;
        let uuid = d.instance.map_or(d.config.uuid_text(), |mig| mig.uuid_text(d.config, driver));
        put_text(text, len, &uuid)
    }
    fn nvmlDeviceGetSerial(handle: nvmlDevice_t, text: *mut c_char, len: c_uint) {
        put_text(text, len, &device(handle)?.config.serial)
    }
    fn nvmlDeviceGetIndex(handle: nvmlDevice_t, out: *mut c_uint) {
        // "When used with MIG device handles this API returns indices that can be passed to
        // nvmlDeviceGetMigDeviceHandleByIndex".
        let d = any_even_lost(handle)?;
        let in_gpu = d.session.config().units[d.units.clone()].first().and_then(|u| u.instance);
        put(out, c_uint::try_from(in_gpu.filter(|_| d.instance.is_some()).unwrap_or(d.index)).unwrap_or(0))
    }
    fn nvmlDeviceGetMinorNumber(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, device_even_lost(handle)?.config.minor)
    }
    fn nvmlDeviceGetModuleId(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, c_uint::try_from(device(handle)?.index).unwrap_or(0))
    }
    fn nvmlDeviceGetBoardId(handle: nvmlDevice_t, out: *mut c_uint) {
        let (domain, bus, _) = device(handle)?.config.pci;
        put(out, domain << 16 | bus << 8)
    }
    fn nvmlDeviceGetMultiGpuBoard(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 0)
    }
    fn nvmlDeviceGetPciInfo(handle: nvmlDevice_t, out: *mut PciInfo) { pci_info(handle, out) }
    fn nvmlDeviceGetPciInfo_v2(handle: nvmlDevice_t, out: *mut PciInfo) { pci_info(handle, out) }
    fn nvmlDeviceGetPciInfo_v3(handle: nvmlDevice_t, out: *mut PciInfo) { pci_info(handle, out) }

    fn nvmlDeviceGetBrand(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        // NVML_BRAND_NVIDIA.
        put(out, 14)
    }
    fn nvmlDeviceGetArchitecture(handle: nvmlDevice_t, out: *mut c_uint) {
        put(out, architecture(device(handle)?.config.compute_capability))
    }
    fn nvmlDeviceGetCudaComputeCapability(handle: nvmlDevice_t, major: *mut c_int, minor: *mut c_int) {
        let (a, b) = device(handle)?.config.compute_capability;
        put(major, c_int::try_from(a).unwrap_or(0))?;
        put(minor, c_int::try_from(b).unwrap_or(0))
    }
    fn nvmlDeviceGetNumGpuCores(handle: nvmlDevice_t, out: *mut c_uint) {
        let config = without_mig(handle)?.config;
        put(out, config.sm_count.saturating_mul(config.cores_per_sm()))
    }
    fn nvmlDeviceGetVbiosVersion(handle: nvmlDevice_t, text: *mut c_char, len: c_uint) {
        device(handle)?;
        put_text(text, len, "96.00.99.00.01")
    }
    fn nvmlDeviceGetPersistenceMode(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 1)
    }
    fn nvmlDeviceGetComputeMode(handle: nvmlDevice_t, out: *mut c_uint) {
        device_or_instance(handle)?;
        // NVML_COMPUTEMODE_DEFAULT.
        put(out, 0)
    }
    fn nvmlDeviceGetDisplayMode(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 0)
    }
    fn nvmlDeviceGetDisplayActive(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 0)
    }
    fn nvmlDeviceGetVirtualizationMode(handle: nvmlDevice_t, out: *mut c_uint) {
        let gpu = device(handle)?;
        // NVML_GPU_VIRTUALIZATION_MODE_VGPU, else …_NONE.
        put(out, if gpu.config.vgpu { 2 } else { 0 })
    }
}

unsupported! {
    nvmlDeviceGetMemoryErrorCounter(kind: c_uint, counter: c_uint, place: c_uint, out: *mut c_ulonglong);
    nvmlDeviceGetRetiredPages(cause: c_uint, count: *mut c_uint, out: *mut c_ulonglong);
    nvmlDeviceGetInforomImageVersion(text: *mut c_char, len: c_uint);
    nvmlDeviceGetBoardPartNumber(text: *mut c_char, len: c_uint);
    nvmlDeviceGetFanSpeed(out: *mut c_uint);
    nvmlDeviceGetFanSpeed_v2(fan: c_uint, out: *mut c_uint);
    nvmlDeviceGetNumFans(out: *mut c_uint);
    nvmlDeviceGetAccountingMode(out: *mut c_uint);
    nvmlDeviceGetNvLinkVersion(link: c_uint, out: *mut c_uint);
    nvmlDeviceGetNvLinkCapability(link: c_uint, which: c_uint, out: *mut c_uint);
    // "For Windows only."
    nvmlDeviceGetDriverModel(current: *mut c_uint, pending: *mut c_uint);
    nvmlDeviceGetDriverModel_v2(current: *mut c_uint, pending: *mut c_uint);
    // What servers' GPUs do not have, or what is not simulated.
    nvmlDeviceGetGpuOperationMode(current: *mut c_uint, pending: *mut c_uint);
    nvmlDeviceGetBridgeChipInfo(out: *mut c_void);
    nvmlDeviceGetViolationStatus(policy: c_uint, out: *mut c_void);
    nvmlDeviceGetSamples(kind: c_uint, since: c_ulonglong, of: *mut c_uint, count: *mut c_uint, out: *mut c_void);
    nvmlDeviceGetEncoderStats(sessions: *mut c_uint, fps: *mut c_uint, latency: *mut c_uint);
    nvmlDeviceGetEncoderSessions(count: *mut c_uint, out: *mut c_void);
    nvmlDeviceGetFBCStats(out: *mut c_void);
    nvmlDeviceGetInforomVersion(object: c_uint, text: *mut c_char, len: c_uint);
    nvmlDeviceGetInforomConfigurationChecksum(out: *mut c_uint);
    nvmlDeviceGetGspFirmwareVersion(text: *mut c_char);
    nvmlDeviceGetGspFirmwareMode(on: *mut c_uint, default_on: *mut c_uint);
    nvmlDeviceGetGpuFabricInfo(out: *mut c_void);
    nvmlDeviceGetGpuFabricInfoV(out: *mut c_void);
    nvmlDeviceGetConfComputeMemSizeInfo(out: *mut c_void);
    nvmlDeviceGetConfComputeProtectedMemoryUsage(out: *mut c_void);
    nvmlDeviceGetHostVgpuMode(out: *mut c_uint);
    nvmlDeviceGetPowerSource(out: *mut c_uint);
    nvmlDeviceGetNvLinkErrorCounter(link: c_uint, counter: c_uint, out: *mut c_ulonglong);
    nvmlDeviceGetNvLinkUtilizationCounter(link: c_uint, counter: c_uint, received: *mut c_ulonglong, sent: *mut c_ulonglong);
    nvmlDeviceGetAccountingBufferSize(out: *mut c_uint);
    nvmlDeviceGetAccountingStats(pid: c_uint, out: *mut c_void);
}

const NVML_ERROR_ARGUMENT_VERSION_MISMATCH: i32 = 25;

/// `nvmlMemory_v2`: the structure's size and version 2.
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct Bar1 {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

fn info(handle: nvmlDevice_t) -> Result<nvmlMemory_v2_t> {
    let device = device_or_instance(handle)?;
    device.ask_for_memory();
    let (total, usable, used) = device.memory();
    let (reserved, free) = (total - usable, usable.saturating_sub(used));
    Ok(nvmlMemory_v2_t { version: MEMORY_V2, total, reserved, free, used })
}

exports! {
    fn nvmlDeviceGetMemoryInfo_v2(handle: nvmlDevice_t, out: *mut nvmlMemory_v2_t) {
        if get(out.cast::<c_uint>())? != MEMORY_V2 {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        put(out, info(handle)?)
    }

    fn nvmlDeviceGetMemoryInfo(handle: nvmlDevice_t, out: *mut nvmlMemory_t) {
        let mut v2 = nvmlMemory_v2_t { version: MEMORY_V2, ..Default::default() };
        // SAFETY: `v2` is a valid structure of its version.
        match unsafe { memory_info_v2(handle, &raw mut v2) } {
            NVML_SUCCESS => {}
            code => return Err(code),
        }
        put(out, nvmlMemory_t { total: v2.total, free: v2.free, used: v2.used + v2.reserved })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(handle: nvmlDevice_t, out: *mut Bar1) {
        let total = device_or_instance(handle)?.memory().0.next_power_of_two();
        put(out, Bar1 { total, free: total - (1 << 20), used: 1 << 20 })
    }
}
