//! The durable record of an allocation: its limits, its life and its holder.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::allocation_id::AllocationId;
use crate::origin::Origin;
use crate::sharing::Compute;
use crate::steered::Override;
use strum::IntoStaticStr;

/// Limits on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_limit_bytes: u64,
    /// Bytes charged for each context before anything was observed.
    pub context_overhead_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
    /// What that share means.
    pub compute: Compute,
}

/// Where an allocation is in its life. A released one is in the history only.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, IntoStaticStr,
)]
#[schemars(rename = "AllocationState")]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum State {
    /// Allocated; no container has started with it.
    #[default]
    Allocated,
    /// A container has started.
    Started,
    /// Its replicas went to a newer allocation: no longer counted, kept until nothing uses its pages.
    Parked,
}

/// The container that holds an allocation, as PodResources says.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(default)]
pub struct Holder {
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Holder {
    /// Whether it is a container of this pod, in this namespace if one is named.
    pub fn is_of(&self, namespace: Option<&str>, pod: &str) -> bool {
        self.pod == pod && namespace.is_none_or(|name| name == self.namespace)
    }
}

impl fmt::Display for Holder {
    /// As a person would call it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.pod, self.container)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: AllocationId,
    /// The resource its replicas belong to. Empty for an allocation adopted from its pages until
    /// kubelet names it.
    pub resource: String,
    /// Grows with every Allocate on this node.
    pub generation: u64,
    /// Replica ids, sorted. Empty for an allocation adopted from its pages until kubelet names them.
    pub replicas: Vec<String>,
    /// Limits per GPU, in the order of the pages.
    pub grants: Vec<Grant>,
    /// Where it is in its life.
    pub state: State,
    /// When Allocate was answered, Unix milliseconds.
    pub allocated_unix_ms: i64,
    /// When a container last started, Unix milliseconds; 0 for never.
    pub started_unix_ms: i64,
    /// The holder, once known.
    pub holder: Option<Holder>,
    /// Further containers that hold it, sorted: those that share a claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Holder>,
    /// The holder of the generation before: kubelets before 1.34 may go on listing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predecessor: Option<Holder>,
    /// Name of the shim that its containers mount; `None` where the record was lost in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shim: Option<String>,
    /// Its containers were given the name of a CDI device, whose spec must be there when they start
    /// again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cdi: bool,
    /// Why it lies where it does; none for what earlier versions allocated, or was adopted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<crate::placement_reason::PlacementReason>,
    /// Its limits were changed while it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Box<Override>>,
    /// The front end that made it.
    #[serde(default, skip_serializing_if = "Origin::is_device_plugin")]
    pub origin: Origin,
}

impl Record {
    /// One that has just begun: no replicas yet, nobody holds it, no container has started.
    pub fn new(id: AllocationId, generation: u64, grants: Vec<Grant>) -> Self {
        Record {
            id,
            resource: String::new(),
            generation,
            replicas: Vec::new(),
            grants,
            state: State::Allocated,
            allocated_unix_ms: 0,
            started_unix_ms: 0,
            holder: None,
            others: Vec::new(),
            predecessor: None,
            shim: None,
            cdi: false,
            overridden: None,
            placed: None,
            origin: Origin::DevicePlugin,
        }
    }

    /// Its holder's name, or else its own.
    pub fn name(&self) -> String {
        match (&self.holder, self.origin.claim()) {
            (Some(holder), _) => holder.to_string(),
            (None, Some(claim)) => claim.to_string(),
            (None, None) => format!("allocation {}", self.id),
        }
    }

    /// All containers that hold it, as far as they are known.
    pub fn holders(&self) -> impl Iterator<Item = &Holder> {
        self.holder.iter().chain(&self.others)
    }

    /// Whether its limits count towards capacity.
    pub fn is_live(&self) -> bool {
        self.state != State::Parked
    }

    /// Whether it holds one of these replicas of a resource.
    pub fn overlaps(&self, resource: &str, replicas: &[String]) -> bool {
        self.resource == resource && self.replicas.iter().any(|replica| replicas.contains(replica))
    }
}
