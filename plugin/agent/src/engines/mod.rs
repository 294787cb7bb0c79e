//! Engines: what holds a tenant to its limits.
//!
//! The core decides and records; an engine carries it out. [`memory`] is pages and shim, [`Leases`] those of
//! GPU time, which the arbiter grants. The driver's own limits and MPS will be others. An engine knows the record and nothing of the front end
//! that asked; [`crate::allocations`] asks each engine in one order and knows none by name when it does.

pub mod memory;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use tessera_arbiter::Arbiter;
use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_tenant::regions::{self, Mode, Outcome, RegionError};

use crate::status_board::StatusBoard;

/// Why a tenant cannot be held, so that it must not run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot make the pages of the allocation: {0}")]
    Pages(#[from] RegionError),
    #[error("{engine} cannot hold the allocation to its limits: {reason}")]
    Engine {
        engine: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
}

/// One way of holding tenants to a part of their limits. Calls for one tenant come one at a time, under the
/// journal's writer; they may block.
pub trait Engine: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;

    /// Holds the tenant of `record` from now on, or makes whole what holds it. Repeating it changes nothing.
    ///
    /// Errors: The tenant is not held, and must not run.
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError>;

    /// Follows limits that changed while the tenant runs.
    fn set_limits(&self, record: &Record);

    /// Ends with a tenant; one that it does not know is fine.
    fn release(&self, id: &AllocationId);
}

/// GPU time. Without an arbiter GPU time is not divided, which `status` says: silence opens
/// for time.
#[derive(Debug)]
pub struct Leases {
    arbiter: Option<Arbiter>,
    pages: PathBuf,
    board: Arc<StatusBoard>,
}

impl Leases {
    /// The node's arbiter, over the pages that `config` names.
    pub(crate) fn start(config: &Config, board: Arc<StatusBoard>) -> Self {
        let arbiter = match Arbiter::start(&config.compute) {
            Ok(arbiter) => Some(arbiter),
            Err(error) => {
                let note = format!("GPU time is not divided: the arbiter cannot start: {error}");
                // Nothing starts it again before the plugin does.
                board.stand("arbiter", "thread", note);
                None
            }
        };
        Leases { arbiter, pages: config.paths.pages.clone(), board }
    }

    pub fn arbiter(&self) -> Option<&Arbiter> {
        self.arbiter.as_ref()
    }
}

impl Engine for Leases {
    fn name(&self) -> &'static str {
        "leases"
    }

    fn admit(&self, record: &Record, _mode: Mode) -> Result<Outcome, EngineError> {
        if let Some(arbiter) = &self.arbiter {
            let id = &record.id;
            let admitted = arbiter.admit(&regions::dir(&self.pages, id));
            let text = |error: &_| format!("allocation {id}: its GPU time is not divided: {error}");
            self.board.keep(id.as_str(), "time", &admitted, text);
        }
        Ok(Outcome::default())
    }

    fn set_limits(&self, record: &Record) {
        // It reads the limits from the page when it is admitted again.
        let _ = self.admit(record, Mode::Adopt);
    }

    fn release(&self, id: &AllocationId) {
        if let Some(arbiter) = &self.arbiter {
            arbiter.release(id.as_str());
        }
    }
}
