//! What a claim's status says of its devices (KEP 4817): whether each is ready, and what it has *now*.
//!
//! `consumedCapacity` is what the scheduler counts; `tessera quota set` changes what a share has without the
//! scheduler. So the live limits are here. Nothing depends on it: a cluster that does not keep it, or forbids it,
//! loses a view.
//!
//! - [`of`]: the entry of a device, pure; [`task`]: writes

pub mod task;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tessera_cluster::k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tessera_cluster::k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::ClaimRef;
use tessera_model::origin::{ClaimResult, ClaimShare};
use tessera_model::record::{Grant, Record};

use crate::names;

pub use task::Reporter;

/// What enforces a share's limits.
const ENGINE: &str = "shim";

/// What claims say of their devices.
pub type Statuses = BTreeMap<ClaimRef, Vec<AllocatedDeviceStatus>>;

/// The status of all claims' devices, by claim. `sick`: why a GPU is not sold, by UUID.
pub fn of(records: &[Arc<Record>], sick: &BTreeMap<String, String>) -> Statuses {
    let mut all = Statuses::new();
    for record in records {
        let Some(share) = record.origin.claim() else { continue };
        let (namespace, name, uid) = (&share.namespace, &share.name, &share.uid);
        let claim = ClaimRef { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() };
        let device = |result| device(record, share, result, sick);
        all.entry(claim).or_default().extend(share.results.iter().filter_map(device));
    }
    for devices in all.values_mut() {
        // Two records may be listed in either order.
        devices.sort_by(|a, b| (&a.device, &a.share_id).cmp(&(&b.device, &b.share_id)));
    }
    all
}

/// One result of a request; none if the record has no limits on its GPU.
fn device(
    record: &Record,
    share: &ClaimShare,
    result: &ClaimResult,
    sick: &BTreeMap<String, String>,
) -> Option<AllocatedDeviceStatus> {
    let is_on = |device: &str, uuid: &str| device == names::device(uuid);
    let index = record.grants.iter().position(|grant| is_on(&result.device, &grant.uuid))?;
    let grant = &record.grants[index];
    let together = share.results.iter().filter(|other| is_on(&other.device, &grant.uuid)).count();
    let before = record.overridden.as_ref().and_then(|changed| changed.allocated.get(index));
    let before = before.filter(|before| limits(before) != limits(grant));
    let mut data = json!({
        "apiVersion": names::PARAMETERS_VERSION,
        "kind": "ShareStatus",
        "uuid": grant.uuid,
        "allocation": record.id.to_string(),
        "request": share.request,
        "engine": ENGINE,
        "limits": limits(grant),
    });
    if together > 1 {
        // One tenant's shares of one GPU are one quota.
        data["sharesTogether"] = together.into();
    }
    if let Some(before) = before {
        data["allocated"] = limits(before);
    }
    Some(AllocatedDeviceStatus {
        driver: names::DRIVER.to_owned(),
        pool: share.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
        conditions: Some(vec![ready(record, grant, before, sick.get(&grant.uuid))]),
        data: Some(RawExtension(data)),
        network_data: None,
    })
}

/// Limits as the slices say capacities: bytes with a suffix, hundredths of the GPU's time.
fn limits(grant: &Grant) -> Value {
    let bytes = grant.memory_limit_bytes;
    let mib = bytes.is_multiple_of(1 << 20);
    let memory = if mib { format!("{}Mi", bytes >> 20) } else { bytes.to_string() };
    let (whole, rest) = (grant.cores_millis / 10, grant.cores_millis % 10);
    let cores = if rest == 0 { whole.to_string() } else { format!("{whole}.{rest}") };
    json!({ "memory": memory, "cores": cores, "compute": grant.compute.name() })
}

