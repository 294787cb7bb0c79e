//! What the DRA front end asks beside the door.

use std::sync::Arc;

use tessera_model::record::Record;

use super::AllocateError;
use crate::Agent;

impl Agent {
    /// Live records of claims.
    pub fn claims(&self) -> Vec<Arc<Record>> {
        let mut records = self.allocations().records();
        records.retain(|record| record.is_live() && record.origin.claim().is_some());
        records
    }

    /// Names of CDI devices that show a GPU to a container and grant nothing of it: for monitors. What they need is
    /// on disk then, and stays. Blocking.
    ///
    /// # Errors
    /// A GPU that is not here, a driver that cannot be delivered, or a CDI directory that cannot be written.
    pub fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        self.allocations().view(uuid)
    }
}
