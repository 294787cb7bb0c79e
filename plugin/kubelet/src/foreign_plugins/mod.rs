//! Whether another device plugin on this node sells a GPU of ours too.
//!
//! Whoever gets the GPU from the other plugin has no quota, and takes the memory that ours were
//! promised. So by default a GPU that somebody else offers, or that a pod holds through somebody else,
//! is not given out here: its free replicas are Unhealthy until nobody else has offered it for a
//! while. What has been given out runs on.
//!
//! - [`ids`]: which of our GPUs a foreign device id means
//! - [`judge`]: from what kubelet knows to a finding per GPU, and how long it stands
//! - [`checkpoint`]: what older kubelets tell in no other way
//!
//! Nothing here is in the path of Allocate, and Allocate never refuses because of it: kubelet may have
//! assigned the replica before it heard of the change, or an init container may pass it on.

pub mod checkpoint;
pub mod ids;
pub mod judge;

pub use ids::Known;
pub use judge::{Finding, Offer, Others};
