//! The life of an allocation: Allocate, container starts, and release. All of it blocks on the
//! ledger's disk: call it on a blocking thread, within a runtime.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tracing::{error, info, warn};

use super::{AllocateError, Allocations};
use crate::journal::Writer;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::clock::{monotonic_ns, unix_ms};
use tessera_model::placement_reason::PlacementReason;
use tessera_model::record::{Record, State};
use tessera_rules::allocate;
use tessera_rules::allocate::{Catalogue, Plan};
use tessera_rules::reconcile;
use tessera_rules::reconcile::{Action, Kubelet};
use tessera_store::Change;
use tessera_tenant::regions;
use tessera_tenant::regions::{Mode, Outcome, Region, RegionError};
use tessera_tenant::shim_install;

impl Allocations {
    /// `Allocate` of a resource: all containers of the request or none.
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing was granted then.
    pub(crate) fn allocate(
        &self,
        resource: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        let mut writer = self.journal.writer();
        let catalogue = self.inventory.catalogue();
        let plan = |ids: &Vec<String>| allocate::plan(&catalogue, resource, ids);
        let plans = containers.iter().map(plan).collect::<Result<Vec<Plan>, _>>()?;
        let records = self.commit(&mut writer, &catalogue, &plans)?;
        let mut responses = Vec::with_capacity(records.len());
        for record in &records {
            match self.materialise(&mut writer, &catalogue, record) {
                Ok(response) => responses.push(response),
                Err(error) => {
                    self.withdraw(&mut writer, &records);
                    return Err(error);
                }
            }
            info!(id = %record.id, resource, replicas = ?record.replicas, "allocated");
        }
        Ok(responses)
    }

    /// Plans become records in the ledger and in memory: all of them or none.
    fn commit(
        &self,
        writer: &mut Writer,
        catalogue: &Catalogue,
        plans: &[Plan],
    ) -> Result<Vec<Arc<Record>>, AllocateError> {
        let shim = shim_install::name_of(&self.delivery);
        self.ensure_shim(shim.as_deref())?;
        let mut change = Change::default();
        for plan in plans {
            self.inventory.check_cordons(plan)?;
            self.check_room(catalogue, plan, &change)?;
            let placed = self.take_preference(plan);
            let reason = placed.of_allocation(&plan.replicas, &plan.grants);
            let (shim, placed) = (shim.clone(), Some(placed));
            let record = Record { shim, placed, ..self.new_generation(writer, plan) };
            self.supersede(&record, &mut change);
            change.put_because(record, What::Allocated, reason, unix_ms());
        }
        writer.ledger.commit(&change)?;
        // What else was stored are those that they supersede, which are parked.
        let stored = self.store(&change).into_iter();
        Ok(stored.filter(|record| record.state == State::Allocated).collect())
    }

    /// Pages, time and what the container is handed, of a record that was just committed.
    fn materialise(
        &self,
        writer: &mut Writer,
        catalogue: &Catalogue,
        record: &Arc<Record>,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        self.make_pages(writer, record, Mode::Fresh)?;
        self.deliver(catalogue, record)
    }

