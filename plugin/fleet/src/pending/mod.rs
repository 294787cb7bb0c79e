//! Why a pod waits: the scheduler's own sentence, and beside it what only the plugins know, of each node: what is left of
//! what the pod asks, the largest that fits, and GPUs that are cordoned or sick ([`room`]). No rule of the scheduler is
//! applied here.

mod room;

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_cluster::ApiError;
use tessera_cluster::user::objects::{Container, Event, Pod};
use tessera_view::{API_VERSION, fleet};

use crate::answer::AskError;
use crate::fleet::Fleet;
use room::{Ask, classes, is_ours, resources, room};
pub use room::{NodeRoom, trouble};

/// Why a pod waits, or that it does not.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pending {
    /// [`API_VERSION`].
    pub api_version: String,
    /// `namespace/name`.
    pub pod: String,
    /// Where it is, in a sentence.
    pub state: String,
    /// It waits for a node, and asks for something of ours.
    pub waits: bool,
    /// What it asks of ours: resources with their number, claims.
    pub asks: Vec<String>,
    /// The message of its condition `PodScheduled`; empty without one.
    pub scheduler_says: String,
    /// The newest event `FailedScheduling`.
    pub event: Option<Said>,
    /// Nodes with the plugin; those with room first.
    pub nodes: Vec<NodeRoom>,
    /// What could not be read.
    pub unread: Vec<String>,
}

/// An event's message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Said {
    pub message: String,
    pub times: u64,
    /// RFC 3339; empty where it is not known.
    pub last: String,
}

impl From<Event> for Said {
    fn from(event: Event) -> Self {
        let last = event.last_at().to_owned();
        let series = event.series.and_then(|series| series.count);
        let times = series.or(event.count).unwrap_or(1).max(1);
        Said { message: event.message, times, last }
    }
}

/// Reads all that concerns a pod, with the user's own rights. `None` where there is no such pod.
pub async fn pending(
    fleet: &Fleet,
    namespace: &str,
    name: &str,
) -> Result<Option<Pending>, AskError> {
    let user = fleet.user();
    let Some(pod) = user.pod(namespace, name).await? else {
        return Ok(None);
    };
    let mut unread = Vec::new();
    let (gathered, events) = tokio::join!(fleet.gather(), user.unscheduled(namespace, name));
    let known = gathered.unwrap_or_else(|error| {
        unread.push(format!("the plugins: {error}"));
        fleet.known()
    });
    let event = events.unwrap_or_else(|error| {
        unread.push(format!("the scheduler's events: {}", words(&error)));
        None
    });
    let mut asks = asked(&pod, &known);
    for claim in &pod.spec.resource_claims {
        let made = pod.status.resource_claim_statuses.iter().find(|one| one.name == claim.name);
        let made = made.and_then(|status| status.resource_claim_name.clone());
        let Some(object_name) = claim.resource_claim_name.clone().or(made) else {
            let of = claim.resource_claim_template_name.as_deref().unwrap_or_default();
            asks.push(Ask::Claim(format!("claim \"{}\", not made of {of} yet", claim.name)));
            continue;
        };
        let object = match user.claim(namespace, &object_name).await {
            Ok(Some(object)) => object,
            Ok(None) => {
                asks.push(Ask::Claim(format!("claim {object_name}, which does not exist")));
                continue;
            }
            Err(error) => {
                unread.push(format!("the claim {object_name}: {}", words(&error)));
                asks.push(Ask::Claim(format!("claim {object_name}")));
                continue;
            }
        };
        for name in classes(&object) {
            // A class that cannot be read goes by its name.
            let class = user.device_class(name).await.unwrap_or_default();
            if is_ours(name, class.as_ref()) {
                asks.push(Ask::Claim(format!("claim {object_name}")));
                break;
            }
        }
    }
    Ok(Some(answer(&pod, &asks, &known, event.map(Said::from), unread)))
}

fn answer(
    pod: &Pod,
    asks: &[Ask],
    known: &fleet::Fleet,
    event: Option<Said>,
    unread: Vec<String>,
) -> Pending {
    let condition = pod.status.conditions.iter().find(|one| one.kind == "PodScheduled");
    let condition = condition.filter(|one| one.status != "True");
    let mut pending = Pending {
        api_version: API_VERSION.to_owned(),
        pod: format!("{}/{}", pod.metadata.namespace, pod.metadata.name),
        state: state(pod, asks.is_empty()),
        waits: pod.spec.node_name.is_empty()
            && !has_ended(pod)
            && pod.metadata.deletion_timestamp.is_none()
            && !asks.is_empty(),
        asks: asks.iter().map(Ask::words).collect(),
        unread,
        ..Pending::default()
    };
    if pending.waits {
        pending.scheduler_says = condition.map(|one| one.message.clone()).unwrap_or_default();
        pending.event = event;
        pending.nodes = known.nodes.iter().map(|entry| room(entry, asks)).collect();
        // Those with room, then those of which it is not known.
        pending.nodes.sort_by_key(|node| match node.has_room {
            Some(true) => 0,
            None => 1,
            Some(false) => 2,
        });
    }
    pending
}

