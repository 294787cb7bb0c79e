//! Devices: CUDA Driver API, "Device Management", "Peer Context Memory Access".

use crate::abi::{Result, exports, get, put, put_if, put_text};
use crate::driver::{Device, driver};
use crate::launch::{SHARED_OPT_IN, SHARED_PER_SM};
use simgpu::{Config, GpuConfig};
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdevice, CUuuid};

/// Values that every simulated GPU has, those of a Hopper, and of which `CU_DEVICE_ATTRIBUTE_*`. What it has nothing of
/// is left out.
const FIXED: &[(c_int, &[c_int])] = &[
    (1024, &[1, 2, 3, 111]),
    (64, &[4]),
    (0x7fff_ffff, &[5, 11]),
    (65_535, &[6, 7]),
    (49_152, &[8]),
    (65_536, &[9, 12, 23, 57, 82]),
    (32, &[10, 51, 106]),
    (1_980_000, &[13]),
    (512, &[14, 30]),
    (
        1,
        &[
            15, 19, 31, 41, 78, 79, 80, 83, 89, 90, 91, 95, 96, 99, 102, 103, 115, 120, 121, 127,
            129, 132,
        ],
    ),
    (131_072, &[21, 22, 56, 70]),
    (16_384, &[24, 25, 26, 58, 59, 60]),
    (32_768, &[27, 28, 42, 45, 46, 49, 52, 53, 55, 61, 63, 64, 66, 67, 73, 74, 77]),
    (2048, &[29, 43, 62, 65]),
    (2_619_000, &[36]),
    (6144, &[37]),
    (62_914_560, &[38]),
    (3, &[40]),
    (8192, &[47, 48]),
    (2046, &[54, 68]),
    (268_435_456, &[69]),
    (65_000, &[71]),
    (2_097_120, &[72]),
    (2, &[87]),
    (39_321_600, &[108]),
    (134_213_632, &[109]),
    (4, &[126]),
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
        1..=147 => {
            FIXED.iter().find(|(_, those)| those.contains(&which)).map_or(0, |(value, _)| *value)
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

fn uuid(out: *mut CUuuid, dev: CUdevice) -> Result<()> {
    put(out, CUuuid { bytes: driver()?.device(dev)?.config.uuid })
}

exports! {
    fn cuDeviceGetCount() -> c_int {
        Ok(c_int::try_from(driver()?.devices.len()).unwrap_or(c_int::MAX))
    }
    fn cuDeviceGet(ordinal: c_int) -> CUdevice {
        Ok(driver()?.device(ordinal)?.ordinal)
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
    fn cuDeviceGetAttribute(which: c_int, dev: CUdevice) -> c_int {
        attribute(driver()?.device(dev)?, which)
    }
    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice) {
        let device = driver()?.device(dev)?;
        put(major, attribute(device, 75)?)?;
        put(minor, attribute(device, 76)?)
    }

    fn cuGetExportTable(table: *mut *const c_void, id: *const CUuuid) {
        // NVIDIA's private tables are not simulated: what a real driver says of an unknown id.
        get(id)?;
        put_if(table, std::ptr::null());
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}

/// Which devices a process sees: `CUDA_VISIBLE_DEVICES` and MIG.
///
/// CUDA C++ Programming Guide, "CUDA Environment Variables": ordinals or UUID prefixes; the first
/// invalid entry ends the list. MIG User Guide, "CUDA Device Enumeration": "CUDA can only enumerate a
/// single compute instance", "will pick the first one available if several of them are visible", and
/// "will not enumerate non-MIG GPU if any compute instance is enumerated on any other GPU". Ordinals
/// count GPUs; one in MIG mode, named by ordinal or by its own UUID, stands for its instances, and
/// without any is no device.
pub(crate) fn units(config: &Config) -> Vec<usize> {
    enumerate(config, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

fn enumerate(config: &Config, list: Option<&str>) -> Vec<usize> {
    let visible: Vec<usize> = match list {
        None => (0..config.units.len()).collect(),
        Some(list) => named(config, list),
    };
    match visible.iter().find(|&&unit| config.instance(unit).is_some()) {
        Some(&first) => vec![first],
        None => visible,
    }
}

fn named(config: &Config, list: &str) -> Vec<usize> {
    let mut visible: Vec<usize> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        match one(config, entry) {
            Some(units) if !units.clone().any(|unit| visible.contains(&unit)) => {
                visible.extend(units);
            }
            _ => break,
        }
    }
    visible
}

fn one(config: &Config, entry: &str) -> Option<Range<usize>> {
    let gpu = if entry.starts_with("GPU-") {
        config.gpus.iter().position(|g| g.uuid_text().starts_with(entry))
    } else if entry.starts_with("MIG-") {
        let is_it = |unit: &usize| {
            let gpu = &config.gpus[config.units[*unit].gpu];
            let uuid = config.instance(*unit).map(|m| m.uuid_text(gpu, &config.driver_version));
            uuid.is_some_and(|uuid| uuid.starts_with(entry))
        };
        return (0..config.units.len()).find(is_it).map(|unit| unit..unit + 1);
    } else {
        entry.parse::<usize>().ok().filter(|&i| i < config.gpus.len())
    };
    gpu.map(|gpu| config.units_of(gpu))
}

pub(crate) fn described(config: &Config, unit: usize) -> GpuConfig {
    let gpu = config.gpus[config.units[unit].gpu].clone();
    match config.instance(unit) {
        None => gpu,
        Some(mig) => GpuConfig {
            name: mig.name(&gpu),
            memory_bytes: mig.memory_bytes,
            sm_count: mig.sm_count,
            ..gpu
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPU 0 whole, GPU 1 with two instances (units 1 and 2), GPU 2 in MIG mode with none, GPU 3
    /// whole (unit 3).
    fn machine() -> Config {
        let instances = "mig = [\"1g.2gb\", \"2g.4gb\"]";
        Config::parse(&format!("[[gpu]]\n[[gpu]]\n{instances}\n[[gpu]]\nmig = []\n[[gpu]]"))
            .unwrap()
    }

    #[test]
    fn one_instance_is_all_that_a_process_sees() {
        let config = machine();
        assert_eq!(enumerate(&config, None), [1], "the first of the machine, and no whole GPU");
        assert_eq!(enumerate(&config, Some("1")), [1], "the first of the GPU");
        assert_eq!(enumerate(&config, Some("0,1")), [1]);
        assert_eq!(enumerate(&config, Some("0,3")), [0, 3], "no instance among them");
        let parent = config.gpus[1].uuid_text();
        assert_eq!(enumerate(&config, Some(&parent)), [1]);
        let second = &config.gpus[1].mig.as_ref().unwrap()[1];
        let uuid = second.uuid_text(&config.gpus[1], &config.driver_version);
        assert_eq!(enumerate(&config, Some(&uuid[..15])), [2], "by the beginning of its UUID");
        assert!(enumerate(&config, Some("2")).is_empty(), "MIG mode without instances");
        assert!(enumerate(&config, Some("")).is_empty());
    }
}
