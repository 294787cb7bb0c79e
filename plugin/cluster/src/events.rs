//! Events on pods, core/v1: making one, and saying that it happened again.

use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Request;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tessera_model::printable;
use tessera_model::time_format::rfc3339;

use crate::client::{Client, body};
use crate::error::{ApiError, Call, Failure, Kind, Verb};

/// What reports.
const COMPONENT: &str = "tessera";

/// Longest message: core/v1 allows 1024 bytes (`pkg/apis/core/validation/events.go`, NoteLengthLimit).
pub const LONGEST_MESSAGE: usize = 1024;

/// Longest name of an object (RFC 1123 subdomain).
const LONGEST_NAME: usize = 253;

#[derive(Clone, Copy, Debug)]
pub struct PodEvent<'a> {
    pub namespace: &'a str,
    pub pod: &'a str,
    /// The pod's UID, without which `kubectl describe pod` does not show the event.
    pub uid: Option<&'a str>,
    /// The container's name; empty where it concerns the whole pod.
    pub container: &'a str,
    /// A word in CamelCase.
    pub reason: &'a str,
    /// At most 1024 bytes.
    pub message: &'a str,
    /// `Warning`, or else `Normal`.
    pub warning: bool,
    /// How often it happened.
    pub count: u64,
    /// When it first happened, Unix milliseconds.
    pub first_unix_ms: i64,
    /// When it last happened, Unix milliseconds.
    pub last_unix_ms: i64,
}

/// Makes events in the name of a node.
#[derive(Clone, Debug)]
pub struct EventClient {
    client: Client,
    node: String,
}

impl EventClient {
    pub fn new(client: Client, node: String) -> Self {
        EventClient { client, node }
    }

    /// Makes an event. Gives its name.
    pub async fn create(&self, event: &PodEvent<'_>) -> Result<String, ApiError> {
        let name = name(event);
        let call = Call::of(Verb::Create, Kind::EVENTS, event.namespace, &name);
        let body = body(&object(event, &name, &self.node));
        let request = events(event.namespace).create(&PostParams::default(), body);
        match self.client.ask(&call, request).await {
            // Ours: it was made, and the answer came too late.
            Err(error) if matches!(error.failure, Failure::Exists | Failure::Conflict) => Ok(name),
            answer => answer.map(|IgnoredAny| name),
        }
    }

    /// Says that the event of this name happened again.
    /// Errors: See [`ApiError`]; [`Failure::NotFound`] if Kubernetes has forgotten it.
    pub async fn update(&self, event: &PodEvent<'_>, name: &str) -> Result<(), ApiError> {
        let call = Call::of(Verb::Patch, Kind::EVENTS, event.namespace, name);
        let patch = Patch::Merge(json!({
            "count": count(event),
            "lastTimestamp": rfc3339(event.last_unix_ms),
            "message": message(event),
        }));
        let request = events(event.namespace).patch(name, &PatchParams::default(), &patch);
        self.client.ask(&call, request).await.map(|IgnoredAny| ())
    }

    /// Lets the connection go.
    pub async fn rest(&self) {
        self.client.rest().await;
    }
}

fn events(namespace: &str) -> Request {
    Request::new(format!("/api/v1/namespaces/{namespace}/events"))
}

/// As client-go names them: the pod's name and a number that no other event has. A pod may have the longest name that
/// an event may have: then its end is left out, and the reference has it in full.
fn name(event: &PodEvent<'_>) -> String {
    let mut hash = Sha256::new();
    for part in [event.container, event.reason, event.message] {
        hash.update(part);
    }
    let hash = hash.finalize();
    let number = format!(".{:x}{:02x}{:02x}", event.first_unix_ms, hash[0], hash[1]);
    let room = LONGEST_NAME.saturating_sub(number.len());
    let mut pod: String = event.pod.chars().take(room).collect();
    // Each part of a subdomain ends with a letter or a digit.
    pod.truncate(pod.trim_end_matches(['.', '-']).len());
    pod + &number
}

