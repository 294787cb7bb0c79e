//! The node's GPUs fall ill and recover: what kubelet, the log, the history and `status` are told.

use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::Node;
use tessera_gpu::health::{Health, Observation, Transition, View};
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::topology::Topology;
use tessera_store::Change;
use tessera_system::locks::lock;

impl Node {
    /// Takes what the driver reports of a GPU. Gives what changed by it, for
    /// [`Node::record_health`].
    pub fn observe(&self, observation: &Observation) -> Vec<Event> {
        let mut health = lock(&self.health);
        let transitions = health.observe(observation, Instant::now());
        for Transition { uuid, from, to, reason } in &transitions {
            let (from, to) = (from.name(), to.name());
            match health.reason(uuid) {
                Some(_) => warn!(gpu = %uuid, from, to, %reason, "a GPU is not sold"),
                None => info!(gpu = %uuid, from, to, %reason, "a GPU is sold"),
            }
        }
        // Also the reason of a GPU that stays ill may be another by now.
        let mut changed = false;
        let mut catalogue = lock(&self.catalogue);
        for (uuid, sold) in &mut Arc::make_mut(&mut catalogue).gpus {
            let reason = health.reason(uuid);
            if sold.sick.as_deref() != reason {
                sold.sick = reason.map(str::to_owned);
                changed = true;
            }
        }
        drop(catalogue);
        drop(health);
        if changed {
            self.refresh_devices();
        }
        let at_unix_ms = unix_ms();
        let event = |Transition { uuid, from, to, reason }: Transition| {
            Event::of_gpu(&uuid, What::Health { from, to }, reason, at_unix_ms)
        };
        transitions.into_iter().map(event).collect()
    }

    /// Whether that would change nothing, whatever went before.
    #[must_use]
    pub fn ignores(&self, observation: &Observation) -> bool {
        Health::ignores(&self.config().health, observation)
    }

    /// Notes transitions in the history. Blocking.
    pub fn record_health(&self, events: Vec<Event>) {
        let change = Change { events, ..Change::default() };
        if let Err(error) = lock(&self.writer).ledger.commit(&change) {
            warn!(%error, "the event is not recorded");
        }
    }

    /// How a GPU stands.
    #[must_use]
    pub fn health(&self, uuid: &str) -> View {
        lock(&self.health).view(uuid, Instant::now())
    }

    /// Sets how near GPUs are to each other.
    pub fn set_topology(&self, topology: Topology) {
        *lock(&self.topology) = Arc::new(topology);
    }
}
