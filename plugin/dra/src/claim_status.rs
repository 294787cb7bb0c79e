//! What a claim's status says of its devices (KEP 4817): whether each is ready, and what it has *now*.
//!
//! `consumedCapacity` is what the scheduler counts; `tessera quota set` changes what a share has without the
//! scheduler. So the live limits are here. Nothing depends on it: a cluster that does not keep it, or forbids it,
//! loses a view.
//!
//! [`of`]: the entry of a device, pure; [`Reporter`]: writes

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_agent::Agent;
use tessera_cluster::k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tessera_cluster::k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::{ClaimRef, ResourceClient};
use tessera_cluster::{ApiError, Failure, Retry};
use tessera_model::clock::unix_ms;
use tessera_model::origin::{ClaimResult, ClaimShare};
use tessera_model::record::{Grant, Record};
use tracing::warn;

use crate::{names, sleep};

const ENGINE: &str = "shim";

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
    json!({ "memory": memory, "cores": cores, "compute": grant.compute.into_str() })
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

/// How long changes are gathered: a claim's requests are prepared one after the other.
const GATHER: Duration = Duration::from_millis(100);
/// Pause after a failure that passes by itself; it doubles …
const SHORTEST: Duration = Duration::from_secs(1);
/// … up to this.
const LONGEST: Duration = Duration::from_secs(60);
/// Pause after a failure that a person must mend.
const LATER: Duration = Duration::from_secs(300);

/// Writes the status of claims' devices after Prepare, and when limits or health change.
#[derive(Debug)]
pub struct Reporter {
    api: ResourceClient,
    agent: Arc<Agent>,
}

#[derive(Debug, Default)]
struct Written {
    /// As wanted at its last write, the server's answer apart.
    claims: Statuses,
    failures: u32,
    /// Nothing is written before.
    next: Option<Instant>,
}

impl Reporter {
    pub fn new(api: ResourceClient, agent: Arc<Agent>) -> Self {
        Reporter { api, agent }
    }

    pub async fn run(self) {
        let (mut wanted, mut written) = (Statuses::new(), Written::default());
        let mut events = self.agent.advertised.events();
        loop {
            events.mark_unchanged();
            let agent = Arc::clone(&self.agent);
            let ask = move || {
                let catalogue = agent.inventory.catalogue();
                let gpus = catalogue.gpus.iter();
                let sick = gpus.filter_map(|(uuid, sold)| Some((uuid.clone(), sold.sick.clone()?)));
                of(&agent.claims(), &sick.collect())
            };
            if let Ok(mut now) = tokio::task::spawn_blocking(ask).await {
                keep_times(&wanted, &mut now, unix_ms());
                // A claim that is unprepared has no status to write: it goes with the allocation.
                written.claims.retain(|claim, _| now.contains_key(claim));
                wanted = now;
            }
            let pause = self.write(&wanted, &mut written).await;
            tokio::select! {
                changed = events.changed() => match changed {
                    Ok(()) => tokio::time::sleep(GATHER).await,
                    Err(_) => return,
                },
                () = sleep(pause) => {}
            }
        }
    }

    async fn write(&self, wanted: &Statuses, written: &mut Written) -> Option<Duration> {
        for (claim, devices) in wanted {
            if written.claims.get(claim) == Some(devices) {
                continue;
            }
            let left = written.next.and_then(|next| next.checked_duration_since(Instant::now()));
            if left.is_some_and(|left| !left.is_zero()) {
                return left;
            }
            let answer = self.api.set_device_status(claim, devices).await;
            if let Err(error) = &answer
                && written.failures == 0
                && error.failure != Failure::NotFound
            {
                let name = format!("{}/{}", claim.namespace, claim.name);
                warn!(claim = name, %error, "the claim's device status is not written; nothing depends on it");
            }
            if let Some(pause) = answer.err().and_then(|error| pause(&error, written.failures)) {
                written.failures = written.failures.saturating_add(1);
                written.next = Some(Instant::now() + pause);
                return Some(pause);
            }
            written.failures = 0;
            written.claims.insert(claim.clone(), devices.clone());
        }
        None
    }
}

/// How long to wait after one more failure; `None` where the same is not to be written again.
fn pause(error: &ApiError, failures: u32) -> Option<Duration> {
    match error.retry() {
        // A claim that is gone, or not allocated any more, needs none.
        _ if error.failure == Failure::NotFound => None,
        // The same will never be taken: the next change is tried again.
        Retry::Never => None,
        Retry::Later => Some(LATER),
        Retry::Soon | Retry::Reread => {
            Some(SHORTEST.saturating_mul(1 << failures.min(10)).min(LONGEST))
        }
    }
}

