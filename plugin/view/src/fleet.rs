//! Many nodes at one moment, or one as a fleet of one.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::node::Node;

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
