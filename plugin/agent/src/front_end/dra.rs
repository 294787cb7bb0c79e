//! What the DRA front end asks beside the door, and how its driver stands.

use std::sync::Arc;

use tessera_model::record::Record;

use super::AllocateError;
use crate::Agent;

/// How the DRA driver stands, for views.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraStatus {
    pub driver: String,
    /// Kubelet has registered it.
    pub registered: bool,
    /// Why kubelet has not; empty where it has.
    pub registration_error: String,
    /// The pool, which is the node's name; empty while that is not known.
    pub pool: String,
    /// What the API server has, in a word.
    pub publication: &'static str,
    /// Devices that should be published.
    pub devices: usize,
    /// ResourceSlices that they take.
    pub slices: usize,
    /// The pool's generation.
    pub generation: i64,
    /// Writes of slices since the start.
    pub writes: u64,
    /// Times that another removed slices.
    pub wipes: u64,
}

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
