//! Another configuration takes the place of the one in force, in one step.

use std::sync::Arc;

use tracing::info;

use super::Agent;
use crate::inventory::GpuSelection;
use tessera_config::Config;
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;

impl Agent {
    /// From now on `config` holds. Allocations keep their limits; what is offered beside them follows by the
    /// capacity rule, and kubelet gets the new lists. `selection` where it may include other GPUs than the one before.
    /// Blocking: it waits for an Allocate that is on its way, so that each is judged by one configuration.
    ///
    /// Keys that take a restart must be as they were; see [`tessera_config::keys::keep`].
    pub fn reload(&self, config: Config, selection: Option<GpuSelection>) {
        let config = Arc::new(config);
        let leases = {
            let _writer = self.journal.writer();
            let changed = self.config().compute != config.compute;
            self.inventory.configure(&config, selection);
            changed.then(|| config.compute.clone())
        };
        if let (Some(leases), Some(arbiter)) = (leases, self.allocations.arbiter()) {
            arbiter.configure(&leases);
        }
        if config.container.device_list_strategy.is_cdi() {
            self.allocations.check_directory();
        }
        self.advertised.refresh();
        info!(gpus = self.inventory.catalogue().gpus.len(), "another configuration holds");
    }

    /// Notes in the audit trail what became of the configuration, why it was read, and who asked if anybody
    /// did. Blocking.
    pub fn note_configuration(&self, what: What, why: String, asked: Option<Actor>) {
        let event = Event::of_node(what, unix_ms());
        let by = asked.or_else(|| event.by.clone());
        self.journal.audit(Event { by, reason: Some(why), ..event });
    }
}
