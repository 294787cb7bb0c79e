//! The agent: what front ends, jobs and views ask. It joins inventory, allocations and what is advertised; a
//! change of one that the other shows is passed on here.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_config::{Config, Current};
use tessera_gpu::health::Observation;
use tessera_kubelet::foreign_plugins::ForeignSale;
use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::gpu::Gpu;
use tessera_model::holding::Census;
use tessera_model::placement_reason::PlacementReason;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;
use tessera_rules::allocate::Ask;
use tessera_rules::preferred::{PlacementContext, preferred};
use tessera_store::{Ledger, OpenError, Opened};
use tessera_tenant::delivery::Delivery;
use tessera_view::change::{CordonResponse, QuotaResponse, ResetQuotaRequest, SetQuotaRequest};
use tracing::info;

use crate::advertised::Advertised;
use crate::allocations::steer::SteerError;
use crate::allocations::{AllocateError, Allocations, Found};
use crate::engines::Engine;
use crate::front_end::Meters;
use crate::incidents::Incidents;
use crate::inventory::{self, GpuSelection, Inventory, Lift};
use crate::journal::Journal;
use crate::status_board::StatusBoard;
use crate::trust::Trust;

#[derive(Debug)]
pub struct Agent {
    pub(crate) config: Current,
    pub journal: Arc<Journal>,
    pub inventory: Arc<Inventory>,
    pub allocations: Arc<Allocations>,
    pub advertised: Advertised,
    pub board: Arc<StatusBoard>,
    pub meters: Meters,
    /// What containers were refused, as of the last look, and when that was. Held from a look to its comparison, and before
    /// any lock of the order.
    pub(crate) incidents: Mutex<(Instant, Incidents)>,
    pub trust: Trust,
}

impl Agent {
    /// Opens the ledger, adopts what the file system knows and the ledger does not, and makes every
    /// page whole: all of it before kubelet hears of us. Blocking, within a runtime.
    pub fn open(
        current: impl Into<Current>,
        gpus: &[Gpu],
        delivery: Delivery,
        board: Arc<StatusBoard>,
    ) -> Result<Arc<Self>, OpenError> {
        Agent::open_with(current, gpus, delivery, board, Vec::new())
    }

    /// As [`Agent::open`], with engines beside pages and leases.
    pub(crate) fn open_with(
        current: impl Into<Current>,
        gpus: &[Gpu],
        delivery: Delivery,
        board: Arc<StatusBoard>,
        engines: Vec<Arc<dyn Engine>>,
    ) -> Result<Arc<Self>, OpenError> {
        let current = current.into();
        let config = current.get();
        let (mut ledger, opened) = Ledger::open(&config.paths.ledger, config.ledger.fsync)?;
        note_opened(&opened, &config, &board);
        let (list, generation, broken) = ledger.load().map_err(|error| OpenError::Io {
            path: config.paths.ledger.clone(),
            error: error.to_string(),
        })?;
        for text in broken {
            board.note(format!("ledger: {text}; left out"));
        }
        let cordons = ledger.cordons().unwrap_or_else(|error| {
            board.note(format!("what is cordoned is not known: {error}"));
            BTreeMap::new()
        });
        let health = ledger.health(inventory::unreadable).unwrap_or_else(|error| {
            board.note(format!("what ailed GPUs before is not known: {error}"));
            BTreeMap::new()
        });
        let found = Found::of(&mut ledger, (list, generation), &config, &board);
        let journal = Arc::new(Journal::new(ledger, found.generation));
        let inventory =
            Arc::new(Inventory::new(current.clone(), Arc::clone(&journal), gpus, cordons, health));
        let allocations = Arc::new(Allocations::new(
            current.clone(),
            delivery,
            found,
            (Arc::clone(&journal), Arc::clone(&inventory), Arc::clone(&board)),
            engines,
        ));
        let agent = Arc::new(Agent {
            advertised: Advertised::new(Arc::clone(&inventory), Arc::clone(&allocations)),
            config: current,
            journal,
            inventory,
            allocations,
            board,
            meters: Meters::default(),
            incidents: Mutex::new((Instant::now(), Incidents::default())),
            trust: Trust::default(),
        });
        agent.allocations.restore();
        agent.advertised.refresh();
        Ok(agent)
    }

