//! What containers are handed, and the CDI specs of it, kept whole while a container may start from
//! them.

use nix::unistd::{AccessFlags, access};
use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tracing::{error, info, warn};

use super::{AllocateError, Allocations};
use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;
use tessera_tenant::delivery;
use tessera_tenant::delivery::cdi::files::{Put, Specs};
use tessera_tenant::delivery::{DeliveryPlan, cdi, driver};
use tessera_tenant::{regions, shim_install};

/// Whether an allocation that only its pages tell of needs a spec: better one too many.
pub(super) fn is_adopted_as_cdi(config: &Config, id: &AllocationId) -> bool {
    config.container.device_list_strategy.is_cdi() || Specs::new(&config.cdi.directory).exists(id)
}

impl Allocations {
    pub(super) fn specs(&self) -> Specs {
        Specs::new(&self.config.get().cdi.directory)
    }

    /// Kubelet's answer for an allocation, and its spec if it has one.
    pub(super) fn deliver(
        &self,
        catalogue: &Catalogue,
        record: &Record,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        self.with_parcel(catalogue, record, |parcel| {
            if record.cdi {
                self.put_spec(parcel)?;
            }
            Ok(delivery::answer(parcel, &self.config.get()))
        })
    }

    /// Before a container starts with what it was handed once: that the driver and the spec are there.
    /// Whoever calls holds `writer`, or is alone: two that write one spec would be in each other's way.
    pub(super) fn ensure_delivered(&self, record: &Record) -> Result<(), AllocateError> {
        // Which shim it was given is in the spec and nowhere else.
        let is_known = record.shim.is_some() || !self.specs().is_whole(&record.id);
        self.with_parcel(&self.inventory.catalogue(), record, |parcel| {
            match record.cdi && is_known {
                true => self.put_spec(parcel),
                false => Ok(()),
            }
        })
    }

    fn with_parcel<T>(
        &self,
        catalogue: &Catalogue,
        record: &Record,
        then: impl FnOnce(&DeliveryPlan<'_>) -> Result<T, AllocateError>,
    ) -> Result<T, AllocateError> {
        let known = record.grants.iter().filter_map(|grant| catalogue.gpus.get(&grant.uuid));
        let gpus: Vec<_> = known.map(|sold| &sold.gpu).collect();
        let parts = driver::parts(&self.config.get(), &gpus)?;
        let pages = regions::dir(self.pages(), &record.id);
        let named = record.shim.as_deref().map(|name| shim_install::at(&self.paths.shim, name));
        let shim = named.as_ref().unwrap_or(&self.delivery);
        then(&DeliveryPlan { id: &record.id, gpus, pages: &pages, shim, parts })
    }

    fn put_spec(&self, parcel: &DeliveryPlan<'_>) -> Result<(), AllocateError> {
        let spec = cdi::spec(parcel, &self.config.get())?;
        if self.specs().put(parcel.id, &spec)? == Put::Replaced {
            warn!(id = %parcel.id, "something else lay where the CDI spec belongs; replaced");
        }
        Ok(())
    }

    pub(super) fn remove_spec(&self, id: &AllocationId) {
        if let Err(error) = self.specs().remove(id) {
            warn!(%id, %error, "the CDI spec of a released allocation cannot be removed");
        }
    }

    /// At the start: every spec that a container may start from again is there and whole, as after
    /// the node's own restart, and none that is nobody's.
    pub(super) fn rebuild_specs(&self) {
        let specs = self.specs();
        let records = self.records.lock().all();
        for record in records.values().filter(|record| record.cdi) {
            if let Err(error) = self.ensure_delivered(record) {
                error!(id = %record.id, %error, "the CDI spec of an allocation cannot be made");
                self.board.note(format!("allocation {} cannot start again: {error}", record.id));
            }
        }
        let kept = |id: &AllocationId| records.get(id).is_some_and(|record| record.cdi);
        for id in specs.sweep(kept) {
            info!(%id, "removed the CDI spec of an allocation that is no more");
        }
        if self.config.get().container.device_list_strategy.is_cdi() {
            self.check_directory();
        }
    }

    /// Says at once what every Allocate would say.
    pub(crate) fn check_directory(&self) {
        let config = self.config.get();
        let directory = &config.cdi.directory;
        let usable = std::fs::create_dir_all(directory)
            .and_then(|()| Ok(access(directory, AccessFlags::W_OK | AccessFlags::X_OK)?));
        if let Err(error) = usable {
            let text = format!(
                "no container can start: cdi.directory {} cannot be written ({error}); mount it \
                 writable, or choose another that the container runtime reads",
                directory.display()
            );
            error!("{text}");
            self.board.note(text);
        }
    }
}
