//! Pods, nodes and claims as far as a person's question needs them. Small types of our own: those of `k8s_openapi`
//! would bring the whole of a pod's specification into the program.

mod unknown;

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

/// Quantities by resource, as they are written.
pub type Quantities = BTreeMap<String, String>;

/// A list, or a part of one.
#[derive(Debug, Deserialize)]
#[serde(bound = "T: Deserialize<'de>")]
pub(super) struct List<T> {
    #[serde(default)]
    pub metadata: ListMeta,
    #[serde(default)]
    pub items: Option<Vec<T>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ListMeta {
    #[serde(rename = "continue")]
    pub next: Option<String>,
}

/// What every object has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Meta {
    pub name: String,
    /// Its namespace; empty where it lies in none.
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    /// Set while it is deleted.
    pub deletion_timestamp: Option<String>,
    /// What made it.
    pub owner_references: Vec<Owner>,
}

/// What made an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// Its kind, such as `DaemonSet`.
    pub kind: String,
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Names and labels.
    pub metadata: Meta,
    /// What is asked.
    pub spec: PodSpec,
    /// What became of it.
    pub status: PodStatus,
}

/// What a pod asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// The node; empty while it waits for one.
    pub node_name: String,
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Rules on nodes and other pods.
    pub affinity: Option<Affinity>,
    /// Taints that it tolerates.
    pub tolerations: Vec<Toleration>,
    pub containers: Vec<Container>,
    /// Those that run before.
    pub init_containers: Vec<Container>,
    /// What its sandbox takes.
    pub overhead: Quantities,
    /// Claims, as it names them.
    pub resource_claims: Vec<PodClaim>,
    /// Gates that keep the scheduler from it.
    pub scheduling_gates: Vec<Named>,
    /// Rules on where its like run.
    pub topology_spread_constraints: Vec<serde_json::Value>,
    /// Pod-level resources: Kubernetes 1.34.
    pub resources: Option<Resources>,
    /// Which scheduler is to place it.
    pub scheduler_name: String,
    /// The higher, the earlier it is placed.
    pub priority: i32,
    pub volumes: Vec<Volume>,
    /// It is in the node's network namespace.
    pub host_network: bool,
    /// `false` for a user namespace of its own.
    pub host_users: Option<bool>,
    /// Names of further fields that a filter of the scheduler may read.
    #[serde(flatten, deserialize_with = "unknown::of_spec")]
    pub unknown: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Volume {
    /// Within the pod.
    pub name: String,
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// Its kind, where that is another one that a filter of the scheduler may read.
    #[serde(flatten, deserialize_with = "unknown::of_volume")]
    pub kinds: BTreeSet<String>,
}

/// A claim of storage, as a volume names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VolumeClaim {
    /// In the pod's namespace.
    pub claim_name: String,
}

/// Something with a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Named {
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    pub name: String,
    /// What it asks.
    pub resources: Resources,
    /// `Always` for an init container that goes on.
    pub restart_policy: String,
    pub ports: Vec<Port>,
    /// What its end brings about.
    pub restart_policy_rules: Vec<RestartRule>,
    /// Names of further fields that a filter of the scheduler may read.
    #[serde(flatten, deserialize_with = "unknown::of_container")]
    pub unknown: BTreeSet<String>,
}

/// What the end of a container brings about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RestartRule {
    /// `Restart`, or `RestartAllContainers`.
    pub action: String,
}

/// A container's port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    pub name: String,
    pub container_port: u16,
    /// On the node; 0 for none.
    pub host_port: u32,
    /// The node's address; empty for all.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
    /// `TCP` where it is empty.
    pub protocol: String,
}

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// What the scheduler counts.
    pub requests: Quantities,
    /// The most.
    pub limits: Quantities,
}

/// A claim, as a pod names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodClaim {
    /// Within the pod.
    pub name: String,
    /// The claim's own name; absent where a template makes it.
    pub resource_claim_name: Option<String>,
    /// The template that makes it.
    pub resource_claim_template_name: Option<String>,
}

/// Rules on nodes and other pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Affinity {
    pub node_affinity: Option<NodeAffinity>,
    /// On pods that must be near.
    pub pod_affinity: Option<PodAffinity>,
    /// On pods that must not.
    pub pod_anti_affinity: Option<PodAffinity>,
    /// Names of further kinds.
    #[serde(flatten, deserialize_with = "unknown::of_affinity")]
    pub unknown: BTreeSet<String>,
}

