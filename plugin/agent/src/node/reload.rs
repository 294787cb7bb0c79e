//! Another configuration takes the place of the one in force, in one step.

use std::sync::Arc;

use tracing::info;

use super::Node;
use tessera_config::Config;
use tessera_model::audit::{By, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::gpu::Gpu;
use tessera_model::topology::Topology;
use tessera_rules::allocate::Catalogue;
use tessera_system::locks::lock;

/// What another configuration leaves of the machine.
#[derive(Clone, Debug)]
pub struct Ground {
    /// The GPUs that it includes.
    pub gpus: Vec<Gpu>,
    /// How near they are to each other.
    pub topology: Topology,
}

impl Node {
    /// From now on `config` holds. Allocations keep their limits; what is offered beside them follows by the
    /// capacity rule, and kubelet is told. `ground` where it may include other GPUs than the one before.
    /// Blocking: it waits for an Allocate that is on its way, so that each is judged by one configuration.
    ///
    /// Keys that take a restart must be as they were; see [`tessera_config::keys::keep`].
    pub fn reload(&self, config: Config, ground: Option<Ground>) {
        let config = Arc::new(config);
        let writer = lock(&self.writer);
        if let Some(Ground { topology, .. }) = &ground {
            *lock(&self.topology) = Arc::new(topology.clone());
        }
        let leases = {
            let mut health = lock(&self.health);
            let mut catalogue = lock(&self.catalogue);
            let gpus = ground.map_or_else(|| catalogue.devices(), |ground| ground.gpus);
            let gpus = writer.measured(gpus, &config);
            health.configure(config.health.clone(), gpus.iter().map(|gpu| &gpu.uuid));
            let mut next = Catalogue::new(&gpus, &config);
            next.edition = catalogue.edition + 1;
            for (uuid, sold) in &mut next.gpus {
                sold.sick = health.reason(uuid).map(str::to_owned);
            }
            *catalogue = Arc::new(next);
            let changed = self.config().compute != config.compute;
            self.config.set(Arc::clone(&config));
            changed.then(|| config.compute.clone())
        };
        drop(writer);
        if let (Some(leases), Some(arbiter)) = (leases, &self.arbiter) {
            arbiter.configure(&leases);
        }
        if config.container.device_list_strategy.is_cdi() {
            self.check_directory();
        }
        self.refresh_devices();
        info!(gpus = self.catalogue().gpus.len(), "another configuration holds");
    }

    /// Notes in the audit trail what became of the configuration, why it was read, and who asked if anybody
    /// did. Blocking.
    pub fn note_configuration(&self, what: What, why: String, asked: Option<By>) {
        let event = Event::of_node(what, unix_ms());
        let by = asked.or_else(|| event.by.clone());
        self.audit(Event { by, reason: Some(why), ..event });
    }
}
