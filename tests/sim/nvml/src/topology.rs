//! NUMA, affinity and topology: GPUs of one NUMA node meet in it, those with the same `pcie_switch` at
//! that. NVLink: links of the configuration are up, the others of a GPU that has any are down.

use crate::abi::{Result, exports, get, put};
use crate::device::PciInfo;
use crate::state::{Device, device, handle_of};
use simgpu::links::{self, MAX_LINKS};
use std::ffi::{c_int, c_uint, c_ulong};
use tessera_cuda::nvml::{NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, nvmlDevice_t};

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

/// A mask in the caller's words.
fn put_mask(out: *mut c_ulong, words: c_uint, bits: impl Fn(u32) -> bool) -> Result<()> {
    for word in 0..words {
        let mask = (0..c_ulong::BITS)
            .fold(0, |mask, bit| mask | c_ulong::from(bits(word * c_ulong::BITS + bit)) << bit);
        put(out.wrapping_add(word as usize), mask)?;
    }
    Ok(())
}

/// CPUs of the machine that runs the simulator: all are near.
fn cpus(handle: nvmlDevice_t, words: c_uint, out: *mut c_ulong) -> Result<()> {
    device(handle)?;
    let n = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    put_mask(out, words, |bit| (bit as usize) < n)
}

exports! {
    fn nvmlDeviceGetCpuAffinity(handle: nvmlDevice_t, words: c_uint, out: *mut c_ulong) {
        cpus(handle, words, out)
    }
    fn nvmlDeviceGetCpuAffinityWithinScope(handle: nvmlDevice_t, words: c_uint, out: *mut c_ulong, _scope: c_uint) {
        cpus(handle, words, out)
    }
    fn nvmlDeviceGetMemoryAffinity(handle: nvmlDevice_t, words: c_uint, out: *mut c_ulong, _scope: c_uint) {
        let node = device(handle)?.config.numa_node;
        put_mask(out, words, |bit| i64::from(bit) == i64::from(node))
    }
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
    fn nvmlDeviceGetTopologyNearestGpus(handle: nvmlDevice_t, wanted: c_uint, count: *mut c_uint, out: *mut nvmlDevice_t) {
        let d = device(handle)?;
        let near: Vec<usize> = (0..d.session.config().gpus.len())
            .filter(|&i| i != d.index)
            .filter(|&i| device(handle_of(i)).is_ok_and(|other| level(&d, &other) == wanted))
            .collect();
        let room = get(count)? as usize;
        put(count, c_uint::try_from(near.len()).unwrap_or(0))?;
        if out.is_null() {
            return Ok(());
        }
        for (i, index) in near.into_iter().take(room).enumerate() {
            put(out.wrapping_add(i), handle_of(index))?;
        }
        Ok(())
    }
    fn nvmlDeviceGetP2PStatus(a: nvmlDevice_t, b: nvmlDevice_t, _which: c_uint, out: *mut c_uint) {
        device(a)?;
        device(b)?;
        // NVML_P2P_STATUS_NOT_SUPPORTED.
        put(out, 5)
    }
    fn nvmlDeviceOnSameBoard(a: nvmlDevice_t, b: nvmlDevice_t, out: *mut c_int) {
        put(out, c_int::from(device(a)?.index == device(b)?.index))
    }
}

/// The GPU at a link's other end; `None` for a link that is down.
fn peer(handle: nvmlDevice_t, link: c_uint) -> Result<Option<usize>> {
    let d = device(handle)?;
    let mut peers = links::peers(&d.session.config().nvlinks, d.index).peekable();
    if peers.peek().is_none() {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    if link as usize >= MAX_LINKS {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    Ok(peers.nth(link as usize))
}

exports! {
    fn nvmlDeviceGetNvLinkState(handle: nvmlDevice_t, link: c_uint, out: *mut c_uint) {
        put(out, c_uint::from(peer(handle, link)?.is_some()))
    }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(handle: nvmlDevice_t, link: c_uint, out: *mut c_uint) {
        // NVML_NVLINK_DEVICE_TYPE_GPU: links of the configuration end at GPUs.
        peer(handle, link)?.ok_or(NVML_ERROR_NOT_SUPPORTED)?;
        put(out, 0)
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(handle: nvmlDevice_t, link: c_uint, out: *mut PciInfo) {
        let peer = peer(handle, link)?.ok_or(NVML_ERROR_NOT_SUPPORTED)?;
        put(out, PciInfo::of(&device(handle)?.session.config().gpus[peer]))
    }
}
