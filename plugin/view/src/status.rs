//! A node as root sees it: what `tessera status -o json` and `/api/v1/status` say.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use tessera_model::origin::{ClaimResult, ClaimShare};

pub use tessera_model::health::State as GpuState;
pub use tessera_model::record::{Holder, State as AllocationState};

use crate::gpu::Replicas;
pub use crate::gpu::StatusGpu as Gpu;
pub use crate::tenant::Allocation;
pub use crate::tenant::ComputePolicy;
use crate::warning::Warning;

/// Where root asks for [`Status`].
pub const STATUS: &str = "/api/v1/status";
/// Where root asks whether the plugin answers at all.
pub const LIVE: &str = "/api/v1/live";

/// The node's state at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Status {
    pub api_version: String,
    /// The plugin itself.
    pub plugin: Plugin,
    /// GPUs, in NVML's order.
    pub gpus: Vec<Gpu>,
    /// Allocations that hold replicas, and parked ones that still have something locked.
    pub allocations: Vec<Allocation>,
    /// What needs somebody's attention, a sentence each. Empty when all is well.
    pub warnings: Vec<String>,
    /// The same warnings in the same order, with their ages.
    pub warning_details: Vec<Warning>,
    /// Pods whose claim or container was refused lately, the newest last. The warnings name them, too.
    pub refusals: Vec<Refusal>,
    pub at_unix_ms: i64,
}

impl Status {
    /// Takes what needs attention, as of [`Status::at_unix_ms`].
    pub fn set_warnings(&mut self, warnings: Vec<Warning>) {
        self.warnings = warnings.iter().map(|warning| warning.aged(self.at_unix_ms)).collect();
        self.warning_details = warnings;
    }
}

/// The plugin process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "StatusPlugin")]
#[serde(default)]
pub struct Plugin {
    pub version: String,
    pub pid: u32,
    pub started_unix_ms: i64,
    /// The resources it sells, separated by ", ".
    pub resource_name: String,
    /// The DRA driver; absent where there is none.
    pub dra: Option<Dra>,
    /// How it stands with kubelet: as the resource that is farthest from live.
    pub registration: Registration,
    /// When kubelet last accepted a Register; 0 for never.
    pub registered_unix_ms: i64,
    /// Registrations that kubelet accepted since the start.
    pub registrations: u64,
    /// The last failures to register, empty after successes.
    pub registration_error: String,
    /// Host pids of tenants' processes are known. False without hostPID: then there is no audit.
    pub sees_host_pids: bool,
    /// The configuration file in force; empty for the built-in defaults.
    pub config_path: String,
    /// The shim that new containers get.
    pub shim_path: String,
    /// How it is found out what other device plugins sell: "GetAllocatableResources" or "what pods hold". Empty before
    /// the first look, and where nobody looks (`gpus.sold_by_others`).
    pub others_seen_by: String,
    /// Each resource by itself, by name.
    pub resources: Vec<Resource>,
    /// How it stands with the configuration's file.
    pub configuration: Option<Configuration>,
}

/// How the DRA driver stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dra {
    pub driver: String,
    /// Kubelet has registered it.
    pub registered: bool,
    /// Why kubelet has not registered it; empty where it has.
    pub registration_error: String,
    /// The pool, which is the node's name; empty while that is not known.
    pub pool: String,
    /// What the API server has: `starting`, `writing`, `published` or `failing`.
    pub publication: String,
    pub devices: u32,
    /// ResourceSlices that they take.
    pub slices: u32,
    /// The pool's generation.
    pub generation: i64,
    /// Writes of slices since the start.
    pub writes: u64,
    /// Times that another removed slices.
    pub wipes: u64,
    /// Claims that are prepared.
    pub claims: u32,
}

/// An extended resource, served on a socket of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Resource {
    pub name: String,
    /// The configuration does not sell it any more; it is served while containers hold it.
    pub retired: bool,
    /// How it stands with kubelet.
    pub registration: Registration,
    /// When kubelet last accepted a Register; 0 for never.
    pub registered_unix_ms: i64,
    /// Registrations that kubelet accepted since the start.
    pub registrations: u64,
    /// The last failure to register, empty after a success.
    pub registration_error: String,
    /// Replicas as advertised.
    pub replicas: u32,
    /// Those of them that are Healthy.
    pub healthy: u32,
}

/// How it stands with the configuration's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Configuration {
    /// The text in force: the first 16 hexadecimal digits of its SHA-256.
    pub hash: String,
    /// When the file was last read because there was news of it.
    pub attempted_unix_ms: i64,
    /// When a file last took effect; the start counts.
    pub succeeded_unix_ms: i64,
    /// What is wrong with the file as it is, a line each. Empty if the file is in force.
    pub errors: Vec<String>,
    /// Keys whose values in the file wait for a restart of the plugin.
    pub waiting_keys: Vec<String>,
    /// How often a file took effect since the start.
    pub applied: u64,
    /// How often one was refused.
    pub refused: u64,
}

