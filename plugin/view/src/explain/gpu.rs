//! A GPU as `tessera status -o json` has it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A GPU or MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "StatusGpu")]
#[serde(default)]
pub struct Gpu {
    /// As NVML prints it.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// NUMA node, where known.
    pub numa_node: Option<i64>,
    /// `healthy` or `unhealthy`: whether it may be handed out.
    pub health: String,
    /// Why it is not handed out.
    pub health_reason: String,
    /// `healthy`, `suspect`, `unhealthy` or `recovering`.
    pub state: String,
    /// Why; empty for a GPU without trouble.
    pub state_reason: String,
    /// Since when; 0 for a GPU without trouble.
    pub state_since_unix_ms: i64,
    /// What it takes to be healthy; empty where it is.
    pub state_waits_for: String,
    /// The cordon's originator and reason; empty where there is none.
    pub cordon: String,
    /// It is cordoned with the whole node, and not by itself.
    pub cordoned_with_node: bool,
    /// `device plugin` or `DRA`.
    pub front_end: String,
    /// The other front end still has something of it.
    pub moving: bool,
    /// The allocation that holds the lease; empty for none.
    pub lease_holder: String,
    /// Allocations that drain too late.
    pub lease_late: Vec<String>,
    /// How many allocations wait for the lease.
    pub lease_waiting: u32,
    /// How long a lease lasts now.
    pub lease_quantum_us: u64,
    /// Memory on the device.
    pub memory_total_bytes: u64,
    /// In use as the driver says.
    pub memory_used_bytes: u64,
    /// Never sold.
    pub memory_reserve_bytes: u64,
    /// Sum of the allocations' limits.
    pub memory_limits_bytes: u64,
    /// Sum of what allocations have charged.
    pub memory_charged_bytes: u64,
    /// Used by processes of no tenant.
    pub memory_outside_bytes: u64,
    /// Charged for each context of pods that come now.
    pub context_overhead_bytes: u64,
    /// Where that comes from: `configured`, `measured`, `formula` or `default`.
    pub context_overhead_source: String,
    /// Sum of the allocations' shares.
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
    /// What it is cut into.
    pub replicas: Vec<Replica>,
}

/// The unit that kubelet hands out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Replica {
    /// `<UUID>::<n>`.
    pub id: String,
    /// The resource.
    pub resource_name: String,
    /// n, counted for each resource and GPU.
    pub index: u32,
    /// `healthy` or `unhealthy`, as advertised to kubelet.
    pub health: String,
    /// Why it is unhealthy.
    pub health_reason: String,
    /// Its part of the memory.
    pub memory_limit_bytes: u64,
    /// Its share.
    pub cores_millis: u32,
    /// The allocation that holds it; empty for a free one.
    pub allocation_id: String,
}
