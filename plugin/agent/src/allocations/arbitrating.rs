//! Registers allocations with the arbiter of GPU time, and removes them.

use tracing::{error, warn};

use super::Allocations;
use crate::status_board::StatusBoard;
use tessera_arbiter::Arbiter;
use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_tenant::regions::Region;

/// The node's arbiter. Without one GPU time is not divided, which `status` says.
pub(super) fn start(config: &Config, board: &StatusBoard) -> Option<Arbiter> {
    match Arbiter::start(&config.compute) {
        Ok(arbiter) => Some(arbiter),
        Err(error) => {
            let note = format!("GPU time is not divided: the arbiter cannot start: {error}");
            error!("{note}");
            board.note(note);
            None
        }
    }
}

impl Allocations {
    /// Who divides GPU time.
    #[must_use]
    pub fn arbiter(&self) -> Option<&Arbiter> {
        self.arbiter.as_ref()
    }

    /// Has the pages of an allocation, which are new or may have changed, arbitrated.
    pub(super) fn arbitrate(&self, id: &AllocationId, region: &Region) {
        let Some(arbiter) = &self.arbiter else { return };
        if let Err(error) = arbiter.admit(region.dir()) {
            warn!(%id, %error, "its GPU time is not divided");
            self.board.note(format!("allocation {id}: its GPU time is not divided: {error}"));
        }
    }

    /// An allocation is no more.
    pub(super) fn stop_arbitrating(&self, id: &AllocationId) {
        if let Some(arbiter) = &self.arbiter {
            arbiter.release(id.as_str());
        }
    }
}
