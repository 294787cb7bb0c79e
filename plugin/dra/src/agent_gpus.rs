//! The agent, as publication and status ask it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tessera_agent::Agent;
use tessera_agent::front_end::FrontDoor;
use tessera_agent::front_end::dra::DraGpu;
use tessera_gpu::{Discovery, Facts};
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_system::locks::lock;
use tokio::sync::watch;

use crate::claim_status::Claims;
use crate::publish::Gpus;

/// The agent's GPUs and records, and what the driver says of the GPUs.
pub struct AgentGpus {
    agent: Arc<Agent>,
    discovery: Arc<dyn Discovery>,
    /// What the driver said of these GPUs: it is asked when there are others.
    facts: Mutex<(Vec<Gpu>, Facts)>,
}

impl std::fmt::Debug for AgentGpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentGpus").finish_non_exhaustive()
    }
}

impl AgentGpus {
    pub fn new(agent: Arc<Agent>, discovery: Arc<dyn Discovery>) -> Self {
        AgentGpus { agent, discovery, facts: Mutex::default() }
    }
}

impl Gpus for AgentGpus {
    fn gpus(&self) -> Vec<DraGpu> {
        let mut known = lock(&self.facts);
        let devices = self.agent.inventory().catalogue().devices();
        // A driver that did not answer may by now.
        if known.0 != devices || known.1.driver_version.is_none() {
            *known = (devices.clone(), self.discovery.facts(&devices));
        }
        self.agent.dra_gpus(&known.1)
    }

    fn events(&self) -> watch::Receiver<u64> {
        FrontDoor::events(&*self.agent)
    }
}

impl Claims for AgentGpus {
    fn records(&self) -> Vec<Arc<Record>> {
        self.agent.dra_records()
    }

    fn sick(&self) -> BTreeMap<String, String> {
        let catalogue = self.agent.inventory().catalogue();
        let sick =
            catalogue.gpus.iter().filter_map(|(uuid, gpu)| Some((uuid.clone(), gpu.sick.clone()?)));
        sick.collect()
    }

    fn events(&self) -> watch::Receiver<u64> {
        FrontDoor::events(&*self.agent)
    }
}
