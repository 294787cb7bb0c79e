//! Devices: CUDA Driver API, "Device Management", "Peer Context Memory Access".

use crate::abi::{exports, get, put, put_if, put_text};
use crate::driver::{Device, driver};
use crate::errors::Result;
use crate::launch::{SHARED_OPT_IN, SHARED_PER_SM};
use std::ffi::{c_char, c_int, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdevice, CUuuid};

/// `CU_DEVICE_ATTRIBUTE_*` with one value for every simulated GPU: those of a Hopper. What it has nothing of is left out.
const FIXED: &[(c_int, c_int)] = &[
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    (5, 0x7fff_ffff),
    (6, 65_535),
    (7, 65_535),
    (8, 49_152),
    (9, 65_536),
    (10, 32),
    (11, 0x7fff_ffff),
    (12, 65_536),
    (13, 1_980_000),
    (14, 512),
    (15, 1),
    (19, 1),
    (21, 131_072),
    (22, 131_072),
    (23, 65_536),
    (24, 16_384),
    (25, 16_384),
    (26, 16_384),
    (27, 32_768),
    (28, 32_768),
    (29, 2048),
    (30, 512),
    (31, 1),
    (36, 2_619_000),
    (37, 6144),
    (38, 62_914_560),
    (40, 3),
    (41, 1),
    (42, 32_768),
    (43, 2048),
    (45, 32_768),
    (46, 32_768),
    (47, 8192),
    (48, 8192),
    (49, 32_768),
    (51, 32),
    (52, 32_768),
    (53, 32_768),
    (54, 2046),
    (55, 32_768),
    (56, 131_072),
    (57, 65_536),
    (58, 16_384),
    (59, 16_384),
    (60, 16_384),
    (61, 32_768),
    (62, 2048),
    (63, 32_768),
    (64, 32_768),
    (65, 2048),
    (66, 32_768),
    (67, 32_768),
    (68, 2046),
    (69, 268_435_456),
    (70, 131_072),
    (71, 65_000),
    (72, 2_097_120),
    (73, 32_768),
    (74, 32_768),
    (77, 32_768),
    (78, 1),
    (79, 1),
    (80, 1),
    (82, 65_536),
    (83, 1),
    (87, 2),
    (89, 1),
    (90, 1),
    (91, 1),
    (95, 1),
    (96, 1),
    (99, 1),
    (102, 1),
    (103, 1),
    (106, 32),
    (108, 39_321_600),
    (109, 134_213_632),
    (111, 1024),
    (115, 1),
    (120, 1),
    (121, 1),
    (126, 4),
    (127, 1),
    (129, 1),
    (132, 1),
];

fn attribute(device: &Device, which: c_int) -> Result<c_int> {
    let gpu = &device.config;
    let int = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
    let size = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
    Ok(match which {
        16 => int(gpu.sm_count),
        39 => int(gpu.threads_per_sm()),
        33 => int(gpu.pci.1),
        34 => int(gpu.pci.2),
        50 => int(gpu.pci.0),
        75 => int(gpu.compute_capability.0),
        76 => int(gpu.compute_capability.1),
        81 => size(SHARED_PER_SM),
        85 => device.ordinal,
        97 => size(SHARED_OPT_IN),
        // The GPU has no NUMA memory of its own; the host's node near it.
        131 => -1,
        // Without a GPU thread its words wait for a CPU.
        122 => driver()?.session.is_served().into(),
        134 => gpu.numa_node,
        1..=147 => FIXED.iter().find(|(number, _)| *number == which).map_or(0, |(_, value)| *value),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

fn uuid(out: *mut CUuuid, dev: CUdevice) -> Result<()> {
    put(out, CUuuid { bytes: driver()?.device(dev)?.config.uuid })
}

exports! {
    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, c_int::try_from(driver()?.devices.len()).unwrap_or(c_int::MAX))
    }
    fn cuDeviceGet(out: *mut CUdevice, ordinal: c_int) {
        put(out, driver()?.device(ordinal)?.ordinal)
    }
    fn cuDeviceGetName(out: *mut c_char, len: c_int, dev: CUdevice) {
        put_text(out, len, &driver()?.device(dev)?.config.name)
    }
    fn cuDeviceGetUuid(out: *mut CUuuid, dev: CUdevice) { uuid(out, dev) }
    // "If the device is in MIG mode, returns its MIG UUID which uniquely identifies the subscribed MIG
    // compute instance."
    fn cuDeviceGetUuid_v2(out: *mut CUuuid, dev: CUdevice) {
        match driver()?.device(dev)?.instance_uuid {
            Some(bytes) => put(out, CUuuid { bytes }),
            None => uuid(out, dev),
        }
    }
    fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, dev: CUdevice) {
        put(value, attribute(driver()?.device(dev)?, which)?)
    }
    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice) {
        let device = driver()?.device(dev)?;
        put(major, attribute(device, 75)?)?;
        put(minor, attribute(device, 76)?)
    }

    // No links between simulated GPUs: peers reach each other through the host.

    fn cuGetExportTable(table: *mut *const c_void, id: *const CUuuid) {
        // NVIDIA's private tables are not simulated: what a real driver says of an unknown id.
        get(id)?;
        put_if(table, std::ptr::null());
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}
