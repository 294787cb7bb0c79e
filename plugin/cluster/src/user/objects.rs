//! Pods and events as far as a person's question needs them. Small types of our own: those of `k8s_openapi` would bring
//! the whole of a pod's specification into the program.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Meta {
    pub name: String,
    pub namespace: String,
    /// Set while it is deleted.
    pub deletion_timestamp: Option<String>,
    pub owner_references: Vec<Owner>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// Such as `DaemonSet`.
    pub kind: String,
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pod {
    pub metadata: Meta,
    pub spec: PodSpec,
    pub status: PodStatus,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// Empty while it waits for one.
    pub node_name: String,
    pub containers: Vec<Container>,
    pub init_containers: Vec<Container>,
    pub resource_claims: Vec<PodClaim>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Container {
    pub resources: Resources,
    pub ports: Vec<Port>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    pub name: String,
    pub container_port: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Quantities by resource, as they are written. Of a device plugin's resource, requests are the same.
    pub limits: BTreeMap<String, String>,
}

/// A claim, as a pod names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodClaim {
    /// Within the pod.
    pub name: String,
    /// Absent where a template makes it.
    pub resource_claim_name: Option<String>,
    pub resource_claim_template_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: String,
    pub reason: String,
    pub message: String,
    /// `PodScheduled`, `Ready` and others.
    pub conditions: Vec<Condition>,
    /// Claims that were made of templates.
    pub resource_claim_statuses: Vec<PodClaim>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    pub message: String,
}

/// An event, which Kubernetes counts in one of two ways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Event {
    pub message: String,
    pub count: Option<u64>,
    pub last_timestamp: Option<String>,
    pub event_time: Option<String>,
    pub series: Option<Series>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Series {
    pub count: Option<u64>,
    pub last_observed_time: Option<String>,
}

impl Event {
    /// RFC 3339; empty where it is not said.
    pub fn last_at(&self) -> &str {
        let series = self.series.as_ref().and_then(|series| series.last_observed_time.as_deref());
        series.or(self.last_timestamp.as_deref()).or(self.event_time.as_deref()).unwrap_or_default()
    }
}