fn ready(
    record: &Record,
    grant: &Grant,
    before: Option<&Grant>,
    sick: Option<&String>,
) -> Condition {
    let text = |grant: &Grant| {
        let limits = limits(grant);
        let part = |key: &str| limits[key].as_str().unwrap_or_default().to_owned();
        format!("{} and {} % ({})", part("memory"), part("cores"), part("compute"))
    };
    let (status, reason, message) = match (sick, before) {
        (Some(why), _) => {
            ("False", "GPUUnhealthy", format!("{} is not healthy: {why}", grant.uuid))
        }
        (None, Some(before)) => {
            let (now, before) = (text(grant), text(before));
            ("True", "QuotaChanged", format!("{now} of {}, changed from {before}", grant.uuid))
        }
        (None, None) => ("True", "Prepared", format!("{} of {}", text(grant), grant.uuid)),
    };
    let since = Timestamp::from_millisecond(record.allocated_unix_ms);
    let since = since.and_then(|since| Timestamp::from_second(since.as_second()));
    Condition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(since.unwrap_or(Timestamp::UNIX_EPOCH)),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use tessera_model::steered::Override;

    use super::*;
    use crate::fixtures;

    const SHARE: &str = "5c4f1f0c-7f57-4f51-8a5b-3a2c7a0f8a11";

    fn record(claim: &str, request: &str, devices: &[&str], grants: &[(&str, u64, u32)]) -> Record {
        let devices: Vec<_> = devices.iter().map(|device| (*device, Some(SHARE))).collect();
        fixtures::record(claim, request, &devices, grants)
    }

    fn entry(records: &[Arc<Record>], sick: &[(&str, &str)]) -> Vec<Value> {
        let sick = sick.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let mut all = of(records, &sick);
        assert_eq!(all.len(), 1);
        all.pop_first().unwrap().1.iter().map(|entry| json!(entry)).collect()
    }

    #[test]
    fn a_device_says_what_it_has_now() {
        let record = record("chat", "gpu/small", &["gpu-a"], &[("GPU-a", 6144, 300)]);
        let id = record.id.to_string();
        let entries = entry(&[Arc::new(record)], &[]);
        assert_eq!(
            entries,
            [json!({
                "driver": "gpu.tessera.dev", "pool": "node", "device": "gpu-a", "shareID": SHARE,
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "Prepared",
                    "message": "6144Mi and 30 % (strict) of GPU-a",
                    "lastTransitionTime": "2023-11-14T22:13:20Z",
                }],
                "data": {
                    "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareStatus", "uuid": "GPU-a", "allocation": id,
                    "request": "gpu/small", "engine": "shim",
                    "limits": { "memory": "6144Mi", "cores": "30", "compute": "strict" },
                },
            })]
        );
    }

    #[test]
    fn a_changed_quota_shows_both_limits() {
        let mut record = record("chat", "gpu", &["gpu-a"], &[("GPU-a", 8192, 255)]);
        let mut before = record.grants.clone();
        (before[0].memory_limit_bytes, before[0].cores_millis) = (4 << 30, 250);
        record.overridden = Some(Box::new(Override { allocated: before, owed: BTreeMap::new() }));
        let entries = entry(&[Arc::new(record)], &[]);
        assert_eq!(entries[0]["conditions"][0]["reason"], "QuotaChanged");
        assert_eq!(entries[0]["data"]["limits"]["cores"], "25.5");
        assert_eq!(entries[0]["data"]["allocated"]["memory"], "4096Mi");
        assert_eq!(
            entries[0]["conditions"][0]["message"],
            "8192Mi and 25.5 % (strict) of GPU-a, changed from 4096Mi and 25 % (strict)"
        );
    }

    #[test]
    fn requests_of_one_claim_are_one_status_and_a_sick_gpu_is_not_ready() {
        let records = [
            record("chat", "b", &["gpu-b", "gpu-b"], &[("GPU-b", 2048, 100)]),
            record("chat", "a", &["gpu-a"], &[("GPU-a", 1024, 100)]),
        ];
        let records = records.map(Arc::new);
        let entries = entry(&records, &[("GPU-b", "XID 79")]);
        let devices: Vec<_> = entries.iter().map(|entry| entry["device"].clone()).collect();
        assert_eq!(devices, ["gpu-a", "gpu-b", "gpu-b"]);
        assert_eq!(entries[0]["conditions"][0]["status"], "True");
        let sick = &entries[1]["conditions"][0];
        assert_eq!((&sick["status"], &sick["reason"]), (&json!("False"), &json!("GPUUnhealthy")));
        assert_eq!(sick["message"], "GPU-b is not healthy: XID 79");
        assert_eq!(entries[1]["data"]["sharesTogether"], 2);
        let plain = Arc::new(Record::new(records[0].id.clone(), 1, Vec::new()));
        assert_eq!(of(&[plain], &BTreeMap::new()).len(), 0, "no claim's");
    }
}