/// Rules on other pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodAffinity {
    /// Those that must hold.
    pub required_during_scheduling_ignored_during_execution: Vec<PodTerm>,
    /// Names of further kinds of rules.
    #[serde(flatten, deserialize_with = "unknown::of_rules")]
    pub unknown: BTreeSet<String>,
}

/// Other pods, and how near they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodTerm {
    /// Which pods; absent for none.
    pub label_selector: Option<LabelSelector>,
    pub namespaces: Vec<String>,
    /// And of which others; without either, of the pod's own.
    pub namespace_selector: Option<LabelSelector>,
    /// The nodes' label whose values are compared.
    pub topology_key: String,
    /// Names of further conditions.
    #[serde(flatten, deserialize_with = "unknown::of_term")]
    pub unknown: BTreeSet<String>,
}

/// Labels that must all match; without any, everything does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with their values.
    pub match_labels: BTreeMap<String, String>,
    pub match_expressions: Vec<Requirement>,
}

/// Rules on nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeAffinity {
    /// Those that must hold.
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
    /// Names of further kinds of rules.
    #[serde(flatten, deserialize_with = "unknown::of_rules")]
    pub unknown: BTreeSet<String>,
}

/// Terms of which one must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeSelector {
    pub node_selector_terms: Vec<Term>,
}

/// Requirements that must all hold; one without any holds for no node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Term {
    /// On labels.
    pub match_expressions: Vec<Requirement>,
    /// On fields: `metadata.name` alone.
    pub match_fields: Vec<Requirement>,
}

/// A requirement on a label or field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Requirement {
    /// The label or field.
    pub key: String,
    /// `In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt` or `Lt`.
    pub operator: String,
    /// What it is compared with.
    pub values: Vec<String>,
}

/// A taint that is tolerated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// The taint's key; empty for every one.
    pub key: String,
    /// `Exists`, `Gt`, `Lt`, or else `Equal`.
    pub operator: String,
    /// The taint's value.
    pub value: String,
    /// The taint's effect; empty for every one.
    pub effect: String,
    /// Names of further conditions.
    #[serde(flatten, deserialize_with = "unknown::of_toleration")]
    pub unknown: BTreeSet<String>,
}

/// What became of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: String,
    /// A word on why.
    pub reason: String,
    /// A sentence on why.
    pub message: String,
    /// `PodScheduled`, `Ready` and others.
    pub conditions: Vec<Condition>,
    /// Names of claims that were made of templates.
    pub resource_claim_statuses: Vec<ClaimStatus>,
    /// The node for which the scheduler keeps room for it, while pods there end.
    pub nominated_node_name: String,
    /// Its containers, once they run.
    pub container_statuses: Vec<ContainerStatus>,
    /// Those that run before.
    pub init_container_statuses: Vec<ContainerStatus>,
    /// What kubelet grants the pod as a whole.
    pub allocated_resources: Quantities,
    /// What the pod as a whole has.
    pub resources: Option<Resources>,
    /// What its claims take of the node's CPU and memory: Kubernetes 1.36.
    pub node_allocatable_resource_claim_statuses: Vec<serde_json::Value>,
}

/// What a container that runs has: another amount than it asks, while it is resized.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ContainerStatus {
    pub name: String,
    /// What kubelet grants it.
    pub allocated_resources: Quantities,
    /// What it has.
    pub resources: Option<Resources>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Which.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// A word on why.
    pub reason: String,
    /// A sentence on why.
    pub message: String,
}

/// The name of a claim that was made of a template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimStatus {
    /// Within the pod.
    pub name: String,
    /// The claim; absent while there is none.
    pub resource_claim_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Name and labels.
    pub metadata: Meta,
    /// What is asked of it.
    pub spec: NodeSpec,
    /// What it is.
    pub status: NodeStatus,
}

/// What is asked of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// Cordoned.
    pub unschedulable: bool,
    pub taints: Vec<Taint>,
}

/// What keeps pods away from a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Taint {
    pub key: String,
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// What a node is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// What pods may ask in all.
    pub allocatable: Quantities,
    /// `Ready` and others.
    pub conditions: Vec<Condition>,
}
