//! GPU time: leases that the arbiter grants.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_arbiter::Arbiter;
use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_tenant::regions::{self, Mode, Outcome};
use tracing::{error, warn};

use super::{Engine, EngineError};
use crate::status_board::StatusBoard;

/// See the module's documentation. Without an arbiter GPU time is not divided, which `status` says: silence opens
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
                error!("{note}");
                // Nothing starts it again before the plugin does.
                board.stand("arbiter", "thread", note);
                None
            }
        };
        Leases { arbiter, pages: config.paths.pages.clone(), board }
    }

    /// The thread that divides GPU time.
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
            self.board.keep(id.as_str(), "time", &admitted, |error| {
                warn!(%id, %error, "its GPU time is not divided");
                format!("allocation {id}: its GPU time is not divided: {error}")
            });
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