/// How the plugin stands with kubelet.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Registration {
    /// Not registered: no kubelet, or it refused.
    #[default]
    Waiting,
    /// Kubelet accepted, but has not opened ListAndWatch.
    Accepted,
    /// Kubelet reads ListAndWatch: the node offers the resource.
    Live,
}

impl Registration {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Registration::Waiting => "not registered",
            Registration::Accepted => "registered, kubelet does not watch yet",
            Registration::Live => "registered, kubelet watches",
        }
    }
}

/// Whether something may be handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// Yes.
    #[default]
    Healthy,
    /// No; the reason stands beside it.
    Unhealthy,
}

impl Health {
    /// Of something that may be handed out, or not.
    pub fn of(is_healthy: bool) -> Self {
        if is_healthy { Health::Healthy } else { Health::Unhealthy }
    }
}

/// Pods that were refused what they were allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Refusal {
    /// What tells it from others: the claim's UID, the allocation's id.
    #[serde(skip)]
    pub subject: String,
    /// The pods' namespace.
    pub namespace: String,
    /// The pods, as far as they are known.
    pub pods: Vec<String>,
    /// Their claim's name; empty where no claim asked.
    pub claim: String,
    /// The reason, in the words that kubelet got.
    pub reason: String,
    pub since_unix_ms: i64,
    pub last_unix_ms: i64,
    pub times: u64,
}

impl Refusal {
    /// Who, in words.
    pub fn who(&self) -> String {
        let pods = self.pods.iter().map(|pod| format!("{}/{pod}", self.namespace));
        match self.pods.as_slice() {
            [] => format!("a pod of {}", self.namespace),
            _ => pods.collect::<Vec<_>>().join(", "),
        }
    }
}

impl Gpu {
    /// Its replicas by resource, in the order of the configuration.
    pub fn by_resource(&self) -> Vec<Replicas> {
        let mut all: Vec<Replicas> = Vec::new();
        for replica in &self.replicas {
            let at = all.iter().position(|one| one.resource_name == replica.resource_name);
            let at = at.unwrap_or_else(|| {
                let resource_name = replica.resource_name.clone();
                all.push(Replicas { resource_name, ..Replicas::default() });
                all.len() - 1
            });
            let of = &mut all[at];
            of.count += 1;
            of.held += u32::from(!replica.allocation_id.is_empty());
            of.free += u32::from(replica.is_free());
            // One that is retired has no size any more.
            of.memory_limit_bytes = of.memory_limit_bytes.max(replica.memory_limit_bytes);
            of.cores_millis = of.cores_millis.max(replica.cores_millis);
        }
        all
    }
}

/// The unit that kubelet hands out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Replica {
    /// `<UUID>::<n>`.
    pub id: String,
    pub resource_name: String,
    /// n, counted for each resource and GPU.
    pub index: u32,
    /// As advertised to kubelet.
    pub health: Health,
    /// Why it is unhealthy.
    pub health_reason: String,
    /// Its part of the memory.
    pub memory_limit_bytes: u64,
    pub cores_millis: u32,
    /// The allocation that holds it; empty for a free one.
    pub allocation_id: String,
}

impl Replica {
    /// Whether it can be handed out now.
    pub fn is_free(&self) -> bool {
        self.allocation_id.is_empty() && self.health == Health::Healthy
    }
}

impl Allocation {
    /// Whose it is: a claim is of a namespace, whether kubelet has named its pod or not. Empty for nobody's.
    pub fn namespace(&self) -> &str {
        let holder = self.holder.as_ref().map(|holder| holder.namespace.as_str());
        let claim = || self.claim.as_ref().map(|claim| claim.namespace.as_str());
        holder.filter(|name| !name.is_empty()).or_else(claim).unwrap_or_default()
    }
}

/// One request of a resource claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The request, with the alternative that was chosen.
    pub request: String,
    /// The pool of the devices.
    pub pool: String,
    /// The devices' names, one for each result.
    pub devices: Vec<String>,
    /// The shares' ids, one for each result.
    pub share_ids: Vec<String>,
}

/// A process that uses CUDA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Process {
    /// Its pid on the host; 0 where unknown.
    pub host_pid: u32,
    /// Its pid in the container.
    pub container_pid: u32,
    /// Its slot in the usage page.
    pub slot: u32,
    /// What it has charged on all GPUs.
    pub memory_charged_bytes: u64,
}

impl From<&ClaimShare> for Claim {
    fn from(share: &ClaimShare) -> Self {
        let id = |result: &ClaimResult| result.share_id.clone();
        Claim {
            namespace: share.namespace.clone(),
            name: share.name.clone(),
            uid: share.uid.clone(),
            request: share.request.clone(),
            pool: share.pool.clone(),
            devices: share.results.iter().map(|result| result.device.clone()).collect(),
            share_ids: share.results.iter().map(|one| id(one).unwrap_or_default()).collect(),
        }
    }
}
