//! All nodes at once, from where people sit: the plugins' JSON API through the API server's proxy, with the user's
//! own kubeconfig and rights.
//!
//! **For**: `kubectl tessera` and `tessera console`. **May use**: the view, the advice, the web server, the cluster.
//! **Must not**: know the agent, or decide what a reader may see: nodes do.
//!
//! A node may stall, answer for another node or with too many bytes, or speak another version. Each such answer becomes a
//! sentence beside that node, and changes nothing for the others.
#![forbid(unsafe_code)]

mod ask;
mod entries;
mod fleet;
mod live;
pub mod merge;
pub mod pending;
pub mod places;

pub use ask::{AskError, Question, Why};
pub use fleet::{Fleet, Options};
pub use live::Live;
pub use places::Place;
