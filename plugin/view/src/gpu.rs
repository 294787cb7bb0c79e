//! A GPU at one moment.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A GPU or MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Gpu {
    /// As NVML prints it.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product name.
    pub name: String,
    pub pci_bus_id: String,
    pub numa_node: Option<i64>,
    /// `healthy`, `suspect`, `unhealthy` or `recovering`.
    pub state: String,
    /// Why; empty for a GPU without trouble.
    pub state_reason: String,
    /// Since when; 0 for a GPU without trouble.
    pub state_since_unix_ms: i64,
    /// What it takes to be healthy; empty where it is.
    pub state_waits_for: String,
    /// The actor of the cordon and the reason; empty where there is no cordon.
    pub cordon: String,
    /// Why it is not given out, where that is neither its health's nor a cordon's: sold by another plugin.
    pub withheld: String,
    /// `device plugin` or `DRA`.
    pub front_end: String,
    /// The other front end still has something of it.
    pub moving: bool,
    pub memory_total_bytes: u64,
    /// In use as the driver says.
    pub memory_used_bytes: u64,
    /// Never sold.
    pub memory_reserve_bytes: u64,
    /// Sum of the tenants' limits.
    pub memory_limits_bytes: u64,
    /// Sum of what tenants have charged.
    pub memory_charged_bytes: u64,
    /// Used by processes of no tenant.
    pub memory_outside_bytes: u64,
    /// Charged for each context of pods that come now.
    pub context_overhead_bytes: u64,
    /// Sum of the tenants' shares.
    pub cores_millis: u32,
    /// What live shares leave of its memory, where claims sell it; 0 where the device plugin does.
    pub left_memory_bytes: u64,
    /// What they leave of its time as the scheduler counts it.
    pub left_cores_millis: u32,
    /// Why that is too little for any claim: `memory`, `GPU time` or `memory and GPU time`; empty where it is enough.
    pub no_room: String,
    /// Memory that a claim gets which states none.
    pub default_memory_bytes: u64,
    /// Time that a claim gets which states none.
    pub default_cores_millis: u32,
    /// Its lease, where its time is divided.
    pub lease: Option<Lease>,
    /// What it is cut into, one entry for each resource.
    pub replicas: Vec<Replicas>,
    /// What still fits, the largest first: what is sold, or for claims what is left.
    pub fits: Vec<Fit>,
}

/// The tenants that may use a GPU now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Lease {
    /// The tenant's id; empty for none, or one that the reader may not see.
    pub holder: String,
    pub waiting: u32,
    pub quantum_us: u64,
}

/// Replicas of one resource on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Replicas {
    pub resource_name: String,
    pub count: u32,
    pub held: u32,
    /// How many can be handed out now.
    pub free: u32,
    pub memory_limit_bytes: u64,
    pub cores_millis: u32,
}

/// Something that still fits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Fit {
    /// The resource; empty for a claim.
    pub resource_name: String,
    pub count: u32,
    pub memory_bytes: u64,
    pub cores_millis: u32,
}
