//! One node at one moment.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::tenant::Tenant;
pub use crate::warning::Warning;

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Node {
    pub api_version: String,
    /// The node's name; empty where the plugin does not know it.
    pub node: String,
    /// When this was put together, by the node's clock.
    pub at_unix_ms: i64,
    pub plugin: Plugin,
    /// GPUs and MIG instances, by index.
    pub gpus: Vec<Gpu>,
    /// Tenants that the reader may see.
    pub tenants: Vec<Tenant>,
    /// Totals of the tenants that the reader may not see, one for each GPU that has such.
    pub others: Vec<Others>,
    /// Tenants of which `others` has the totals; one on several GPUs is one.
    pub hidden_tenants: u32,
    /// What needs somebody's attention. Empty for a reader without rights on the whole cluster.
    pub warnings: Vec<Warning>,
}

/// The plugin on a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Plugin {
    pub version: String,
    pub started_unix_ms: i64,
    /// `waiting`, `accepted` or `live`, as `status` says it.
    pub registration: String,
    /// Everything that is sold is offered.
    pub ready: bool,
    /// What keeps it from that, a sentence each.
    pub amiss: Vec<String>,
    pub resources: Vec<String>,
    /// The DRA driver's name; empty where there is none.
    pub dra_driver: String,
    /// Why the configuration's file was refused; empty where it holds.
    pub config_error: String,
}

/// What the reader may know of tenants whose names the reader may not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Others {
    pub gpu_uuid: String,
    pub tenants: u32,
    /// Sum of their limits.
    pub memory_limit_bytes: u64,
    /// Sum of what they have charged.
    pub memory_charged_bytes: u64,
    /// Sum of their shares.
    pub cores_millis: u32,
    /// Sum of what they got in the last ten seconds.
    pub got_10s_millis: u32,
}