    /// `PreStartContainer`: makes the allocation the live one of its replicas, its pages whole, and
    /// takes back what dead processes held.
    ///
    /// # Errors
    /// Replicas that never were ours, pages that cannot be made (without them the container's first
    /// driver call would fail), or a shim that is gone (without it there would be no quota). Never for what the ledger's disk or the identity says.
    pub(crate) fn pre_start(&self, resource: &str, ids: &[String]) -> Result<(), AllocateError> {
        let mut writer = self.journal.writer();
        let id = AllocationId::of(resource, ids.iter().map(String::as_str));
        let known = self.records.lock().get(&id).cloned();
        let mut record = match known {
            Some(record) if !record.replicas.is_empty() => Record::clone(&record),
            // Adopted from its pages: kubelet says now what it is, and the limits are what they were.
            Some(record) => {
                let replicas: BTreeSet<&String> = ids.iter().collect();
                let replicas = replicas.into_iter().cloned().collect();
                Record { resource: resource.to_owned(), replicas, ..Record::clone(&record) }
            }
            // Released, or record and pages were lost. What kubelet has admitted gets its quota.
            None => {
                let plan = allocate::plan_for_running(&self.inventory.catalogue(), resource, ids)?;
                let record = self.new_generation(&mut writer, &plan);
                Record { cdi: record.cdi || self.specs().exists(&id), ..record }
            }
        };
        self.ensure_shim(record.shim.as_deref())?;
        let mut change = Change::default();
        self.revive(&mut record, &mut change);
        record.state = State::Started;
        record.started_unix_ms = unix_ms();
        self.supersede(&record, &mut change);
        change.put(record.clone(), What::Started, unix_ms());
        if let Err(error) = writer.ledger.commit(&change) {
            // The container was admitted: its quota holds by its pages, the record can wait.
            error!(%error, "a container's start is not recorded");
            self.board.note(error.to_string());
        }
        self.store(&change);
        self.absences.lock().started(&id, Instant::now());
        let record = Arc::new(record);
        let made = self.make_pages(&mut writer, &record, Mode::Ensure);
        let delivered = self.ensure_delivered(&record);
        drop(writer);
        if let Ok(region) = &made {
            // Looking recovers.
            let _ = region.recover_and_snapshot();
        }
        self.started.notify_one();
        made?;
        delivered
    }

    /// One round of housekeeping: names holders, completes adopted records, releases what nobody
    /// holds. True if that changed records.
    pub(crate) fn reconcile(&self, kubelet: Kubelet<'_>, grace: Duration) -> bool {
        let mut writer = self.journal.writer();
        let records = self.records.lock().all();
        let in_use = |id: &AllocationId| {
            let region = self.regions.lock().get(id).cloned();
            region.is_some_and(|region| region.in_use())
        };
        let mut absences = self.absences.lock();
        let actions =
            reconcile::decide(&records, kubelet, &in_use, &mut absences, grace, Instant::now());
        drop(absences);
        let mut change = Change::default();
        for action in actions {
            match action {
                Action::Name(id, holder) => {
                    let Some(record) = records.get(&id) else { continue };
                    change.put.push(Record { holder: Some(holder), ..Record::clone(record) });
                }
                Action::Complete { id, resource, replicas, holder } => {
                    let Some(record) = records.get(&id) else { continue };
                    info!(%id, resource, ?replicas, "kubelet named the replicas of adopted pages");
                    let holder = Some(holder);
                    let record = Record::clone(record);
                    change.put.push(Record { resource, replicas, holder, ..record });
                }
                Action::Release(id) => {
                    let Some(record) = records.get(&id) else { continue };
                    info!(%id, holder = ?record.holder, "released");
                    change.put(Record::clone(record), What::Released, unix_ms());
                    change.put.pop();
                    change.remove.push(id);
                }
            }
        }
        if change.is_empty() {
            return false;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            // Tried again at the next round.
            warn!(%error, "housekeeping waits");
            self.board.note(error.to_string());
            return false;
        }
        self.store(&change);
        for id in &change.remove {
            self.stop_arbitrating(id);
            self.regions.lock().remove(id);
            // What was said of it is nobody's concern any more.
            self.board.forget(id.as_str());
            if let Err(error) = regions::remove(self.pages(), id) {
                warn!(%id, %error, "pages of a released allocation cannot be removed");
            }
            self.remove_spec(id);
        }
        true
    }

    /// What was preferred for this plan, if kubelet asked just before.
    fn take_preference(&self, plan: &Plan) -> PlacementReason {
        let last = self.preferences.lock().remove(&plan.resource);
        let fits = last.filter(|placed| placed.preferred.len() == plan.replicas.len());
        fits.unwrap_or_else(PlacementReason::unasked)
    }

    fn new_generation(&self, writer: &mut Writer, plan: &Plan) -> Record {
        writer.generation += 1;
        let before = self.records.lock().get(&plan.id).cloned();
        Record {
            resource: plan.resource.clone(),
            replicas: plan.replicas.clone(),
            allocated_unix_ms: unix_ms(),
            predecessor: before.and_then(|record| record.holder.clone()),
            cdi: self.config.get().container.device_list_strategy.is_cdi(),
            ..Record::new(plan.id.clone(), writer.generation, plan.grants.clone())
        }
    }

