//! What the scheduler knows of this node's GPUs: the driver's ResourceSlices.
//!
//! ```text
//!  GPUs, health, configuration ──► [`offer`] devices ──► [`controller`] next write ──► API server
//!                                                             ▲                          │
//!                                                             └── what there is, what it kept ┘
//! ```
//!
//! - [`policy`], [`attributes`], [`taints`]: the parts of a device; [`offer`]: all devices, in their order
//! - [`pool`]: devices cut into slices; [`validate`]: Kubernetes' limits
//! - [`controller`]: which write comes next, pure; [`task`]: does it
//! - [`status`]: how it stands
//!
//! **One device per GPU** that many claims share, where the API server knows consumable capacity. One that does not
//! drops what makes a device shareable, and the scheduler would give the whole GPU to one pod. So the driver tries
//! it out first on a slice that no scheduler reads: see [`controller`]. Where it was dropped, each GPU is
//! published as shares of one fixed size.
//!
//! **Order**: the scheduler takes the first device that fits, so the order of devices packs or spreads.

pub mod attributes;
mod compare;
pub mod controller;
#[cfg(test)]
mod fixtures;
pub mod offer;
mod pace;
mod plan;
pub mod policy;
pub mod pool;
#[cfg(test)]
pub(crate) mod scheduler;
pub mod status;
pub mod taints;
pub mod task;
pub mod validate;

pub use offer::{Offer, Published, fixed_share};
pub use status::{Mode, State, Status};
pub use task::{Gpus, Publisher};
