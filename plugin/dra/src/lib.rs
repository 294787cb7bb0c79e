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
pub mod prepare;
pub mod publish;
pub mod serve;
pub use serve::{Serving, Settings, serve};

/// Names that the cluster knows: the driver, its devices, the kind of its parameters.
pub mod names {
    use tessera_model::short_name;

    /// The driver's name, in slices, claims and at registration.
    pub const DRIVER: &str = "gpu.tessera.dev";
    pub const PARAMETERS_VERSION: &str = "gpu.tessera.dev/v1";
    pub const PARAMETERS_KIND: &str = "ShareConfig";
    /// The capacity in bytes.
    pub const MEMORY: &str = "memory";
    /// The capacity in hundredths of a GPU's time.
    pub const CORES: &str = "cores";

    /// Longest name that a device may have: a DNS label.
    const LONGEST: usize = 63;

    /// The name of a GPU's device: its UUID as a DNS label. It survives reboots, other orders of GPUs and other
    /// configurations.
    pub fn device(uuid: &str) -> String {
        let label: String = uuid
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .collect();
        let label = label.trim_matches('-');
        let is_as_it_was = label.len() == uuid.len()
            && uuid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let begins = label.as_bytes().first().is_some_and(u8::is_ascii_alphabetic);
        if is_as_it_was && begins && label.len() <= LONGEST {
            return label.to_owned();
        }
        // Not a UUID of NVML's; the hash keeps those apart that look alike as labels.
        format!("gpu-{}", short_name::with_hash(label, LONGEST - "gpu-".len(), uuid))
    }
}

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
    mod storms;
    pub mod support;
}