fn count(event: &PodEvent<'_>) -> i32 {
    i32::try_from(event.count).unwrap_or(i32::MAX)
}

/// With the container in front. The reference names none (`fieldPath`): that takes `spec.containers` or
/// `spec.initContainers`, and kubelet's list of pod resources has containers and sidecars without their kind. Only
/// the pod's object would say it, which the plugin may not read.
fn message(event: &PodEvent<'_>) -> String {
    if event.container.is_empty() {
        return event.message.to_owned();
    }
    let mut text = format!("container {}: {}", event.container, event.message);
    printable::cut(&mut text, LONGEST_MESSAGE);
    text
}

fn object(event: &PodEvent<'_>, name: &str, node: &str) -> Value {
    let PodEvent { namespace, pod, uid, reason, first_unix_ms, last_unix_ms, .. } = *event;
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": { "name": name, "namespace": namespace },
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod, "uid": uid,
        },
        "reason": reason,
        "message": message(event),
        "type": if event.warning { "Warning" } else { "Normal" },
        "count": count(event),
        "firstTimestamp": rfc3339(first_unix_ms),
        "lastTimestamp": rfc3339(last_unix_ms),
        "source": { "component": COMPONENT, "host": node },
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(pod: &'static str, message: &'static str) -> PodEvent<'static> {
        PodEvent {
            namespace: "team",
            pod,
            uid: None,
            container: "",
            reason: "GPUUnhealthy",
            message,
            warning: true,
            count: 1,
            first_unix_ms: 1_795_340_700_999,
            last_unix_ms: 1_795_340_700_999,
        }
    }

    #[test]
    fn every_pod_has_events_with_names_that_kubernetes_takes() {
        let is_alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        for length in 1..=LONGEST_NAME {
            for filler in ["a", "a-", "a.a--"] {
                let pod: String = filler.chars().cycle().take(length - 1).collect();
                let pod: &'static str = Box::leak(format!("{pod}z").into_boxed_str());
                let name = name(&event(pod, "m"));
                assert!(name.len() <= LONGEST_NAME, "{length}: {name}");
                for part in name.split('.') {
                    let ends = [part.bytes().next(), part.bytes().last()];
                    assert!(ends.iter().all(|b| b.is_some_and(is_alnum)), "{name}");
                }
            }
        }
        assert!(name(&event("chat", "m")).starts_with("chat.1a202a50d47"));
    }

    #[test]
    fn two_gpus_that_fail_at_once_have_events_of_their_own() {
        let of = |message| name(&event("chat", message));
        assert_ne!(of("GPU-1 is unhealthy"), of("GPU-2 is unhealthy"));
    }

    #[test]
    fn an_event_is_on_the_pod_and_says_when_in_seconds() {
        let event = PodEvent {
            uid: Some("u"),
            container: "main",
            reason: "GPUMemoryRefused",
            count: u64::MAX,
            last_unix_ms: 1_795_340_701_000,
            ..event("chat", "m")
        };
        let said = object(&event, "e", "n1");
        assert_eq!(
            (&said["message"], &said["count"]),
            (&json!("container main: m"), &json!(i32::MAX))
        );
        let times = [&said["firstTimestamp"], &said["lastTimestamp"]];
        assert_eq!(times, ["2026-11-22T09:45:00Z", "2026-11-22T09:45:01Z"]);
        let whole = PodEvent { container: "", ..event };
        assert_eq!(object(&whole, "e", "n1")["message"], "m");
        // The longest that may be, with the longest name of a container.
        let (container, text) = ("c".repeat(63), "ä".repeat(512));
        let long = message(&PodEvent { container: &container, message: &text, ..event });
        assert!(long.len() <= 1024 && long.len() > 1020 && long.ends_with("ä…"), "{long}");
    }
}
