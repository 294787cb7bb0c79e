//! What a tenant gets: pages, shim, and the delivery of both into its containers.
//!
//! **For**: the memory engine's node side. [`regions`] makes, reads and repairs the pages of an allocation and
//! serves its session socket; [`shim_install`] keeps the shim that containers mount; [`delivery`] says what a
//! container gets (environment, mounts, device nodes, CDI).
//!
//! **May use**: the model, the configuration, `system`, and [`tessera_peers`] for its sockets. **Must not**: know
//! the ledger, kubelet, the arbiter or which front end asked.
#![forbid(unsafe_code)]

pub mod delivery;
pub mod regions;
pub mod shim_install;
