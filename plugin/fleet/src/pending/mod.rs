//! Why a pod waits: what each node has left for it, and what is in the way. [`judge`] is pure and decides as the
//! scheduler does, by its rules on resources, taints, labels, host ports, claims and what keeps other pods away. Its
//! other rules leave the verdict open. [`facts`] reads what the user may.

mod affinity;
mod claims;
mod facts;
mod holds;
mod judge;
mod neighbours;
mod ours;
#[cfg(test)]
mod tests;
mod text;
mod unjudged;

pub use facts::{Facts, facts};
pub use judge::judge;
pub use text::text;

use serde::Serialize;

/// What could be read, or why it could not.
pub type Known<T> = Result<T, String>;

/// Why a pod waits, or that it does not.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// [`tessera_view::API_VERSION`].
    pub api_version: String,
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// Where it is, in a sentence.
    pub state: String,
    /// It waits for a node, and asks for something of ours.
    pub waits: bool,
    /// What it asks of ours: resources with their number, claims with their sizes.
    pub asks: Vec<String>,
    /// The scheduler's own words.
    pub scheduler_says: String,
    /// What is in the way on every node.
    pub blocks: Vec<Block>,
    /// Nodes, the nearest to fitting first.
    pub nodes: Vec<NodeVerdict>,
    /// What could not be read, and what that leaves open.
    pub unread: Vec<String>,
}

/// Whether a node has room for the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// By the scheduler's rules, it does.
    Fits,
    /// Nothing that could be read is in the way.
    May,
    /// Something is in the way.
    Not,
}

/// A node, for the pod.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeVerdict {
    pub node: String,
    /// Whether it has room.
    pub fit: Fit,
    /// What is in the way.
    pub blocks: Vec<Block>,
    /// What is left of what the pod asks, in words.
    pub left: Vec<String>,
    /// The largest that fits on it now, in words; empty where that is not known.
    pub largest: String,
    /// What leaves the verdict open.
    pub open: Vec<String>,
}

/// Something in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    pub kind: BlockKind,
    /// A sentence.
    pub text: String,
}

/// Kinds of what is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockKind {
    /// A gate of the pod's own.
    Gate,
    /// A claim that there is not, or that lies elsewhere.
    Claim,
    /// A device class that there is not.
    Class,
    /// The node is not ready.
    NotReady,
    NodeCordon,
    Taint,
    /// The pod's node selector.
    Selector,
    /// The pod's node affinity.
    Affinity,
    /// Another pod's anti-affinity.
    PodAffinity,
    /// Ports of the node that another pod has.
    HostPort,
    /// A resource that is not ours.
    Resource,
    /// GPUs that are cordoned.
    Cordon,
    /// GPUs that are not healthy.
    Health,
    /// Too little of ours.
    Capacity,
    /// No plugin offers it there.
    NoPlugin,
}

impl BlockKind {
    /// As people read it.
    pub fn name(self) -> &'static str {
        match self {
            BlockKind::Gate => "gate",
            BlockKind::Claim => "claim",
            BlockKind::Class => "device class",
            BlockKind::NotReady => "not ready",
            BlockKind::NodeCordon => "node cordoned",
            BlockKind::Taint => "taint",
            BlockKind::Selector => "node selector",
            BlockKind::Affinity => "node affinity",
            BlockKind::PodAffinity => "anti-affinity",
            BlockKind::HostPort => "host port",
            BlockKind::Resource => "other resource",
            BlockKind::Cordon => "GPU cordoned",
            BlockKind::Health => "GPU health",
            BlockKind::Capacity => "capacity",
            BlockKind::NoPlugin => "no plugin",
        }
    }
}

fn block(kind: BlockKind, text: impl Into<String>) -> Block {
    Block { kind, text: text.into() }
}
