//! An allocation as `tessera status -o json` has it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Allocation {
    /// Its id.
    pub id: String,
    /// `allocated`, `started` or `parked`.
    pub state: String,
    /// Which Allocate of this id, from 1.
    pub generation: u64,
    /// The resource; empty for a claim.
    pub resource_name: String,
    /// The replicas.
    pub replica_ids: Vec<String>,
    /// The container that holds it; absent while unknown.
    pub holder: Option<Holder>,
    /// Further containers that hold it.
    pub other_holders: Vec<Holder>,
    /// When it was allocated.
    pub allocated_unix_ms: i64,
    /// When a container last started with it; 0 for never.
    pub started_unix_ms: i64,
    /// What it is of a resource claim; absent where no claim asked.
    pub claim: Option<Claim>,
    /// Quota and use for each of its GPUs.
    pub gpus: Vec<Use>,
    /// Processes that use CUDA now.
    pub processes: Vec<Process>,
    /// Requests refused because of the quota.
    pub refusals: u64,
    /// Requests within the quota that the driver refused.
    pub driver_refusals: u64,
    /// Kernel and graph launches.
    pub launches: u64,
    /// GPU time used.
    pub gpu_time_us: u64,
    /// Time waited at the gate.
    pub gate_wait_us: u64,
    /// Launches that waited at the gate.
    pub gate_waits: u64,
    /// Times that a process rationed itself.
    pub gate_timeouts: u64,
    /// Times that the window was full while the gate was open.
    pub window_waits: u64,
    /// Its part of GPU time; absent where nobody divides it.
    pub compute: Option<Compute>,
    /// Times that its usage page was found tampered with.
    pub tamperings: u64,
    /// Times that memory outside its account was found.
    pub unaccounted: u64,
    /// Its pages on the host.
    pub pages_dir: String,
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Holder {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
}

/// One request of a resource claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Claim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
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

/// Quota and use on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AllocationUse")]
#[serde(default)]
pub struct Use {
    /// The GPU.
    pub gpu_uuid: String,
    /// What it may hold.
    pub memory_limit_bytes: u64,
    /// Charged: granted, and reserved for calls under way.
    pub memory_charged_bytes: u64,
    /// Granted by the driver.
    pub memory_granted_bytes: u64,
    /// Highest sum that a process reached.
    pub memory_peak_bytes: u64,
    /// Charged for each context.
    pub context_overhead_bytes: u64,
    /// Held beyond what is charged, and taken from the limit.
    pub memory_overhead_bytes: u64,
    /// All memory of its processes as the driver says, where it does.
    pub memory_nvml_bytes: Option<u64>,
    /// Its share.
    pub cores_millis: u32,
    /// `burst`, `strict` or `none`.
    pub policy: String,
    /// Limits at Allocate, where they were changed since.
    pub allocated: Option<Quota>,
    /// Held beyond a limit that was forced below it.
    pub memory_owed_bytes: u64,
}

/// Limits on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Quota {
    /// What it may hold.
    pub memory_limit_bytes: u64,
    /// Its share.
    pub cores_millis: u32,
    /// `burst`, `strict` or `none`.
    pub policy: String,
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

/// What it got of GPU time, by the arbiter's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AllocationCompute")]
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
    /// Waited for leases.
    pub waited_us: u64,
    /// Waiting now, for so long.
    pub waiting_us: Option<u64>,
    /// Leases.
    pub leases: u64,
    /// Drains that passed the deadline.
    pub overlaps: u64,
    /// Processes at its gate.
    pub processes: u32,
    /// Processes that have yet to drain.
    pub undrained: u32,
}
