//! Passes changes of GPU health to kubelet, the log, the history and `status`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::Inventory;
use tessera_gpu::health::{Health, Observation, Transition, View};
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_rules::allocate::Catalogue;

impl Inventory {
    /// Takes what the driver reports of a GPU. Lines for the audit trail, and whether it changes what is sold.
    pub(crate) fn observe(&self, observation: &Observation) -> (Vec<Event>, bool) {
        let mut health = self.health.lock();
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
        let mut catalogue = self.catalogue.lock();
        for (uuid, sold) in &mut Arc::make_mut(&mut catalogue).gpus {
            let reason = health.reason(uuid);
            if sold.sick.as_deref() != reason {
                sold.sick = reason.map(str::to_owned);
                changed = true;
            }
        }
        drop(catalogue);
        drop(health);
        let at_unix_ms = unix_ms();
        let event = |Transition { uuid, from, to, reason }: Transition| {
            Event::of_gpu(&uuid, What::Health { from, to }, reason, at_unix_ms)
        };
        (transitions.into_iter().map(event).collect(), changed)
    }

    /// Whether that would change nothing, whatever went before.
    #[must_use]
    pub fn ignores(&self, observation: &Observation) -> bool {
        Health::ignores(&self.config.get().health, observation)
    }

    /// How a GPU stands.
    #[must_use]
    pub fn health(&self, uuid: &str) -> View {
        self.health.lock().view(uuid, Instant::now())
    }

    /// GPUs that may not last, of those that are sold.
    #[must_use]
    pub fn suspects(&self) -> BTreeSet<String> {
        let health = self.health.lock();
        let catalogue = self.catalogue.lock();
        catalogue.gpus.keys().filter(|uuid| health.is_suspect(uuid)).cloned().collect()
    }

    /// `after` with today's health.
    pub(crate) fn with_health(&self, after: &Catalogue) -> Catalogue {
        let mut after = after.clone();
        let health = self.health.lock();
        for (uuid, sold) in &mut after.gpus {
            sold.sick = health.reason(uuid).map(str::to_owned);
        }
        after
    }
}
