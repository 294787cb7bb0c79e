//! Finding devices, and what they are: NVML API Reference, "Device Queries"; their memory, of which v1
//! counts what the driver reserves as used, v2 apart; and their topology: GPUs of one NUMA node meet in it,
//! those with the same `pcie_switch` at that. Links of the configuration are up, the others of a GPU that has
//! any are down.
//!
//! And MIG ("Multi Instance GPU Management"): instances are what the configuration says and can't be changed.

use crate::abi::{Result, cstr, exports, get, memory_info_v2, put, put_text, text_field};
use crate::state::{
    Device, any_even_lost, device, device_even_lost, device_or_instance, handle_of,
    instance_handle, session, works,
};
use simgpu::Config;
use simgpu::config::{GpuConfig, MAX_INSTANCES, MAX_LINKS, MigConfig, parse_uuid, peers};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS,
    nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t,
};

/// `nvmlPciInfo_t`.
#[repr(C)]
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

fn found(index: Option<usize>, out: *mut nvmlDevice_t) -> Result<()> {
    let handle = handle_of(index.ok_or(NVML_ERROR_NOT_FOUND)?);
    device(handle)?;
    put(out, handle)
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
    fn nvmlDeviceGetCount, nvmlDeviceGetCount_v2(out: *mut c_uint) {
        put(out, c_uint::try_from(session()?.config().gpus.len()).unwrap_or(0))
    }
    fn nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut nvmlDevice_t) {
        if index as usize >= session()?.config().gpus.len() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        found(Some(index as usize), out)
    }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut nvmlDevice_t) {
        let text = cstr(uuid)?;
        if let Some(unit) = by_uuid(session()?.config(), text) {
            device_or_instance(instance_handle(unit))?;
            return put(out, instance_handle(unit));
        }
        let wanted = parse_uuid(text).filter(|_| text.starts_with("GPU-"));
        let wanted = wanted.ok_or(NVML_ERROR_NOT_FOUND)?;
        found(session()?.config().gpus.iter().position(|g| g.uuid == wanted), out)
    }

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
    fn nvmlDeviceGetDisplayMode, nvmlDeviceGetDisplayActive(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 0)
    }
    fn nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v3(handle: nvmlDevice_t, out: *mut PciInfo) {
        put(out, PciInfo::of(device_even_lost(handle)?.config))
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
    fn nvmlDeviceGetPersistenceMode(handle: nvmlDevice_t, out: *mut c_uint) {
        device(handle)?;
        put(out, 1)
    }
    fn nvmlDeviceGetComputeMode(handle: nvmlDevice_t, out: *mut c_uint) {
        device_or_instance(handle)?;
        // NVML_COMPUTEMODE_DEFAULT.
        put(out, 0)
    }
    fn nvmlDeviceGetVirtualizationMode(handle: nvmlDevice_t, out: *mut c_uint) {
        let gpu = device(handle)?;
        // NVML_GPU_VIRTUALIZATION_MODE_VGPU, else …_NONE.
        put(out, if gpu.config.vgpu { 2 } else { 0 })
    }
    // "For Windows only", and what servers' GPUs do not have.
    fn nvmlDeviceGetDriverModel_v2, nvmlDeviceGetFanSpeed, nvmlDeviceGetConfComputeMemSizeInfo(handle: nvmlDevice_t) {
        device(handle)?;
        Err(NVML_ERROR_NOT_SUPPORTED)
    }
}

const NVML_ERROR_ARGUMENT_VERSION_MISMATCH: i32 = 25;

/// `nvmlMemory_v2`: the structure's size and version 2.
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

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
}

/// `NVML_TOPOLOGY_SINGLE`: behind one PCIe switch, …
const SINGLE: c_uint = 10;
/// … `NVML_TOPOLOGY_NODE`: within a NUMA node …
const NODE: c_uint = 40;
/// … and `NVML_TOPOLOGY_SYSTEM`: across.
const SYSTEM: c_uint = 50;

fn level(a: &Device, b: &Device) -> c_uint {
    if a.config.pcie_switch.is_some() && a.config.pcie_switch == b.config.pcie_switch {
        SINGLE
    } else if a.config.numa_node == b.config.numa_node {
        NODE
    } else {
        SYSTEM
    }
}

/// The GPU at a link's other end; `None` for a link that is down.
fn peer(handle: nvmlDevice_t, link: c_uint) -> Result<Option<usize>> {
    let d = device(handle)?;
    let mut peers = peers(&d.session.config().nvlinks, d.index).peekable();
    if peers.peek().is_none() {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    if link as usize >= MAX_LINKS {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    Ok(peers.nth(link as usize))
}

exports! {
    fn nvmlDeviceGetNumaNodeId(handle: nvmlDevice_t, out: *mut c_uint) {
        let node = device(handle)?.config.numa_node;
        put(out, c_uint::try_from(node).map_err(|_| NVML_ERROR_NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(a: nvmlDevice_t, b: nvmlDevice_t, out: *mut c_uint) {
        let (a, b) = (device(a)?, device(b)?);
        if a.index == b.index {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        put(out, level(&a, &b))
    }

    fn nvmlDeviceGetNvLinkState(handle: nvmlDevice_t, link: c_uint, out: *mut c_uint) {
        put(out, c_uint::from(peer(handle, link)?.is_some()))
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(handle: nvmlDevice_t, link: c_uint, out: *mut PciInfo) {
        let peer = peer(handle, link)?.ok_or(NVML_ERROR_NOT_SUPPORTED)?;
        put(out, PciInfo::of(&device(handle)?.session.config().gpus[peer]))
    }
}

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
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

fn id(handle: nvmlDevice_t, out: *mut c_uint, id: fn(&MigConfig) -> u32) -> Result<()> {
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
