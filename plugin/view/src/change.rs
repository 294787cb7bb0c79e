//! What root asks of a node over its socket, and the answers: requests are POSTs of these types.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::status::{ComputePolicy, Configuration, Holder};
use crate::tenant::Limits;

/// A request, with its path and its answer.
pub trait Call: Serialize + DeserializeOwned + Send + 'static {
    /// Where it is posted.
    const PATH: &str;
    /// What comes back.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

macro_rules! calls {
    ($($request:ty => $path:literal, $answer:ty;)*) => {
        $(impl Call for $request {
            const PATH: &str = $path;
            type Answer = $answer;
        })*
    };
}

calls! {
    SetQuotaRequest => "/api/v1/quota/set", QuotaResponse;
    ResetQuotaRequest => "/api/v1/quota/reset", QuotaResponse;
    CordonRequest => "/api/v1/cordon", CordonResponse;
    UncordonRequest => "/api/v1/uncordon", CordonResponse;
    PlanRequest => "/api/v1/plan", PlanResponse;
    ReloadRequest => "/api/v1/reload", ReloadResponse;
}

/// Which allocation is meant. It must be one and live; what several match is refused with their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Target {
    /// The allocation's id, or a pod as `name` or `namespace/name`.
    pub name: String,
    /// Only pods of this namespace; empty for any.
    pub namespace: String,
    /// Only this container of the pod; empty for any.
    pub container: String,
}

/// A change of limits. What is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SetQuotaRequest {
    pub target: Target,
    /// Bytes that all its processes may hold, on each of its GPUs.
    pub memory_limit_bytes: Option<u64>,
    /// Share of GPU time, thousandths of the GPU, 1 to 1000.
    pub cores_millis: Option<u32>,
    /// What that share means: `burst`, `strict` or `none`.
    pub policy: Option<ComputePolicy>,
    /// Change the memory of this GPU alone, by UUID or index; empty for all that it has.
    pub gpu: String,
    /// Shrink below what is in use: nothing is taken back, everything new is refused until it fits.
    pub force: bool,
    pub dry_run: bool,
    pub reason: String,
}

/// Back to the limits at Allocate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResetQuotaRequest {
    pub target: Target,
    /// As in [`SetQuotaRequest`].
    pub force: bool,
    pub dry_run: bool,
    pub reason: String,
}

/// What became, or with `dry_run` would become, of an allocation's limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct QuotaResponse {
    pub api_version: String,
    pub allocation_id: String,
    /// Its holder; absent while unknown.
    pub holder: Option<Holder>,
    pub gpus: Vec<QuotaChange>,
    /// False where it has these limits already.
    pub changed: bool,
    /// It was judged, and nothing changed.
    pub dry_run: bool,
    /// What follows from it, a sentence each.
    pub notes: Vec<String>,
}

/// A change on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct QuotaChange {
    pub gpu_uuid: String,
    pub before: Limits,
    pub after: Limits,
    /// Bytes charged and observed; absent where the pages cannot be read.
    pub memory_in_use_bytes: Option<u64>,
}

/// GPUs to cordon: nothing more of them is given out, and what runs there goes on. Lasts until they are uncordoned, also
/// over restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CordonRequest {
    /// UUID, index, product name (`*` for anything), or a MIG instance's parent. Ignored with `all`.
    pub gpu: String,
    /// The whole node, with GPUs that are yet to be found.
    pub all: bool,
    /// The reason, for the audit trail and for users that find no GPU.
    pub reason: String,
}

/// GPUs to give out again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UncordonRequest {
    /// As in [`CordonRequest`].
    pub gpu: String,
    /// The node's own cordon alone; GPUs that were cordoned by themselves remain so.
    pub all: bool,
    /// With `all`: lift also the cordon of each GPU.
    pub each: bool,
    pub reason: String,
}

