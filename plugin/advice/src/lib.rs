//! Advice from what was seen: what a workload could ask for instead, and what is held and not used.
//!
//! **For**: [`recommend()`] and [`waste()`], over histories of any number of nodes, so that a node's plugin and the
//! console judge alike. Pure: series and views go in, [`tessera_view::advice`] comes out.
//!
//! **May use**: the view, the configuration's table `[advice]`. **Must not**: do I/O, or know where series come
//! from.
#![forbid(unsafe_code)]

mod changes;
pub mod fixtures;
mod recommend;
mod sample;
mod waste;
mod workloads;

#[cfg(test)]
mod tests;

pub use recommend::recommend;
pub use waste::{largest_first, waste};

use tessera_view::history::Answer;
use tessera_view::node::Node;

/// A node: what there is, and what was.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub node: &'a Node,
    /// Series of tenants over the window. Any bucket length will do; a finer one sees more of bursts.
    pub history: &'a Answer,
}
