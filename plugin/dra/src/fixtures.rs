//! For the tests: GPUs, records, and how the scheduler of Kubernetes counts requests.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_cluster::k8s_openapi::api::resource::v1::DeviceCapacity;
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tessera_config::Config;
use tessera_model::gpu::Gpu;
use tessera_model::mig::MigInstance;
use tessera_model::origin::{ClaimResult, ClaimShare, Origin};
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;

use crate::publish::Published;

pub const MIB: u64 = 1 << 20;

/// What a node sells by claims.
pub fn catalogue(uuids: &[&str]) -> Catalogue {
    let config = Config::parse("[dra]\nenabled = true").expect("a configuration");
    let gpus: Vec<Gpu> = uuids.iter().zip(0..).map(|(uuid, at)| Gpu::example(uuid, at)).collect();
    Catalogue::new(&gpus, &config)
}

/// A GPU of 80 GiB, a quarter of which is a replica's share. Nothing of it is held.
pub fn gpu(uuid: &str, index: u32) -> Published {
    let mut sold = catalogue(&[uuid]).gpus.remove(uuid).expect("it is in the catalogue");
    sold.gpu.index = index;
    sold.context_overhead_bytes = 512 * MIB;
    let memory_bytes = 81_408 * MIB;
    (sold.default_share.limit.memory_bytes, sold.default_share.limit.cores_millis) =
        (memory_bytes / 4, 250);
    Published {
        sold,
        driver_version: Some("580.65.06".to_owned()),
        cuda_version: Some((13, 0)),
        compute_capability: Some((9, 0)),
        pcie_root: Some("pci0000:00".to_owned()),
        memory_bytes,
        grown_bytes: 0,
        free_bytes: memory_bytes,
        is_cordoned: false,
        is_moving: false,
    }
}

/// One with so many bytes, so many of which are a replica's share.
pub fn gpu_of(memory_bytes: u64, replica_bytes: u64) -> Published {
    let mut gpu = Published { memory_bytes, ..gpu("GPU-a", 0) };
    gpu.sold.default_share.limit.memory_bytes = replica_bytes;
    gpu
}

/// An instance of GPU 0.
pub fn mig(uuid: &str, index: u32) -> Published {
    let mut instance = gpu(uuid, 0);
    instance.sold.gpu.name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb".to_owned();
    instance.sold.gpu.mig = Some(MigInstance {
        parent_uuid: "GPU-parent".to_owned(),
        parent_index: 0,
        index,
        gpu_instance: index + 7,
        compute_instance: 0,
    });
    instance.memory_bytes = 9216 * MIB;
    instance.free_bytes = 9216 * MIB;
    instance.sold.default_share.limit.memory_bytes = 2304 * MIB;
    instance
}

/// The record of a claim's request with these devices, and nothing granted.
pub fn claim_record(uid: &str, request: &str, devices: &[(&str, Option<&str>)]) -> Arc<Record> {
    let result = |(device, share): &(&str, Option<&str>)| ClaimResult {
        device: (*device).to_owned(),
        share_id: share.map(str::to_owned),
    };
    let share = ClaimShare {
        uid: uid.into(),
        namespace: "team".into(),
        name: format!("claim-{uid}"),
        request: request.into(),
        pool: "node".into(),
        results: devices.iter().map(result).collect(),
        asked: BTreeMap::new(),
    };
    let record = Record::new(share.allocation_id(), 1, Vec::new());
    Arc::new(Record { origin: Origin::Claim(Box::new(share)), cdi: true, ..record })
}

/// A quantity as a number.
pub fn units(quantity: &Quantity) -> u64 {
    tessera_model::quantity::Quantity::parse(&quantity.0).unwrap().units().unwrap()
}

/// What is counted for a request of so much; `None` where the device does not suit.
pub fn consumed(capacity: &DeviceCapacity, asked: Option<u64>) -> Option<u64> {
    let value = units(&capacity.value);
    let policy = capacity.request_policy.as_ref().expect("a device that is shared");
    let Some(asked) = asked else {
        return policy.default.as_ref().map(units);
    };
    let rounded = match (&policy.valid_range, &policy.valid_values) {
        (Some(range), None) => {
            let (min, step) = (units(&range.min), range.step.as_ref().map_or(1, units));
            let above = asked.saturating_sub(min);
            let rounded = min + above.div_ceil(step) * step;
            Some(rounded).filter(|bytes| range.max.as_ref().is_none_or(|max| *bytes <= units(max)))
        }
        (None, Some(values)) => values.iter().map(units).find(|value| asked <= *value),
        other => panic!("not one of range and values: {other:?}"),
    };
    rounded.filter(|bytes| *bytes <= value)
}
