//! Many nodes at one moment, or one as a fleet of one; and the GPUs or tenants of all of them in one list.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::API_VERSION;
use crate::gpu::Gpu;
use crate::node::Node;
use crate::tenant::Tenant;

/// Nodes, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Fleet {
    pub api_version: String,
    /// The cluster or context, for a title; empty for a node's own view.
    pub name: String,
    pub at_unix_ms: i64,
    /// Every node that should answer, by name.
    pub nodes: Vec<Entry>,
}

/// A node of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Entry {
    /// The node's name, as the API server has it.
    pub node: String,
    /// It answered the last time that it was asked.
    pub answers: bool,
    /// When it last answered, by the asker's clock; 0 for never.
    pub answered_unix_ms: i64,
    /// Why it does not answer, and what to do; empty where it does.
    pub error: String,
    /// The last answer.
    pub view: Option<Node>,
}

/// GPUs, by node and index.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Gpus {
    pub api_version: String,
    pub at_unix_ms: i64,
    pub gpus: Vec<NodeGpu>,
}

/// A GPU, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeGpu {
    pub node: String,
    #[serde(flatten)]
    pub gpu: Gpu,
}

/// Tenants, by node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tenants {
    pub api_version: String,
    pub at_unix_ms: i64,
    /// All that the reader may see.
    pub tenants: Vec<NodeTenant>,
}

/// A tenant, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeTenant {
    pub node: String,
    #[serde(flatten)]
    pub tenant: Tenant,
}

/// The GPUs of a fleet.
pub fn gpus(fleet: Fleet) -> Gpus {
    let gpus = listed(fleet.nodes, |view| view.gpus, |node, gpu| NodeGpu { node, gpu });
    Gpus { api_version: API_VERSION.to_owned(), at_unix_ms: fleet.at_unix_ms, gpus }
}

/// The tenants of a fleet.
pub fn tenants(fleet: Fleet) -> Tenants {
    let of = |node, tenant| NodeTenant { node, tenant };
    let tenants = listed(fleet.nodes, |view| view.tenants, of);
    Tenants { api_version: API_VERSION.to_owned(), at_unix_ms: fleet.at_unix_ms, tenants }
}

/// All of one kind, each with its node's name.
fn listed<T, U>(nodes: Vec<Entry>, of: fn(Node) -> Vec<T>, named: fn(String, T) -> U) -> Vec<U> {
    let each = |Entry { node, view, .. }: Entry| {
        let all = view.map(of).unwrap_or_default();
        all.into_iter().map(move |one| named(node.clone(), one)).collect::<Vec<_>>()
    };
    nodes.into_iter().flat_map(each).collect()
}
