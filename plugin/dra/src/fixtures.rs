//! For the tests: a cluster, GPUs, claims, records, and how the scheduler of Kubernetes counts requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tessera_cluster::fixtures::{ApiServer, Temper};
use tessera_cluster::k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceCapacity, DeviceRequestAllocationResult as DeviceResult,
    ResourceClaim, ResourceSlice,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tessera_cluster::resource::{ResourceClient, Timing};
use tessera_config::Config;
use tessera_model::gpu::Gpu;
use tessera_model::mig::MigInstance;
use tessera_model::origin::{ClaimResult, ClaimShare, Origin};
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_rules::allocate::Catalogue;

use crate::names;
use crate::publish::Published;

pub const MIB: u64 = 1 << 20;

/// What claims are asked for with.
pub const GET_CLAIM: &str = "GET /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/";

/// An API server on a port, with one node.
pub struct Cluster {
    pub server: ApiServer,
    node: String,
    _token: tempfile::TempDir,
}

impl Cluster {
    pub fn new(node: &str) -> Self {
        let token = tempfile::tempdir().unwrap();
        let server = ApiServer::start(token.path());
        server.with(|store| store.nodes.insert(node.to_owned(), format!("uid-of-{node}")));
        Cluster { server, node: node.to_owned(), _token: token }
    }

    /// A client of the driver; its connections end with the runtime that uses it.
    pub fn client(&self) -> ResourceClient {
        let timing = Timing {
            // More than a busy machine needs to answer.
            limit: Duration::from_secs(3),
            ..Timing::default()
        };
        ResourceClient::new(self.server.access(), names::DRIVER, &self.node, timing)
    }

    /// All slices, of every driver and node.
    pub fn slices(&self) -> Vec<ResourceSlice> {
        let typed = |slice: &Value| serde_json::from_value(slice.clone()).unwrap();
        self.server.with(|store| store.slices(None, None).map(typed).collect())
    }

    /// Makes a slice, as somebody else.
    pub fn put_slice(&self, slice: &ResourceSlice) {
        self.server.with(|store| store.create_slice(json!(slice))).unwrap();
    }

    /// Removes all slices of the node, as kubelet does when it starts; how many.
    pub fn wipe_slices(&self) -> usize {
        self.server.with(|store| store.wipe_slices(&self.node))
    }

    /// Puts claims in place of those of their names.
    pub fn put(&self, claims: &[&ResourceClaim]) {
        claims.iter().for_each(|claim| self.server.with(|store| store.put_claim(json!(claim))));
    }

    pub fn remove_claim(&self, name: &str) {
        self.server.with(|store| store.remove_claim("team", name));
    }

    /// The entries of a claim's `status.devices`.
    pub fn device_status(&self, name: &str) -> Value {
        let devices = |claim: &Value| claim["status"]["devices"].clone();
        self.server.with(|store| store.claim("team", name).map(devices).unwrap_or_default())
    }
}

/// What an API server does that forbids everything.
pub fn forbids() -> Temper {
    Temper::Answers(403, "User \"x\" cannot do that".to_owned())
}

/// What an API server does that has trouble of its own.
pub fn fails() -> Temper {
    Temper::Answers(500, "etcdserver: request timed out".to_owned())
}

/// A share as the scheduler allocates it; without a name, all of a device.
pub fn share(request: &str, device: &str, share: &str, memory: &str, cores: &str) -> DeviceResult {
    let capacity = [("memory", memory), ("cores", cores)];
    DeviceResult {
        request: request.into(),
        driver: names::DRIVER.into(),
        pool: "node".into(),
        device: device.into(),
        share_id: Some(share.into()).filter(|share: &String| !share.is_empty()),
        consumed_capacity: Some(
            capacity.map(|(name, value)| (name.into(), Quantity(value.into()))).into(),
        ),
        ..DeviceResult::default()
    }
}

/// A claim in namespace `team`, allocated, reserved for some pod.
pub fn claim(name: &str, uid: &str, results: Vec<DeviceResult>) -> ResourceClaim {
    configured(name, uid, results, &[])
}

/// One with parameters.
pub fn configured(
    name: &str,
    uid: &str,
    results: Vec<DeviceResult>,
    config: &[DeviceAllocationConfiguration],
) -> ResourceClaim {
    let object = json!({
        "metadata": { "namespace": "team", "name": name, "uid": uid },
        "spec": {},
        "status": {
            "allocation": { "devices": { "results": results, "config": config } },
            "reservedFor": [{ "resource": "pods", "name": "pod", "uid": "pod-uid" }],
        },
    });
    serde_json::from_value(object).unwrap()
}

/// The driver's parameters, of a DeviceClass or the claim, for requests or all.
pub fn parameters(
    parameters: Value,
    from_class: bool,
    requests: &[&str],
) -> DeviceAllocationConfiguration {
    let object = json!({
        "source": if from_class { "FromClass" } else { "FromClaim" },
        "requests": requests,
        "opaque": { "driver": names::DRIVER, "parameters": parameters },
    });
    serde_json::from_value(object).unwrap()
}

/// Parameters that say this of a share's time.
pub fn compute(compute: &str) -> Value {
    json!({ "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig", "compute": compute })
}

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
    (sold.default_share.memory_bytes, sold.default_share.cores_millis) = (memory_bytes / 4, 250);
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
    gpu.sold.default_share.memory_bytes = replica_bytes;
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
    instance.sold.default_share.memory_bytes = 2304 * MIB;
    instance
}

/// The record of a claim's request with these devices and their shares, and these GPUs with MiB and thousandths.
pub fn record(
    uid: &str,
    request: &str,
    devices: &[(&str, Option<&str>)],
    grants: &[(&str, u64, u32)],
) -> Record {
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
    let grant = |(uuid, mib, cores): &(&str, u64, u32)| Grant {
        uuid: (*uuid).to_owned(),
        memory_limit_bytes: mib << 20,
        context_overhead_bytes: 0,
        cores_millis: *cores,
        compute: Compute::Strict,
    };
    let mut record = Record::new(share.allocation_id(), 1, grants.iter().map(grant).collect());
    record.allocated_unix_ms = 1_700_000_000_123;
    Record { origin: Origin::Claim(Box::new(share)), cdi: true, ..record }
}

/// One of which nothing matters but its devices.
pub fn claim_record(uid: &str, request: &str, devices: &[(&str, Option<&str>)]) -> Arc<Record> {
    Arc::new(record(uid, request, devices, &[]))
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