/// What a pod asks of our resources: its containers together, or an init container that asks more.
fn asked(pod: &Pod, known: &fleet::Fleet) -> Vec<Ask> {
    let ours = resources(known);
    let of = |container: &Container| -> BTreeMap<String, u64> {
        let limits = container.resources.limits.iter();
        let ours = limits
            .filter(|(name, _)| name.starts_with(room::DOMAIN) || ours.contains(name.as_str()));
        ours.filter_map(|(name, count)| Some((name.clone(), count.parse().ok()?))).collect()
    };
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    for (name, count) in pod.spec.containers.iter().flat_map(of) {
        let sum = all.entry(name).or_default();
        *sum = sum.saturating_add(count);
    }
    for (name, count) in pod.spec.init_containers.iter().flat_map(of) {
        let most = all.entry(name).or_default();
        *most = (*most).max(count);
    }
    all.retain(|_, count| *count > 0);
    all.into_iter().map(|(name, count)| Ask::Resource(name, count)).collect()
}

fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

fn state(pod: &Pod, asks_nothing: bool) -> String {
    let status = &pod.status;
    let is_deleted = pod.metadata.deletion_timestamp.is_some();
    if has_ended(pod) {
        let why = [&status.reason, &status.message].into_iter().filter(|text| !text.is_empty());
        let why: String = why.map(|text| format!(", {text}")).collect();
        return format!("it has ended: {}{why}", status.phase);
    }
    match pod.spec.node_name.as_str() {
        "" if is_deleted => "it is being deleted: the scheduler does not place it".to_owned(),
        "" if asks_nothing => {
            "it waits for a node, and asks for no resource and no claim of Tessera".to_owned()
        }
        "" => "it waits for a node".to_owned(),
        node if is_deleted => format!(
            "it is being deleted, and has not ended on node {node} yet: see `kubectl describe pod`"
        ),
        node if status.phase == "Pending" => {
            format!(
                "it has node {node} and waits there for its containers: see `kubectl describe pod`"
            )
        }
        node => format!("it does not wait: it is {} on node {node}", status.phase),
    }
}

fn words(error: &ApiError) -> String {
    match error {
        ApiError::Forbidden { call, .. } => format!("you may not {call}"),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn of(spec: &Value, status: &Value) -> Pending {
        let pod = json!({ "metadata": { "name": "chat", "namespace": "team" }, "spec": spec, "status": status });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let known = fleet::Fleet::default();
        answer(&pod, &asked(&pod, &known), &known, None, Vec::new())
    }

    fn asking(count: &str) -> Value {
        json!({ "resources": { "limits": { "tessera.dev/gpu": count, "cpu": "250m" } } })
    }

    #[test]
    fn containers_ask_together_and_an_init_container_for_its_own_time() {
        let pending = json!({ "phase": "Pending" });
        let spec =
            json!({ "containers": [asking("1"), asking("2")], "initContainers": [asking("2")] });
        assert_eq!(of(&spec, &pending).asks, ["3 × tessera.dev/gpu"]);
        let spec =
            json!({ "containers": [asking("1")], "initContainers": [asking("4"), asking("2")] });
        assert_eq!(of(&spec, &pending).asks, ["4 × tessera.dev/gpu"]);
    }

    #[test]
    fn a_pod_that_does_not_wait_for_us_is_said_to_be_so() {
        let spec = |node: &str| json!({ "nodeName": node, "containers": [asking("1")] });
        for (spec, phase, says) in [
            (spec("a"), "Pending", "has node a"),
            (spec("a"), "Running", "does not wait: it is Running on node a"),
            (spec(""), "Failed", "has ended: Failed"),
            (json!({ "containers": [{}] }), "Pending", "no resource and no claim of Tessera"),
        ] {
            let pending = of(&spec, &json!({ "phase": phase }));
            assert!(!pending.waits && pending.state.contains(says), "{}", pending.state);
        }
    }
}
