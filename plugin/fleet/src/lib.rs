//! All nodes at once, from where people sit: the plugins' JSON API through the API server's proxy, with the user's
//! own kubeconfig and rights.
//!
//! **For**: `kubectl tessera` and `tessera console`. **May use**: the view, the advice, the web server, the cluster.
//! **Must not**: know the agent, or decide what a reader may see: nodes do.
//!
//! What a node says is checked and never believed: it may stall, answer for another node, with megabytes, or with
//! nonsense. Each such answer becomes a sentence beside that node, and changes nothing for the others.
#![forbid(unsafe_code)]

pub mod advice;
mod answer;
mod ask;
mod entries;
mod fleet;
mod live;
pub mod merge;
pub mod pending;
mod places;
mod source;
mod subject;
mod window;

pub use answer::AskError;
pub use fleet::{Fleet, FleetError, Options};
pub use live::Live;
pub use merge::answered;
pub use places::Place;
