//! What was: figures in buckets of time.

use serde::{Deserialize, Serialize};

use crate::explain::{Behind, words};

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Query {
    /// A GPU (UUID or index), or a pod, container or allocation as `explain` takes them; empty for all.
    pub subject: String,
    /// Only this namespace; empty for any.
    pub namespace: String,
    /// The earliest instant; 0 for as early as there is.
    pub since_unix_ms: i64,
    /// The latest; 0 for now.
    pub until_unix_ms: i64,
    /// Length of a bucket: 10, 300 or 3600; 0 for the finest that covers the window.
    pub step_seconds: u32,
}

/// What is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Answer {
    /// [`crate::API_VERSION`].
    pub api_version: String,
    /// The node.
    pub node: String,
    /// When this was put together.
    pub at_unix_ms: i64,
    /// Length of a bucket.
    pub step_seconds: u32,
    /// The oldest bucket of that length; 0 where there is none.
    pub since_unix_ms: i64,
    /// GPUs.
    pub gpus: Vec<GpuSeries>,
    /// Tenants, also those that are gone.
    pub tenants: Vec<TenantSeries>,
    /// Changes of quota, cordons, health and refusals, oldest first.
    pub events: Vec<Event>,
    /// What could not be read.
    pub remarks: Vec<String>,
}

/// A GPU over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct GpuSeries {
    /// The GPU.
    pub gpu_uuid: String,
    /// Its index; absent where it is gone.
    pub index: Option<u32>,
    /// Oldest first; a bucket without a look is left out.
    pub points: Vec<GpuPoint>,
}

/// A GPU in one bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct GpuPoint {
    /// The bucket's beginning.
    pub at_unix_ms: i64,
    /// Seconds of the bucket that were observed.
    pub seconds: f64,
    /// Mean memory in use.
    pub memory_used_bytes: u64,
    /// Highest memory in use.
    pub memory_peak_bytes: u64,
    /// Mean of the sum of limits.
    pub memory_limits_bytes: u64,
    /// Seconds that it was leased.
    pub leased_seconds: f64,
    /// The highest part of any ten seconds of the bucket that it was leased, thousandths. 0 beside a time above 0: not
    /// recorded.
    pub leased_peak_millis: u32,
    /// Seconds that it was not healthy.
    pub unhealthy_seconds: f64,
    /// Seconds that it was cordoned.
    pub cordoned_seconds: f64,
}

/// A tenant over time, on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TenantSeries {
    /// The allocation.
    pub id: String,
    /// Which Allocate of this id.
    pub generation: u64,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// See [`crate::workload`].
    pub workload: String,
    /// The GPU.
    pub gpu_uuid: String,
    /// It lives.
    pub live: bool,
    /// Oldest first; a bucket without a look is left out.
    pub points: Vec<TenantPoint>,
}

/// A tenant in one bucket, on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TenantPoint {
    /// The bucket's beginning.
    pub at_unix_ms: i64,
    /// Seconds of the bucket that were observed.
    pub seconds: f64,
    /// Mean memory charged, with observed overhead.
    pub memory_used_bytes: u64,
    /// Highest memory charged, with observed overhead.
    pub memory_peak_bytes: u64,
    /// The limit at the bucket's end.
    pub memory_limit_bytes: u64,
    /// Mean of the overhead beyond charges.
    pub memory_overhead_bytes: u64,
    /// The share at the bucket's end.
    pub cores_millis: u32,
    /// Seconds of GPU time that it got.
    pub got_seconds: f64,
    /// The highest share of the GPU that it got in any ten seconds of the bucket, thousandths. 0 beside a time above 0:
    /// not recorded.
    pub got_peak_millis: u32,
    /// Seconds that it waited for GPU time: what it wanted is got and waited together.
    pub waited_seconds: f64,
    /// Of those, seconds that it waited because its own cap or share was spent.
    pub capped_seconds: f64,
    /// Seconds that it rationed itself because the arbiter was silent.
    pub rationed_seconds: f64,
    /// Refused requests.
    pub refusals: u64,
    /// Launches.
    pub launches: u64,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Event {
    /// When.
    pub at_unix_ms: i64,
    /// The kind, as in the audit trail.
    pub what: String,
    /// The tenant's id; empty for one of a GPU or the node.
    pub tenant: String,
    /// The pod as `namespace/pod`; empty for one of a GPU or the node.
    pub pod: String,
    /// The GPU; empty where it is about none, or several.
    pub gpu_uuid: String,
    /// In words: all of the following in a sentence.
    pub text: String,
    /// What happened to it, in words.
    pub happened: String,
    /// Why; empty where nothing says.
    pub reason: String,
    /// The reason is about this tenant alone: the plugin wrote it, and it names nobody else.
    pub reason_is_own: bool,
    /// The allocation that had the GPU meanwhile, where that is known.
    pub behind: Option<Behind>,
    /// The operator that did it, with the command; empty where no operator did.
    pub by: String,
}

impl Event {
    /// What [`Event::text`] says of the other fields.
    #[must_use]
    pub fn sentence(&self) -> String {
        let because = words::because(&self.reason, self.behind.as_ref());
        let mut text = match self.happened.as_str() {
            // Of a plugin that has its words in one field alone.
            "" => self.what.clone(),
            happened => happened.to_owned(),
        };
        if !because.is_empty() {
            text = format!("{text}: {because}");
        }
        if !self.by.is_empty() {
            text = format!("{text} (by {})", self.by);
        }
        text
    }
}
