//! What containers are handed, and the CDI specs of it, kept whole while a container may start from
//! them.

use std::collections::BTreeSet;

use nix::unistd::{AccessFlags, access};
use tracing::{info, warn};

use super::{AllocateError, Allocations};
use tessera_config::Config;
use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;
use tessera_rules::refusal::Refusal;
use tessera_tenant::delivery;
use tessera_tenant::delivery::cdi::files::{Put, Specs};
use tessera_tenant::delivery::{DeliveryPlan, cdi, driver};
use tessera_tenant::shim_install;

/// What `status` calls the directory of CDI specs by.
const CDI_DIRECTORY: &str = "cdi.directory";

/// Whether an allocation that is known only by its pages needs a spec: better one too many.
pub(super) fn is_adopted_as_cdi(config: &Config, id: &AllocationId) -> bool {
    config.container.device_list_strategy.is_cdi() || Specs::new(&config.cdi.directory).exists(id)
}

impl Allocations {
    pub(super) fn specs(&self) -> Specs {
        Specs::new(&self.config.get().cdi.directory)
    }

    /// What the container of an allocation is given; its spec is there then, if it has one.
    pub(super) fn deliver(
        &self,
        catalogue: &Catalogue,
        record: &Record,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        self.with_delivery_plan(catalogue, record, |plan| {
            if record.cdi {
                self.put_spec(plan)?;
            }
            if record.origin.claim().is_some() {
                // Kubelet's DRA manager knows nothing else.
                let names = cdi::names(plan, &self.config.get()).into_iter();
                let cdi_devices = names.map(|name| CdiDevice { name }).collect();
                return Ok(ContainerAllocateResponse { cdi_devices, ..Default::default() });
            }
            Ok(delivery::answer(plan, &self.config.get()))
        })
    }

    /// Before a container starts with what it was handed once: that the driver and the spec are there.
    /// The caller holds `writer`, or is alone: two that write one spec would be in each other's way.
    pub(super) fn ensure_delivered(&self, record: &Record) -> Result<Put, AllocateError> {
        let catalogue = self.inventory.catalogue();
        // Which shim it was given, and how a GPU is reached that is not sold any more, is in the spec and nowhere else.
        let is_sold = record.grants.iter().all(|grant| catalogue.gpus.contains_key(&grant.uuid));
        let is_known = record.shim.is_some() && is_sold || !self.specs().is_whole(&record.id);
        let ensured =
            self.with_delivery_plan(&catalogue, record, |plan| match record.cdi && is_known {
                true => self.put_spec(plan),
                false => Ok(Put::Unchanged),
            });
        let text =
            |error: &AllocateError| format!("allocation {} cannot start again: {error}", record.id);
        self.board.keep(record.id.as_str(), "delivery", &ensured, text);
        ensured
    }

    fn with_delivery_plan<T>(
        &self,
        catalogue: &Catalogue,
        record: &Record,
        then: impl FnOnce(&DeliveryPlan<'_>) -> Result<T, AllocateError>,
    ) -> Result<T, AllocateError> {
        let known = record.grants.iter().filter_map(|grant| catalogue.gpus.get(&grant.uuid));
        let gpus: Vec<_> = known.map(|sold| &sold.gpu).collect();
        let parts = driver::parts(&self.config.get(), &gpus, record.cdi)?;
        let pages = self.pages_of(&record.id);
        let named = record.shim.as_deref().map(|name| shim_install::at(&self.paths.shim, name));
        let shim = named.as_ref().unwrap_or(&self.delivery);
        let by_cdi_alone = record.origin.claim().is_some();
        then(&DeliveryPlan { id: &record.id, gpus, pages: &pages, shim, parts, by_cdi_alone })
    }

    fn put_spec(&self, plan: &DeliveryPlan<'_>) -> Result<Put, AllocateError> {
        let spec = cdi::spec(plan, &self.config.get());
        let put = self.specs().put(plan.id, &spec)?;
        self.board.lift(CDI_DIRECTORY, "writable");
        if put == Put::Replaced {
            warn!(id = %plan.id, "something else lay where the CDI spec belongs; replaced");
        }
        self.whole.note(&self.specs().path(plan.id));
        Ok(put)
    }

    pub(super) fn remove_spec(&self, id: &AllocationId) {
        if let Err(error) = self.specs().remove(id) {
            warn!(%id, %error, "the CDI spec of a released allocation cannot be removed");
        }
    }

    /// At the start: no spec is there that is nobody's.
    pub(super) fn sweep_specs(&self) {
        let (records, catalogue) = (self.records.lock().all(), self.inventory.catalogue());
        // Nobody records who was handed a view.
        let views: BTreeSet<_> =
            catalogue.gpus.values().map(|sold| cdi::view_id(&sold.gpu)).collect();
        let kept = |id: &AllocationId| {
            views.contains(id) || records.get(id).is_some_and(|record| record.cdi)
        };
        for id in self.specs().sweep(kept) {
            info!(%id, "removed the CDI spec of an allocation that is no more");
        }
        if self.config.get().container.device_list_strategy.is_cdi() {
            self.check_directory();
        }
    }

    /// Names of CDI devices that show a GPU and grant nothing of it; the spec is there then, and stays.
    pub(crate) fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        let catalogue = self.inventory.catalogue();
        let unknown = || Refusal::UnknownGpu(uuid.to_owned());
        let gpu = &catalogue.gpus.get(uuid).ok_or_else(unknown)?.gpu;
        // One writer of specs at a time.
        let _writer = self.journal.writer();
        self.put_view(gpu)?;
        Ok(cdi::view_names(gpu, &self.config.get()))
    }

    pub(super) fn put_view(&self, gpu: &Gpu) -> Result<Put, AllocateError> {
        let config = self.config.get();
        let parts = driver::parts(&config, &[gpu], true)?;
        let (specs, id) = (self.specs(), cdi::view_id(gpu));
        let put = specs.put(&id, &cdi::view_spec(gpu, &parts, &config))?;
        self.whole.note(&specs.path(&id));
        Ok(put)
    }

    /// Says at once what every Allocate would say.
    pub(crate) fn check_directory(&self) {
        let config = self.config.get();
        let directory = &config.cdi.directory;
        let usable = std::fs::create_dir_all(directory)
            .and_then(|()| Ok(access(directory, AccessFlags::W_OK | AccessFlags::X_OK)?));
        self.board.keep(CDI_DIRECTORY, "writable", &usable, |error| {
            format!(
                "no container can start: cdi.directory {} cannot be written ({error}); mount it \
                 writable, or choose another that the container runtime reads",
                directory.display()
            )
        });
    }
}
