//! Why a pod, an allocation or a GPU is as it is: what `tessera explain -o json` and `/api/v1/explain` have, and the
//! same as text. What belongs to others stands in fields of its own, so that [`crate::narrow`] can take it out; text is
//! made of what is left.

mod text;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tessera_model::time_format;

use crate::gpu::{Gpu, StatusGpu};
use crate::narrow::Rights;
use crate::status::{Allocation, ComputePolicy, Holder, Refusal};

/// An explanation by one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Explanation {
    pub api_version: String,
    /// Allocations: those that live first, then those that are gone, the newest first.
    pub allocations: Vec<Story>,
    /// GPUs. Empty for a reader without rights on the whole cluster.
    pub gpus: Vec<GpuStory>,
    pub at_unix_ms: i64,
    /// The oldest line of the audit trail; 0 where it is empty.
    pub trail_since_unix_ms: i64,
    /// Allocations that are meant too, and were left out.
    pub left_out: u32,
    pub remarks: Vec<String>,
    /// What the pod was refused lately.
    pub refusals: Vec<Refusal>,
}

/// One generation of an allocation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Story {
    pub id: String,
    /// Which Allocate of this id, from 1.
    pub generation: u64,
    /// The resource; empty where that is not known any more, and for a claim.
    pub resource_name: String,
    /// The replicas; empty where they are not known any more.
    pub replica_ids: Vec<String>,
    /// The container that holds or held it; absent where kubelet did not say.
    pub holder: Option<Holder>,
    /// As `status -o json` has it; absent for one that is gone.
    pub now: Option<Allocation>,
    /// When it was allocated; 0 where that is not known any more.
    pub allocated_unix_ms: i64,
    /// When a container last started with it; 0 for never, or not known any more.
    pub started_unix_ms: i64,
    /// When it was released; 0 for one that is not.
    pub released_unix_ms: i64,
    /// Why it lies where it does.
    pub placement: Option<Placement>,
    /// What it is held to, for each GPU.
    pub limits: Vec<Limit>,
    /// Others that had its GPUs in the last ten seconds, those that had most first.
    pub neighbours: Vec<Neighbour>,
    /// How it is held to it; absent for one that is gone.
    pub enforcement: Option<Enforcement>,
    /// What was refused, delayed or wrong, summed up.
    pub incidents: Vec<Incident>,
    /// Its lines of the audit trail, oldest first.
    pub trail: Vec<TrailLine>,
}

/// Why an allocation lies where it does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Placement {
    /// Replicas that were preferred; empty where kubelet did not ask.
    pub preferred_replica_ids: Vec<String>,
    /// Kubelet took just those.
    pub as_preferred: bool,
    /// Why, in words; empty where it was not recorded.
    pub reason: String,
    /// Its GPUs as they stand now, as `/api/v1/fleet` has them. Of one that is gone there is the UUID.
    pub stands: Vec<Gpu>,
}

/// What an allocation is held to on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Limit {
    pub gpu_uuid: String,
    pub memory_limit_bytes: u64,
    /// Where that comes from, in words.
    pub memory_origin: String,
    pub cores_millis: u32,
    /// `burst`, `strict` or `none`.
    pub policy: ComputePolicy,
    /// Where both come from, in words.
    pub cores_origin: String,
    /// When somebody set both; 0 where nobody did.
    pub set_unix_ms: i64,
    /// The originator of that, with the command; empty where nobody set them.
    pub set_by: String,
    pub context_overhead_bytes: u64,
    /// Observed beyond all charges, and taken from the limit.
    pub memory_overhead_bytes: u64,
}

/// Another allocation that had one of its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Neighbour {
    pub gpu_uuid: String,
    pub who: Behind,
    /// Leased in the last ten seconds.
    pub got_10s_millis: u32,
}

/// How an allocation is held to its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Enforcement {
    /// The shim's name, a hash of its content; empty where that is not known.
    pub shim: String,
    /// The version of its pages; 0 where that is not known.
    pub page_version: u32,
    /// Its pages on the host.
    pub pages_dir: String,
    /// What must be known of it, a sentence each.
    pub remarks: Vec<String>,
    /// What `status` warns of, about it. Empty for a reader without rights on the whole cluster.
    pub warnings: Vec<String>,
}