    /// Takes a committed change over into memory; its records as they are kept there.
    pub(super) fn store(&self, change: &Change) -> Vec<Arc<Record>> {
        let mut records = self.records.lock();
        for id in &change.remove {
            records.remove(id);
        }
        let put: Vec<Arc<Record>> = change.put.iter().cloned().map(Arc::new).collect();
        for record in &put {
            records.insert(Arc::clone(record));
        }
        put
    }

    /// The pages of a record, whole and arbitrated.
    fn make_pages(
        &self,
        writer: &mut Writer,
        record: &Arc<Record>,
        mode: Mode,
    ) -> Result<Arc<Region>, RegionError> {
        let id = &record.id;
        let (region, outcome) = match self.open_pages(record, mode) {
            // Another tenant may have grown its usage file, which looking undoes.
            Err(error) if error.is_full() => {
                let _ = self.inspect();
                self.open_pages(record, mode)?
            }
            result => result?,
        };
        region.heartbeat(monotonic_ns());
        self.arbitrate(id, &region);
        if outcome.repaired {
            info!(%id, "pages repaired");
        }
        if outcome.kept {
            warn!(%id, "a process of the tenant before still runs; its pages are kept");
            let events = vec![Event::of(record, What::PagesKept, unix_ms())];
            if let Err(error) = writer.ledger.commit(&Change { events, ..Change::default() }) {
                warn!(%error, "the event is not recorded");
            }
        }
        Ok(region)
    }

    fn open_pages(
        &self,
        record: &Record,
        mode: Mode,
    ) -> Result<(Arc<Region>, Outcome), RegionError> {
        let open = self.regions.lock().get(&record.id).cloned();
        if let Some(region) = open {
            let outcome = region.renew(record, mode, self.shim_abi(record))?;
            return Ok((region, outcome));
        }
        let (region, outcome) = Region::create(self.pages(), record, mode, self.shim_abi(record))?;
        region.observed().attach(&self.bell);
        self.regions.lock().insert(record.id.clone(), Arc::clone(&region));
        Ok((region, outcome))
    }

    /// Opens pages that could not be opened before, because their tenant had a lease on them, kept us
    /// from changing them, or the file system was full.
    pub fn reopen(&self) {
        let missing: Vec<Arc<Record>> = {
            let (records, regions) = (self.records.lock(), self.regions.lock());
            records.values().filter(|record| !regions.contains_key(&record.id)).cloned().collect()
        };
        if missing.is_empty() {
            return;
        }
        let mut writer = self.journal.writer();
        for record in missing {
            // It may have changed, or ended, since.
            let Some(record) = self.record(&record.id) else { continue };
            let id = &record.id;
            match self.make_pages(&mut writer, &record, Mode::Adopt) {
                Ok(_) => info!(%id, "pages are open again"),
                Err(error) => warn!(%id, %error, "pages cannot be opened"),
            }
        }
    }

    /// Takes back allocations whose pages could not be made.
    fn withdraw(&self, writer: &mut Writer, records: &[Arc<Record>]) {
        let change = Change {
            remove: records.iter().map(|record| record.id.clone()).collect(),
            ..Change::default()
        };
        if let Err(error) = writer.ledger.commit(&change) {
            warn!(%error, "a failed allocation stays in the ledger until it is released");
            return;
        }
        self.store(&change);
        for record in records {
            self.remove_spec(&record.id);
            self.stop_arbitrating(&record.id);
            let region = self.regions.lock().remove(&record.id);
            // Pages without a record would be adopted, and counted, at the next start: right if
            // somebody still uses them.
            if region.is_none_or(|region| !region.in_use())
                && let Err(error) = regions::remove(self.pages(), &record.id)
            {
                warn!(id = %record.id, %error, "pages of a failed allocation cannot be removed");
            }
        }
    }
}
