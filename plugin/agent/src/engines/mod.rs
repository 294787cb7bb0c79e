//! Engines: what holds a tenant to its limits.
//!
//! The core decides and records; an engine carries it out. [`memory`] is pages and shim, [`time`] leases of GPU
//! time. The driver's own limits and MPS will be others. An engine knows the record and nothing of the front end
//! that asked; [`crate::allocations`] asks each engine in one order and knows none by name when it does.

pub mod memory;
pub mod time;

use std::fmt;

use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_tenant::regions::{Mode, Outcome, RegionError};

/// Why a tenant cannot be held, so that it must not run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot make the pages of the allocation: {0}")]
    Pages(#[from] RegionError),
    /// Another engine.
    #[error("{engine} cannot hold the allocation to its limits: {reason}")]
    Engine {
        /// The engine's name.
        engine: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
}

/// One way of holding tenants to a part of their limits. Calls for one tenant come one at a time, under the
/// journal's writer; they may block.
pub trait Engine: fmt::Debug + Send + Sync {
    /// For messages.
    fn name(&self) -> &'static str;

    /// Holds the tenant of `record` from now on, or makes whole what holds it. Repeating it changes nothing.
    ///
    /// # Errors
    /// The tenant is not held, and must not run.
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError>;

    /// Follows limits that changed while the tenant runs.
    fn set_limits(&self, record: &Record);

    /// Ends with a tenant; one that it does not know is fine.
    fn release(&self, id: &AllocationId);
}