/// What is cordoned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CordonResponse {
    pub api_version: String,
    /// GPUs, by UUID, that the request was about; "*" for the whole node.
    pub changed: Vec<String>,
    /// All that is cordoned now; "*" for the whole node.
    pub cordoned: Vec<String>,
    /// Allocations that go on on the GPUs that the request was about.
    pub running: u32,
    /// All cordons that stand now, with their originators.
    pub standing: Vec<StandingCordon>,
}

/// A cordon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StandingCordon {
    /// The GPU's UUID; "*" for the whole node.
    pub gpu_uuid: String,
    /// NVML's index; absent for the node, and for a GPU that is gone.
    pub gpu_index: Option<u32>,
    pub since_unix_ms: i64,
    /// The originator: `root`, `uid 1000 (logged in as alice)`.
    pub by: String,
    /// Why; empty where nobody said.
    pub reason: String,
}

/// A configuration to think through.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PlanRequest {
    pub text: String,
    /// What to call it in errors.
    pub file: String,
}

/// What a configuration would change, for the node and for each running allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PlanResponse {
    pub api_version: String,
    /// The file, as the request called it.
    pub file: String,
    /// Why it would be refused; then nothing else is said.
    pub problems: Vec<ConfigurationProblem>,
    /// Keys whose values differ from those in force.
    pub changes: Vec<ConfigurationChange>,
    /// What GPUs are cut into that would be different.
    pub shares: Vec<ShareChange>,
    /// What happens to each running allocation.
    pub allocations: Vec<AllocationChange>,
    /// What is odd about the configuration, and what could not be known, a sentence each.
    pub notes: Vec<String>,
}

/// One thing wrong with a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ConfigurationProblem {
    /// Dotted key; empty for a syntax error.
    pub key: String,
    /// Line from 1; 0 where there is none.
    pub line: u32,
    /// What is wrong and what to do.
    pub message: String,
}

/// A key with another value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ConfigurationChange {
    /// Dotted key, as in the file.
    pub key: String,
    /// Its value before, as TOML; absent where there is no such entry.
    pub before: Option<String>,
    /// And after.
    pub after: Option<String>,
    /// "at once", "for new pods" or "after a restart".
    pub takes_effect: String,
    /// The file does not have the key, and its default applies. Said by a plan.
    pub absent: bool,
}

/// What one GPU would be sold as under one name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShareChange {
    pub gpu_uuid: String,
    /// NVML's index, where it is known.
    pub gpu_index: Option<u32>,
    pub resource_name: String,
    /// What it is sold as now; absent where it is not.
    pub before: Option<ShareView>,
    /// What it would be sold as.
    pub after: Option<ShareView>,
    /// Replicas not yet advertised to kubelet.
    pub appear: u32,
    /// Replicas that the configuration no longer sells. Those that are held are listed Unhealthy until their pods end,
    /// the others are gone.
    pub retire: u32,
    /// Of those, how many are held.
    pub retire_held: u32,
    /// Replicas of the new configuration that would be Unhealthy, because there is no room beside what runs.
    pub no_room: u32,
}

/// Replicas of one resource on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShareView {
    pub replicas: u32,
    pub memory_bytes: u64,
    /// Compute of one, thousandths of the GPU.
    pub cores_millis: u32,
    pub policy: ComputePolicy,
}

/// What a configuration would mean for a running allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AllocationChange {
    pub id: String,
    /// Its holder, if known.
    pub holder: Option<Holder>,
    /// The resource; empty where it is not known.
    pub resource_name: String,
    /// Sentences: what stays, what changes at once, what becomes of its replicas.
    pub effects: Vec<String>,
}

/// The plugin reads its configuration's file again, as after SIGHUP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReloadRequest {}

/// What came of reading the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReloadResponse {
    pub api_version: String,
    pub file: String,
    /// Why it was refused, and the configuration before stays in force; empty if it was not.
    pub problems: Vec<ConfigurationProblem>,
    /// What is different now; nothing, where the file says what was in force already.
    pub changes: Vec<ConfigurationChange>,
    /// What will be different after a restart of the plugin.
    pub waiting: Vec<ConfigurationChange>,
    /// How it stands now.
    pub configuration: Configuration,
}
