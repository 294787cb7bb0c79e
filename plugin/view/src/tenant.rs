//! A tenant at one moment: an allocation, and what its container does with it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use tessera_model::record::{Holder, State as AllocationState};
pub use tessera_model::sharing::Compute as ComputePolicy;

use crate::status::{Claim, Process};

both! {
    {
        id: String,
        /// Which Allocate of this id, from 1.
        generation: u64,
        /// The resource; empty for a claim.
        resource_name: String,
        allocated_unix_ms: i64,
        /// When a container last started with it; 0 for never.
        started_unix_ms: i64,
        /// Quota and use for each of its GPUs.
        gpus: Vec<Use>,
        /// Its part of GPU time; absent where nobody divides it.
        compute: Option<Compute>,
        /// Requests refused because of the quota.
        refusals: u64,
        /// Requests within the quota that the driver refused.
        driver_refusals: u64,
        launches: u64,
        gpu_time_us: u64,
        gate_wait_us: u64,
        /// Times that memory outside its account was found.
        unaccounted: u64,
    }

    /// A tenant.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    Tenant {
        /// `allocated`, `started` or `parked`.
        pub state: String,
        /// The pod's namespace; empty while kubelet has not named it.
        pub namespace: String,
        pub pod: String,
        pub container: String,
        /// Further containers that hold it, as `namespace/pod/container`.
        pub other_holders: Vec<String>,
        /// What the pod is one of; see [`crate::workload`].
        pub workload: String,
        /// The claim, as `namespace/name`; empty where no claim asked.
        pub claim: String,
        /// The claim's request; empty where no claim asked.
        pub request: String,
        /// Processes that use CUDA now.
        pub processes: u32,
    }

    /// A tenant, as root's status has it.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    Allocation {
        /// `allocated`, `started` or `parked`.
        pub state: AllocationState,
        pub replica_ids: Vec<String>,
        /// The container that holds it; absent while unknown.
        pub holder: Option<Holder>,
        /// Further containers that hold it.
        pub other_holders: Vec<Holder>,
        /// What it is of a resource claim; absent where no claim asked.
        pub claim: Option<Claim>,
        /// Processes that use CUDA now.
        pub processes: Vec<Process>,
        /// Launches that waited at the gate.
        pub gate_waits: u64,
        /// Times that a process rationed itself.
        pub gate_timeouts: u64,
        /// Times that the window was full while the gate was open.
        pub window_waits: u64,
        /// Times that its usage page was found tampered with.
        pub tamperings: u64,
        /// Its pages on the host.
        pub pages_dir: String,
    }
}

/// A tenant's quota and use on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Use {
    pub gpu_uuid: String,
    pub memory_limit_bytes: u64,
    /// Charged: granted, and reserved for calls under way.
    pub memory_charged_bytes: u64,
    /// Granted by the driver.
    pub memory_granted_bytes: u64,
    /// What counts against the limit: charged, and held beyond that.
    pub memory_used_bytes: u64,
    /// Highest sum that a process reached.
    pub memory_peak_bytes: u64,
    /// Held beyond what is charged, and taken from the limit.
    pub memory_overhead_bytes: u64,
    pub context_overhead_bytes: u64,
    /// All memory of its processes as the driver says, where it does.
    pub memory_nvml_bytes: Option<u64>,
    pub cores_millis: u32,
    /// `burst`, `strict` or `none`.
    pub policy: ComputePolicy,
    /// Its limits were changed while it runs.
    pub changed: bool,
    /// Limits at Allocate, where they were changed since.
    pub allocated: Option<Limits>,
    /// Held beyond a limit that was forced below it.
    pub memory_owed_bytes: u64,
}

/// Limits on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Quota")]
#[serde(default)]
pub struct Limits {
    pub memory_limit_bytes: u64,
    pub cores_millis: u32,
    /// `burst`, `strict` or `none`.
    pub policy: ComputePolicy,
}

impl From<&tessera_model::record::Grant> for Limits {
    fn from(grant: &tessera_model::record::Grant) -> Self {
        Limits {
            memory_limit_bytes: grant.memory_limit_bytes,
            cores_millis: grant.cores_millis,
            policy: grant.compute,
        }
    }
}

/// What a tenant got of GPU time, by the arbiter's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Compute {
    /// `solo`, `open`, `yield` or `closed`.
    pub gate: String,
    /// Leased in the last second.
    pub got_1s_millis: u32,
    /// Leased in the last ten.
    pub got_10s_millis: u32,
    /// In which its work ran, in the last ten seconds that were measured; none where nobody can tell.
    pub used_10s_millis: Option<u32>,
    /// Leased since the arbiter took it on.
    pub leased_us: u64,
    /// Of that, how long its work ran, as far as it was measured.
    pub used_us: u64,
    /// The leased time of which that is known.
    pub measured_us: u64,
    pub waited_us: u64,
    /// Waiting now, for so long.
    pub waiting_us: Option<u64>,
    pub leases: u64,
    /// Drains that passed the deadline.
    pub overlaps: u64,
    pub processes: u32,
    /// Processes that have yet to drain.
    pub undrained: u32,
}

impl Compute {
    /// What its gate says, for people: one that is closed to a pod that does not wait is `idle`.
    pub fn gate_text(&self) -> &str {
        match (self.gate.as_str(), self.waiting_us) {
            ("closed", None) => "idle",
            (gate, _) => gate,
        }
    }
}
