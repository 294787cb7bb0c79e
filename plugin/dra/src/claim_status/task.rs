//! Writes the status of claims' devices after Prepare, and when limits or health change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_agent::Agent;
use tessera_cluster::error::{ApiError, Retry};
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::ResourceClient;
use tessera_model::clock::unix_ms;
use tracing::warn;

use super::Statuses;

/// How long changes are gathered: a claim's requests are prepared one after the other.
const GATHER: Duration = Duration::from_millis(100);
/// Pause after a failure that passes by itself; it doubles …
const SHORTEST: Duration = Duration::from_secs(1);
/// … up to this.
const LONGEST: Duration = Duration::from_secs(60);
/// Pause after a failure that a person must mend.
const LATER: Duration = Duration::from_secs(300);

/// See the module's text.
#[derive(Debug)]
pub struct Reporter {
    api: ResourceClient,
    agent: Arc<Agent>,
}

/// What was written, and how that goes.
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

    /// Writes until it is dropped.
    pub async fn run(self) {
        let (mut wanted, mut written) = (Statuses::new(), Written::default());
        let mut events = self.agent.advertised().events();
        loop {
            events.mark_unchanged();
            let agent = Arc::clone(&self.agent);
            let ask = move || {
                let catalogue = agent.inventory().catalogue();
                let gpus = catalogue.gpus.iter();
                let sick = gpus.filter_map(|(uuid, sold)| Some((uuid.clone(), sold.sick.clone()?)));
                super::of(&agent.claims(), &sick.collect())
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

    /// Writes what is due; how long to wait for the rest.
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
                && !matches!(error, ApiError::NotFound { .. })
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
        _ if matches!(error, ApiError::NotFound { .. }) => None,
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

async fn sleep(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tessera_agent::allocations::steer::{SetQuotaRequest, Target};
    use tessera_cluster::error::{Call, Kind, Verb};
    use tessera_cluster::fixtures::Temper;
    use tessera_model::audit::Actor;

    use super::*;
    use crate::fixtures::{claim, record, share};
    use crate::tests::support::{Node, named, until};

    /// What a status is written with.
    const PATCH: &str = "PATCH /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/";

    #[test]
    fn a_condition_keeps_its_time_while_its_status_is_the_same() {
        let records = |mib| {
            let devices: &[(&str, Option<&str>)] = &[("gpu-a", Some("s"))];
            [Arc::new(record("chat", "gpu", devices, &[("GPU-a", mib, 100)]))]
        };
        let sick = |why: &str| BTreeMap::from([("GPU-a".to_owned(), why.to_owned())]);
        let well = BTreeMap::new();
        let mut wanted = super::super::of(&records(1024), &well);
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
            let mut now = super::super::of(&records(mib), sick);
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
        let call = || Call::of(Verb::Patch, Kind::ClaimStatus, "team", "a");
        let away = ApiError::Unreachable { call: call(), reason: String::new() };
        assert_eq!([0, 1, 20].map(|n| pause(&away, n).unwrap()), [SHORTEST, SHORTEST * 2, LONGEST]);
        let forbidden = ApiError::Forbidden { call: call(), message: String::new() };
        assert_eq!(pause(&forbidden, 0), Some(LATER));
        let gone = ApiError::NotFound { call: call(), message: String::new() };
        let invalid = ApiError::Invalid { call: call(), field: None, message: String::new() };
        assert_eq!([gone, invalid].map(|error| pause(&error, 0)), [None, None]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_shows_its_limits_and_follows_their_changes() {
        let node = Node::new();
        let _plugin = node.plugin().await;
        let api = &node.cluster;
        let chat = claim("chat", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
        let gone = claim("gone", "u2", vec![share("gpu", "gpu-b", "t", "1Gi", "10")]);
        api.put(&[&chat, &gone]);
        let task = tokio::spawn(Reporter::new(api.client(), Arc::clone(&node.agent)).run());
        let memory = || api.device_status("chat")[0]["data"]["limits"]["memory"].clone();
        node.kubelet.call_prepare(&[named(&chat)]).await.unwrap();
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
        node.kubelet.call_prepare(&[named(&gone)]).await.unwrap();
        api.remove_claim("gone");
        let before = calls();
        let task = tokio::spawn(Reporter::new(api.client(), Arc::clone(&node.agent)).run());
        until("both attempts", || calls() == before + 2).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(calls(), before + 2);
        task.abort();
    }
}
