//! The core as this front end sees it: the agent's front door, and what it has to say of GPUs and claims.

use std::sync::Arc;
use std::time::Duration;

use tessera_agent::Agent;
use tessera_agent::front_end::{AllocateError, FrontDoor};
use tessera_agent::meters::{Call, Outcome};
use tessera_agent::status_board::Refused;
use tessera_cluster::resource::ClaimRef;
use tessera_config::Config;
use tessera_gpu::Facts;
use tessera_model::record::Record;

use crate::names;

pub use tessera_agent::front_end::dra::DraGpu;

/// What this front end needs of the core beside the door.
pub trait Core: FrontDoor + 'static {
    /// The GPUs that this front end sells, in the order of their numbers.
    fn gpus(&self) -> Vec<DraGpu>;

    /// The configuration now.
    fn config(&self) -> Arc<Config>;

    /// Counts a call of one claim, for metrics.
    fn observe(&self, _call: Call, _outcome: Outcome, _length: Duration) {}

    /// Says in `status` what is amiss with a topic, or with `None` that nothing is. True if that is news.
    fn condition(&self, _topic: &'static str, _text: Option<String>) -> bool {
        true
    }

    /// Notes that the pods of a claim were refused, or with a reason of `None` that the refusal is over.
    fn refused(&self, _claim: &ClaimRef, _pods: &[String], _reason: Option<&str>) {}

    /// Kubelet has been answered: it starts the containers, and can name them.
    fn prepared(&self) {}

    /// Live records of claims.
    fn claims(&self) -> Vec<Arc<Record>>;

    /// Names of CDI devices that show a GPU to a container and grant nothing of it. What they need is on disk
    /// afterwards, and stays.
    ///
    /// # Errors
    /// A driver that cannot be delivered, or a CDI directory that cannot be written.
    fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError>;
}

impl Core for Agent {
    fn gpus(&self) -> Vec<DraGpu> {
        // What the driver says of them is published, and makes no difference to a claim.
        self.dra_gpus(&Facts::default())
    }

    fn config(&self) -> Arc<Config> {
        Agent::config(self)
    }

    fn observe(&self, call: Call, outcome: Outcome, length: Duration) {
        self.meters().observe(call, &Arc::from(names::DRIVER), outcome, length);
    }

    fn condition(&self, topic: &'static str, text: Option<String>) -> bool {
        self.board().set_condition(topic, text)
    }

    fn refused(&self, claim: &ClaimRef, pods: &[String], reason: Option<&str>) {
        let Some(reason) = reason else { return self.board().grant(&claim.uid) };
        self.board().refuse(Refused {
            subject: claim.uid.clone(),
            namespace: claim.namespace.clone(),
            pods: pods.to_vec(),
            claim: claim.name.clone(),
            reason: reason.to_owned(),
            ..Refused::default()
        });
    }

    fn prepared(&self) {
        self.allocations().expect_start();
    }

    fn claims(&self) -> Vec<Arc<Record>> {
        self.dra_records()
    }

    fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        self.dra_view(uuid)
    }
}