/// What was refused, delayed or wrong: lines of one kind together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Incident {
    /// The kind, as in the audit trail.
    pub what: String,
    pub times: u64,
    /// The first of them.
    pub first_unix_ms: i64,
    /// And the last.
    pub last_unix_ms: i64,
    /// What the last line says of it.
    pub reason: String,
    /// The reason is about this allocation alone: the plugin wrote it, and it names nobody else.
    pub reason_is_own: bool,
    /// The allocation that had the GPU meanwhile, where that is known.
    pub behind: Option<Behind>,
    /// What can be done about it; empty where nothing need be.
    pub advice: String,
}

/// A line of the audit trail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TrailLine {
    pub at_unix_ms: i64,
    pub what: String,
    /// The same for people, with what it has of sizes and lengths.
    pub text: String,
    pub reason: String,
    /// As in [`Incident`].
    pub reason_is_own: bool,
    /// As in [`Incident`].
    pub behind: Option<Behind>,
    /// The originator, with the command of an operator; empty where that is not known.
    pub by: String,
    /// On which GPU; empty where it is about none.
    pub gpu_uuid: String,
    /// Of which allocation; empty where it is about none.
    pub allocation_id: String,
    /// Which Allocate of it.
    pub generation: u64,
    /// How often since the line before of its kind.
    pub times: u64,
    /// The container that held the allocation then, if known.
    pub holder: Option<Holder>,
}

/// A GPU, and what happened on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GpuStory {
    /// As `status -o json` has it.
    pub gpu: Option<StatusGpu>,
    /// What it is cut into, and by which part of the configuration.
    pub cut: Vec<String>,
    /// Those that hold something of it, as `status -o json` has them.
    pub allocations: Vec<Allocation>,
    /// Its lines of the audit trail and of what lies on it, oldest first.
    pub trail: Vec<TrailLine>,
}

/// Explanations by the nodes that know the subject.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Explanations {
    pub api_version: String,
    pub nodes: Vec<OnNode>,
}

/// What one of several nodes says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OnNode {
    pub node: String,
    pub explanation: Explanation,
}

impl Explanations {
    /// Of these nodes.
    pub fn of(explained: Vec<(String, Explanation)>) -> Self {
        let on = |(node, explanation)| OnNode { node, explanation };
        let nodes = explained.into_iter().map(on).collect();
        Explanations { api_version: crate::API_VERSION.to_owned(), nodes }
    }
}

impl Story {
    /// The pod, as people call it.
    pub(crate) fn name(&self) -> String {
        match &self.holder {
            Some(holder) => holder.to_string(),
            None => "a container that kubelet has not named".to_owned(),
        }
    }

    /// Whose it is: its pod's namespace, or its claim's while kubelet has not named the pod; empty for nobody's.
    pub fn namespace(&self) -> &str {
        let holder = self.holder.as_ref().map(|holder| holder.namespace.as_str());
        let now = || self.now.as_ref().map(Allocation::namespace);
        holder.filter(|name| !name.is_empty()).or_else(now).unwrap_or_default()
    }
}

/// In place of an operator's name.
pub(crate) const OPERATOR: &str = "an operator";
/// Originators that name nobody.
const PARTS: [&str; 5] = ["kubelet", "configuration", "plugin", "driver", "container"];

/// An allocation that had what another waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Behind {
    /// Its id; empty where the reader may not see it.
    pub allocation_id: String,
    /// Its pod's namespace; empty where kubelet has not named the pod, or the reader may not see it.
    pub namespace: String,
    /// Its pod, likewise.
    pub pod: String,
}

impl Behind {
    fn name(&self) -> String {
        match (self.pod.as_str(), self.allocation_id.as_str()) {
            ("", "") => "another pod".to_owned(),
            ("", id) => id.to_owned(),
            (pod, _) => format!("{}/{pod}", self.namespace),
        }
    }

    pub(crate) fn narrowed(self, rights: &Rights) -> Self {
        if rights.may_see(&self.namespace) { self } else { Behind::default() }
    }
}

/// A reason, and who had the GPU meanwhile.
pub(crate) fn because(reason: &str, behind: Option<&Behind>) -> String {
    match behind {
        Some(other) if reason.is_empty() => format!("{} had the lease", other.name()),
        Some(other) => format!("{reason}; {} had the lease", other.name()),
        None => reason.to_owned(),
    }
}

/// An originator, without a name where that is an operator's.
pub(crate) fn originator(by: &str) -> &str {
    if by.is_empty() || PARTS.contains(&by) { by } else { OPERATOR }
}

impl Limit {
    /// Where limits come from that somebody set.
    pub fn set(at_unix_ms: i64, by: &str) -> String {
        format!("set {} by {by}", time_format::utc(at_unix_ms))
    }
}