    /// The configuration in force. It may be another at the next call.
    pub fn config(&self) -> Arc<Config> {
        self.config.get()
    }

    /// `Allocate` of a resource: all containers of the request or none. Blocking.
    pub fn allocate(
        &self,
        resource: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        let ask =
            |ids: &Vec<String>| Ask::Replicas { resource: resource.to_owned(), ids: ids.clone() };
        self.grant(&containers.iter().map(ask).collect::<Vec<_>>())
    }

    /// `GetPreferredAllocation`: chooses `size` of `available`, all of `must_include` among them, and remembers why
    /// until the Allocate that follows.
    pub fn prefer(
        &self,
        resource: &str,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Vec<String> {
        let catalogue = self.inventory.catalogue();
        let topology = self.inventory.topology();
        let suspects = self.inventory.suspects();
        let terms = catalogue.resources.get(resource);
        let context = PlacementContext {
            placement: terms.map_or(self.config().share.placement, |terms| terms.placement),
            split: terms.map_or(self.config().share.split, |terms| terms.split),
            topology: &topology,
            suspect: &|uuid| suspects.contains(uuid),
        };
        let chosen = preferred(available, must_include, size, &context);
        let tell = |uuid: &str| {
            let health = if suspects.contains(uuid) { "suspect" } else { "healthy" };
            let numa = catalogue.gpus.get(uuid).and_then(|sold| sold.gpu.numa_node);
            let numa = numa.map_or_else(String::new, |node| format!(", NUMA node {node}"));
            format!(", {health}{numa}")
        };
        let rule = (context.placement, context.split);
        let placed = PlacementReason::by_preference(available, &chosen, rule, &tell);
        self.allocations.prefer(resource, placed);
        chosen
    }

    /// `PreStartContainer`; see [`Allocations::pre_start`]. Blocking.
    pub fn pre_start(&self, resource: &str, ids: &[String]) -> Result<(), AllocateError> {
        let result = self.allocations.pre_start(resource, ids);
        self.advertised.refresh();
        result
    }

    /// One round of housekeeping; see [`Allocations::reconcile`]. Blocking.
    pub fn reconcile(&self, kubelet: &Census, grace: Duration) {
        self.board.forget_refused(kubelet);
        if self.allocations.reconcile(kubelet, grace) {
            self.advertised.refresh();
        }
    }

    /// Offers again what allocations have let go of that were forced below their use. Blocking.
    pub fn settle_owed(&self) {
        if self.allocations.settle_owed() {
            self.advertised.refresh();
        }
    }

    pub fn set_quota(
        &self,
        request: &SetQuotaRequest,
        actor: Actor,
    ) -> Result<QuotaResponse, SteerError> {
        let SetQuotaRequest { target, force, dry_run, reason, .. } = request.clone();
        let order = ResetQuotaRequest { target, force, dry_run, reason };
        Ok(self.steered(self.allocations.steer(&order, Some(request), actor)?))
    }

    pub fn reset_quota(
        &self,
        request: &ResetQuotaRequest,
        actor: Actor,
    ) -> Result<QuotaResponse, SteerError> {
        Ok(self.steered(self.allocations.steer(request, None, actor)?))
    }

    fn steered(&self, response: QuotaResponse) -> QuotaResponse {
        if !response.dry_run {
            // Kubelet hears of the room that is gone before anybody can use it.
            self.advertised.refresh();
            let id = AllocationId::parse(&response.allocation_id);
            id.iter().for_each(|id| self.allocations.apply_limits(id));
        }
        response
    }

    pub fn cordon(
        &self,
        gpu: Option<&str>,
        reason: Option<String>,
        actor: Actor,
    ) -> Result<CordonResponse, SteerError> {
        let change = self.inventory.cordon(gpu, reason, actor)?;
        Ok(self.cordoned(change))
    }

    pub fn uncordon(
        &self,
        lift: Lift<'_>,
        reason: Option<String>,
        actor: Actor,
    ) -> Result<CordonResponse, SteerError> {
        let change = self.inventory.uncordon(lift, reason, actor)?;
        Ok(self.cordoned(change))
    }

    fn cordoned(&self, change: CordonResponse) -> CordonResponse {
        self.advertised.refresh();
        let changed = &change.changed;
        let node = changed.iter().any(|uuid| uuid == Cordon::NODE);
        let is_on = |uuid: &String| node || changed.contains(uuid);
        let records = self.allocations.all();
        let live = records.values().filter(|record| record.is_live());
        let running =
            live.filter(|record| record.grants.iter().any(|g| is_on(&g.uuid)) || node).count();
        drop(records);
        CordonResponse { running: u32::try_from(running).unwrap_or(u32::MAX), ..change }
    }

    /// Takes what the driver reports of a GPU. Gives what changed by it, for
    /// [`Inventory::save_health`].
    pub fn observe(&self, observation: &Observation) -> Vec<Event> {
        let (events, changed) = self.inventory.observe(observation);
        if changed {
            self.advertised.refresh();
        }
        events
    }

    /// Takes what others sell of ours; see [`Inventory::withheld`]. Blocking.
    pub fn set_sold_by_others(&self, found: BTreeMap<String, ForeignSale>) {
        self.inventory.set_sold_by_others(found);
        self.advertised.refresh();
    }

    /// Judges what is asked for, enters it in the ledger, and makes what the tenants need to run: all of it or nothing. What
    /// each container is given, in the order of the asks; claims get CDI devices alone. A share of a claim that is in the
    /// ledger already stays as it is. Blocking, within a runtime.
    pub fn grant(&self, asks: &[Ask]) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        let granted = self.allocations.grant(asks);
        if granted.as_ref().err().is_none_or(|error| error.refusal().is_none()) {
            self.advertised.refresh();
        }
        granted
    }

