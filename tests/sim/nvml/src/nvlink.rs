//! NVLink: NVML API Reference, "NvLink Methods". Links of the configuration are up, the others of a GPU
//! that has any are down.

use crate::abi::{Result, exports, put};
use crate::device::PciInfo;
use crate::state::device;
use simgpu::links::{self, MAX_LINKS};
use std::ffi::c_uint;
use tessera_cuda::nvml::{NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, nvmlDevice_t};

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
