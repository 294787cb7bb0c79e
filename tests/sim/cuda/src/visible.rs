//! Which devices a process sees: `CUDA_VISIBLE_DEVICES` and MIG.
//!
//! CUDA C++ Programming Guide, "CUDA Environment Variables": ordinals or UUID prefixes; the first
//! invalid entry ends the list. MIG User Guide, "CUDA Device Enumeration": "CUDA can only enumerate a
//! single compute instance", "will pick the first one available if several of them are visible", and
//! "will not enumerate non-MIG GPU if any compute instance is enumerated on any other GPU". Ordinals
//! count GPUs; one in MIG mode, named by ordinal or by its own UUID, stands for its instances, and
//! without any is no device.

use simgpu::{Config, GpuConfig};
use std::ops::Range;

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
        assert!(enumerate(&config, Some("2")).is_empty(), "MIG mode without instances");
        assert!(enumerate(&config, Some("")).is_empty());
    }

    #[test]
    fn an_instance_is_chosen_by_its_uuid_or_the_beginning_of_it() {
        let config = machine();
        let gpu = &config.gpus[1];
        let uuid = gpu.mig.as_ref().unwrap()[1].uuid_text(gpu, &config.driver_version);
        assert_eq!(enumerate(&config, Some(&uuid)), [2]);
        assert_eq!(enumerate(&config, Some(&uuid[..15])), [2]);
        assert_eq!(enumerate(&config, Some(&format!("{uuid},0"))), [2]);
        assert!(enumerate(&config, Some("MIG-ffffffff")).is_empty());
        let old = Config::parse(
            "driver_version = \"460.32.03\"\n[[gpu]]\nmig = [\"1g.2gb\", \"1g.2gb\"]",
        )
        .unwrap();
        let name = format!("MIG-{}/2/0", old.gpus[0].uuid_text());
        assert_eq!(enumerate(&old, Some(&name)), [1]);
    }
}