    /// Ends allocations. Those that are not known have ended already. Blocking, within a runtime.
    pub fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError> {
        self.allocations.release(ids)?;
        self.advertised.refresh();
        Ok(())
    }

    pub fn claims(&self) -> Vec<Arc<Record>> {
        let mut records = self.allocations.records();
        records.retain(|record| record.is_live() && record.origin.claim().is_some());
        records
    }

    /// Names of CDI devices that show a GPU to a container and grant nothing of it: for monitors. What they need is
    /// on disk then, and stays. Blocking.
    pub fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        self.allocations.view(uuid)
    }

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
        self.journal.audit([Event { by, reason: Some(why), ..event }]);
    }

    /// The end: tenants need not wait for a heartbeat that will not come, and the next plugin need not
    /// wait for the ledger. Blocking.
    pub fn close(&self) {
        self.inventory.save_health(Vec::new(), true);
        self.allocations.pages.heartbeat(0);
        if let Some(arbiter) = self.allocations.arbiter() {
            arbiter.stop();
        }
        self.journal.close();
    }
}

fn note_opened(opened: &Opened, config: &Config, board: &StatusBoard) {
    let note = match opened {
        Opened::Rebuilt { kept_as, reason } => format!(
            "the ledger was unreadable ({reason}); a new one was made, the old one is kept as {}",
            kept_as.display()
        ),
        Opened::Lost { found } => format!(
            "the ledger {} {found}; a new one was made. Cordons and the audit trail are lost: \
             cordon again what must not be given out",
            config.paths.ledger.display()
        ),
        Opened::Existing | Opened::Created => return,
    };
    board.note(note);
}
