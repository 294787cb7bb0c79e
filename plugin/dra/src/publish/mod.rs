//! What the scheduler knows of this node's GPUs: the driver's ResourceSlices.
//!
//! ```text
//!  GPUs, health, configuration ──► [`offer`] devices ──► [`controller`] next write ──► API server
//!                                                             ▲                          │
//!                                                             └── what there is, what it kept ┘
//! ```
//!
//! - [`policy`], [`attributes`], [`taints`]: the parts of a device; [`offer`]: all devices, in their order
//! - [`pool`]: devices cut into slices
//! - [`controller`]: which write comes next, and how it stands, pure; [`task`]: does it
//!
//! **One device per GPU** that many claims share (consumable capacity, KEP 5075). What an API server without it does to
//! such a device: see [`controller`].
//!
//! **Order**: the scheduler takes the first device that fits, so the order of devices packs or spreads.

pub mod attributes;
pub mod controller;
pub mod offer;
mod pace;
mod plan;
pub mod policy;
pub mod pool;
pub mod taints;
pub mod task;

pub use controller::{State, Status};
pub use offer::{Offer, Published};
pub use task::Publisher;
