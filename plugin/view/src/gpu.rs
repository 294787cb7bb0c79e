//! A GPU at one moment.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tessera_model::health::State as GpuState;

use crate::status::{Health, Replica};

both! {
    {
        /// As NVML prints it.
        uuid: String,
        /// NVML's index.
        index: u32,
        /// Product name.
        name: String,
        pci_bus_id: String,
        numa_node: Option<i64>,
        /// Why; empty for a GPU without trouble.
        state_reason: String,
        /// Since when; 0 for a GPU without trouble.
        state_since_unix_ms: i64,
        /// What it takes to be healthy; empty where it is.
        state_waits_for: String,
        /// The actor of the cordon and the reason; empty where there is no cordon.
        cordon: String,
        /// `device plugin` or `DRA`.
        front_end: String,
        /// The other front end still has something of it.
        moving: bool,
        memory_total_bytes: u64,
        /// In use as the driver says.
        memory_used_bytes: u64,
        /// Never sold.
        memory_reserve_bytes: u64,
        /// Sum of the tenants' limits.
        memory_limits_bytes: u64,
        /// Sum of what tenants have charged.
        memory_charged_bytes: u64,
        /// Used by processes of no tenant.
        memory_outside_bytes: u64,
        /// Charged for each context of pods that come now.
        context_overhead_bytes: u64,
        /// Sum of the tenants' shares.
        cores_millis: u32,
        /// What live shares leave of its memory, where claims sell it; 0 where the device plugin does.
        left_memory_bytes: u64,
        /// What they leave of its time as the scheduler counts it.
        left_cores_millis: u32,
        /// Why that is too little for any claim: `memory`, `GPU time` or `memory and GPU time`; empty where it is enough.
        no_room: String,
        /// Memory that a claim gets which states none.
        default_memory_bytes: u64,
        /// Time that a claim gets which states none.
        default_cores_millis: u32,
    }

    /// A GPU or MIG instance.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    Gpu {
        /// `healthy`, `suspect`, `unhealthy` or `recovering`.
        pub state: String,
        /// Why it is not given out, where that is neither its health's nor a cordon's: sold by another plugin.
        pub withheld: String,
        /// Its lease, where its time is divided.
        pub lease: Option<Lease>,
        /// What it is cut into, one entry for each resource.
        pub replicas: Vec<Replicas>,
        /// What still fits, the largest first: what is sold, or for claims what is left.
        pub fits: Vec<Fit>,
    }

    /// A GPU or MIG instance, as root's status has it.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    StatusGpu {
        /// Whether its own health, or another seller, keeps it from being handed out. A cordon, which does so too, stands
        /// for itself.
        pub health: Health,
        /// Why it is not handed out.
        pub health_reason: String,
        /// `healthy`, `suspect`, `unhealthy` or `recovering`.
        pub state: GpuState,
        /// It is cordoned with the whole node, and not by itself.
        pub cordoned_with_node: bool,
        /// The allocation that holds the lease; empty for none.
        pub lease_holder: String,
        /// Allocations that drain too late.
        pub lease_late: Vec<String>,
        pub lease_waiting: u32,
        pub lease_quantum_us: u64,
        /// Where the context's charge comes from: `configured`, `formula` or `default`.
        pub context_overhead_source: String,
        /// What it is cut into.
        pub replicas: Vec<Replica>,
    }
}

impl Gpu {
    /// What is wrong with it; `None` for a healthy one without a cordon.
    pub fn trouble(&self) -> Option<String> {
        let index = self.index;
        match (self.cordon.as_str(), self.state.as_str()) {
            ("", "" | "healthy") => None,
            ("", state) => {
                let waits = match self.state_waits_for.as_str() {
                    "" => String::new(),
                    text => format!("; it waits for {text}"),
                };
                Some(format!("GPU {index} is {state}: {}{waits}", self.state_reason))
            }
            (cordoned, _) => Some(format!("GPU {index} is {cordoned}")),
        }
    }

    /// Leaves out what is the operators': the actor and the reason of a cordon, and who else sells it.
    pub(crate) fn narrow(&mut self) {
        if !self.cordon.is_empty() {
            self.cordon = "cordoned".to_owned();
        }
        if !self.withheld.is_empty() {
            self.withheld = "those who run the node know why".to_owned();
        }
    }
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