/// Conditions say since when they are as they are: those that are others than `before` changed at `unix_ms`.
fn keep_times(before: &Statuses, now: &mut Statuses, unix_ms: i64) {
    let at = Timestamp::from_second(unix_ms.div_euclid(1000)).unwrap_or(Timestamp::UNIX_EPOCH);
    for (claim, devices) in now {
        for device in devices {
            let mut others = before.get(claim).into_iter().flatten();
            let was = others.find(|was| {
                (&was.pool, &was.device, &was.share_id)
                    == (&device.pool, &device.device, &device.share_id)
            });
            for condition in device.conditions.iter_mut().flatten() {
                let mut others = was.iter().flat_map(|was| was.conditions.iter().flatten());
                let Some(was) = others.find(|was| was.type_ == condition.type_) else { continue };
                condition.last_transition_time = match was.status == condition.status {
                    true => was.last_transition_time.clone(),
                    false => Time(at),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tessera_agent::allocations::steer::{SetQuotaRequest, Target};
    use tessera_cluster::fixtures::Temper;
    use tessera_cluster::{Call, Kind, Verb};
    use tessera_model::audit::Actor;
    use tessera_model::steered::Override;

    use super::*;
    use crate::fixtures;
    use crate::fixtures::{claim, share};
    use crate::tests::support::{Node, until};

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

    /// What a status is written with.
    const PATCH: &str = "PATCH /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/";

    #[test]
    fn a_condition_keeps_its_time_while_its_status_is_the_same() {
        let records = |mib| {
            let devices: &[(&str, Option<&str>)] = &[("gpu-a", Some("s"))];
            [Arc::new(fixtures::record("chat", "gpu", devices, &[("GPU-a", mib, 100)]))]
        };
        let sick = |why: &str| BTreeMap::from([("GPU-a".to_owned(), why.to_owned())]);
        let well = BTreeMap::new();
        let mut wanted = of(&records(1024), &well);
        let condition = |wanted: &Statuses| {
            wanted.first_key_value().unwrap().1[0].conditions.as_ref().unwrap()[0].clone()
        };
        let begin = condition(&wanted).last_transition_time;
        for (mib, sick, status, at) in [
            (2048, &well, "True", begin.0.as_second()),
            (2048, &sick("XID 79"), "False", 30),
            (2048, &sick("XID 80"), "False", 30),
            (2048, &well, "True", 50),
        ] {
            let mut now = of(&records(mib), sick);
            keep_times(&wanted, &mut now, if status == "True" { 50_999 } else { 30_999 });
            let condition = condition(&now);
            assert_eq!(
                (condition.status.as_str(), condition.last_transition_time.0.as_second()),
                (status, at)
            );
            wanted = now;
        }
    }

    #[test]
    fn a_failure_is_waited_out_unless_nothing_would_come_of_it() {
        let call = Call::of(Verb::Patch, Kind::CLAIM_STATUS, "team", "a");
        let pause = |failure, n| pause(&call.failed(failure, ""), n);
        let away = [0, 1, 20].map(|n| pause(Failure::Unreachable, n).unwrap());
        assert_eq!(away, [SHORTEST, SHORTEST * 2, LONGEST]);
        assert_eq!(pause(Failure::Forbidden, 0), Some(LATER));
        assert_eq!(pause(Failure::NotFound, 0), None);
        assert_eq!(pause(Failure::Invalid(None), 0), None);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_shows_its_limits_and_follows_their_changes() {
        let (node, _plugin) = Node::served().await;
        let api = &node.cluster;
        let chat = claim("chat", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
        let gone = claim("gone", "u2", vec![share("gpu", "gpu-b", "t", "1Gi", "10")]);
        api.put(&[&chat, &gone]);
        let task = tokio::spawn(Reporter::new(api.client(), Arc::clone(&node.agent)).run());
        let memory = || api.device_status("chat")[0]["data"]["limits"]["memory"].clone();
        node.ask(&chat).await.unwrap();
        until("the first status", || memory() == "6144Mi").await;
        let calls = || api.server.count(PATCH);
        assert_eq!(calls(), 1);
        // Something else happened: nothing to write.
        node.agent.cordon(Some("GPU-b"), None, Actor::Plugin).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(calls(), 1);
        api.server.set_temper(Temper::Away);
        let target = Target { name: node.agent.claims()[0].id.to_string(), ..Target::default() };
        let memory_limit_bytes = Some(8 << 30);
        let request = SetQuotaRequest { target, memory_limit_bytes, ..SetQuotaRequest::default() };
        node.agent.set_quota(&request, Actor::Plugin).unwrap();
        until("the attempt", || calls() > 1).await;
        api.server.set_temper(Temper::Works);
        until("the changed status", || memory() == "8192Mi").await;
        // A claim that is gone is left alone.
        node.agent.uncordon(tessera_agent::Lift::Gpu("GPU-b"), None, Actor::Plugin).unwrap();
        task.abort();
        node.ask(&gone).await.unwrap();
        api.remove_claim("gone");
        let before = calls();
        let task = tokio::spawn(Reporter::new(api.client(), Arc::clone(&node.agent)).run());
        until("both attempts", || calls() == before + 2).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(calls(), before + 2);
        task.abort();
    }
}
