//! What could be asked instead, and what is paid for and not used.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Advice for workloads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Recommendations {
    /// [`crate::API_VERSION`].
    pub api_version: String,
    /// When this was put together.
    pub at_unix_ms: i64,
    /// What it was judged by; absent where nodes of a fleet differ.
    pub settings: Option<Settings>,
    /// One for each workload and container.
    pub workloads: Vec<Recommendation>,
    /// What could not be read.
    pub remarks: Vec<String>,
}

/// What advice is judged by: percentiles and margins of the table `[advice]`, percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Which part of the observed time the advised memory covers.
    pub memory_percentile: u32,
    /// What is added to that.
    pub memory_margin: u32,
    /// Which part of the observed time the advised share covers.
    pub cores_percentile: u32,
    /// What is added to that.
    pub cores_margin: u32,
}

/// Advice for one container of a workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Recommendation {
    /// Its namespace.
    pub namespace: String,
    /// The workload.
    pub workload: String,
    /// The container.
    pub container: String,
    /// Which of the container's allocations: `request NAME` of a claim, `resource NAME`, or `allocation ID`. Empty where
    /// it has one.
    pub part: String,
    /// Pods that were looked at, as `pod` names.
    pub pods: Vec<String>,
    /// Memory that each has now.
    pub memory_limit_bytes: u64,
    /// Memory that it should have.
    pub memory_bytes: u64,
    /// Its share now.
    pub cores_millis: u32,
    /// The share that it should have.
    pub recommended_cores_millis: u32,
    /// `low`, `medium` or `high`.
    pub confidence: String,
    /// Seconds that were observed, over all pods.
    pub observed_seconds: f64,
    /// The window's beginning.
    pub since_unix_ms: i64,
    /// Why, a sentence each, with the figures.
    pub evidence: Vec<String>,
    /// Bytes that would be free, over all live pods; negative where more is needed.
    pub saves_memory_bytes: i64,
    /// Thousandths of GPUs that would be free; negative where more is needed.
    pub saves_cores_millis: i64,
    /// The exact change: commands or lines of a manifest, the least effort first. Empty where nothing should change.
    pub changes: Vec<String>,
}

impl Recommendation {
    /// The container, with which of its allocations is meant.
    pub fn container_and_part(&self) -> String {
        match self.part.as_str() {
            "" => self.container.clone(),
            part => format!("{}, {part}", self.container),
        }
    }
}

/// What is asked and not used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Waste {
    /// [`crate::API_VERSION`].
    pub api_version: String,
    /// When this was put together.
    pub at_unix_ms: i64,
    /// The window's beginning.
    pub since_unix_ms: i64,
    /// Price of a GPU for an hour; 0 where none is set.
    pub price_per_gpu_hour: f64,
    /// The price's currency, as configured.
    pub currency: String,
    /// By namespace, the largest waste first.
    pub namespaces: Vec<NamespaceWaste>,
    /// What could not be read.
    pub remarks: Vec<String>,
}

/// Waste of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NamespaceWaste {
    /// The namespace; empty for tenants that nobody named.
    pub namespace: String,
    /// Hours of whole GPUs that were asked: the larger part of memory and share.
    pub asked_gpu_hours: f64,
    /// Hours of whole GPUs that were used.
    pub used_gpu_hours: f64,
    /// What the rest cost; 0 where no price is set.
    pub cost: f64,
    /// Its tenants, the largest waste first.
    pub tenants: Vec<TenantWaste>,
}

/// Waste of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantWaste {
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The workload.
    pub workload: String,
    /// It lives.
    pub live: bool,
    /// The quota.
    pub memory_limit_bytes: u64,
    /// The highest use in the window.
    pub memory_peak_bytes: u64,
    /// The share.
    pub cores_millis: u32,
    /// What it wanted on average: got and waited.
    pub wanted_millis: u32,
    /// Seconds since it last had work on a GPU; absent where it has some.
    pub idle_seconds: Option<f64>,
    /// Idle for longer than the set time.
    pub idle: bool,
    /// Hours of whole GPUs that were asked.
    pub asked_gpu_hours: f64,
    /// Hours of whole GPUs that were asked and not used.
    pub wasted_gpu_hours: f64,
    /// What they cost; 0 where no price is set.
    pub cost: f64,
    /// `low`, `medium` or `high`.
    pub confidence: String,
}
