//! Whether another device plugin on this node sells a GPU of ours too.
//!
//! A pod with the GPU from the other plugin has no quota, and takes memory that ours were promised. So by
//! default a GPU that another plugin offers, or that a pod holds through one, is not allocated here: its
//! free replicas are Unhealthy until no other plugin has offered it for a while. Existing allocations go on.
//!
//! - [`ids`]: which of our GPUs a foreign device id means
//! - [`judge`]: from what kubelet knows to a finding per GPU, and how long it stands
//! - [`checkpoint`]: the source for older kubelets
//!
//! Nothing here is in the path of Allocate, and Allocate never refuses because of it: kubelet may have
//! assigned the replica before it heard of the change, or an init container may pass it on.

pub mod checkpoint;
pub mod ids;
pub mod judge;

pub use ids::Known;
pub use judge::{CurrentFindings, ForeignSale, Offer};
