//! The DRA front end: GPUs published as devices of `resource.k8s.io`, and claims of them prepared for kubelet.
//!
//! **For**: what the scheduler and kubelet say about shares of GPUs by Dynamic Resource Allocation, and what is
//! said back. The scheduler decides; this crate checks its decision against the core and delivers it.
//!
//! - [`names`]: how the driver, its devices and its parameters are called
//! - [`publish`]: the slices, and what keeps them as they should be
//! - [`claim_status`]: what claims say of their devices
//! - [`claims`]: what an allocated claim comes to on this node; pure
//! - [`prepare`]: kubelet's calls: claims prepared and unprepared, and those that kubelet forgot
//! - [`health`]: what kubelet hears of devices
//! - [`serve`]: the sockets, and registration with kubelet
//!
//! **May use**: the agent, the API server through `tessera-cluster`, gRPC on Unix sockets.
//! **Must not**: know pages, shims, leases or the ledger; keep in memory alone what a second instance needs.
#![forbid(unsafe_code)]

pub mod claim_status;
pub mod claims;
#[cfg(test)]
mod fixtures;
pub mod health;
pub mod names;
pub mod prepare;
pub mod publish;
pub mod serve;
pub use serve::{Serving, Settings, serve};

/// Sleeps so long; for ever without a time.
async fn sleep(pause: Option<std::time::Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

/// The driver as kubelet meets it: sockets, a stand-in kubelet, an API server in memory, and the agent.
#[cfg(test)]
mod tests {
    mod claims;
    mod lifecycle;
    mod quota;
    mod storms;
    pub mod support;
}
