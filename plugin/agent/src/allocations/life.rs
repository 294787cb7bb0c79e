//! The life of an allocation: from an ask to a tenant (plan, commit, materialise), container starts, holders, and release
//! of what nobody holds. All of it blocks on the ledger's disk: call it on a blocking thread, within a runtime.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::holding::Census;
use tessera_model::percent::format_cores;
use tessera_model::placement_reason::PlacementReason;
use tessera_model::quantity::format_bytes;
use tessera_model::record::{Record, State};
use tessera_model::replica;
use tessera_rules::allocate::{self, Ask, Catalogue, Refusal};
use tessera_rules::reconcile::{self, Round};
use tessera_store::Change;
use tessera_tenant::regions::Mode;
use tessera_tenant::shim_install;
use tracing::{info, warn};

use super::Allocations;
use crate::engines::EngineError;
use crate::front_end::AllocateError;
use crate::journal::Writer;

impl Allocations {
    /// `PreStartContainer`: makes the allocation the live one of its replicas, its pages whole, and
    /// takes back what dead processes held.
    ///
    /// Errors:
    /// Replicas that never were ours, a start without room (see [`Allocations::check_start`]), pages that cannot be made (without them the container's first
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
                let planned =
                    allocate::plan_for_running(&self.inventory.catalogue(), resource, ids)?;
                let record = self.new_generation(&mut writer, planned);
                self.check_start(&record)?;
                Record { cdi: record.cdi || self.specs().exists(&id), ..record }
            }
        };
        self.ensure_shim(record.shim.as_deref())?;
        let mut change = Change::default();
        self.revive(&mut record, &mut change)?;
        record.state = State::Started;
        record.started_unix_ms = unix_ms();
        self.supersede(&record, &mut change);
        change.put(record.clone(), What::Started, unix_ms());
        if let Err(error) = writer.ledger.commit(&change) {
            // The container was admitted: its quota holds by its pages, the record can wait.
            self.board.note(format!("a container's start is not recorded: {error}"));
        }
        self.store(&change);
        self.absences.lock().started(&id, Instant::now());
        let admitted = self.admit_recorded(&mut writer, &record, Mode::Ensure);
        let delivered = self.ensure_delivered(&record);
        drop(writer);
        if admitted.is_ok()
            && let Some(region) = self.pages.get(&id)
        {
            // Looking recovers.
            let _ = region.recover_and_snapshot();
        }
        self.started.notify_one();
        admitted?;
        delivered.map(drop)
    }

    /// One round of housekeeping: names holders, completes adopted records, releases what nobody
    /// holds. True if that changed records.
    pub(crate) fn reconcile(&self, kubelet: &Census, grace: Duration) -> bool {
        let mut writer = self.journal.writer();
        let records = self.records.lock().clone();
        let in_use = |id: &AllocationId| self.pages.is_used(id);
        let mut absences = self.absences.lock();
        let Round { named, released } =
            reconcile::decide(&records, kubelet, &in_use, &mut absences, grace, Instant::now());
        drop(absences);
        let mut change = Change::default();
        for mut record in named {
            let Some(before) = records.get(&record.id) else { continue };
            if before.replicas != record.replicas {
                let (id, resource, replicas) = (&record.id, &record.resource, &record.replicas);
                info!(%id, resource, ?replicas, "kubelet named the replicas of adopted pages");
            }
            // No PreStartContainer says that a claim's container starts.
            let starts = record.origin.claim().is_some() && record.state == State::Allocated;
            if starts && record.holder != before.holder {
                let now = unix_ms();
                let started = Arc::make_mut(&mut record);
                (started.state, started.started_unix_ms) = (State::Started, now);
                change.events.push(Event::of(started, What::Started, now));
            }
            change.put.push(Arc::unwrap_or_clone(record));
        }
        for record in released.iter().filter_map(|id| records.get(id)) {
            info!(id = %record.id, "released by {}", record.name());
            change.release(record, unix_ms());
        }
        if change.is_empty() {
            return false;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            // Tried again at the next round.
            self.board.note(format!("housekeeping waits: {error}"));
            return false;
        }
        self.store(&change);
        change.remove.iter().for_each(|id| self.dismiss(id));
        self.clear_away(&change);
        true
    }

    /// Opens pages that could not be opened before, because their tenant had a lease on them, kept us
    /// from changing them, or the file system was full.
    pub fn reopen(&self) {
        let missing: Vec<Arc<Record>> = {
            let (records, regions) = (self.records.lock(), self.pages.lock());
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
            // What keeps them closed is said in `status`.
            if self.admit_recorded(&mut writer, &record, Mode::Adopt).is_ok() {
                info!(%id, "pages are open again");
            }
        }
    }
}

impl Allocations {
    pub(crate) fn grant(
        &self,
        asks: &[Ask],
    ) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        // Until all is delivered: what is replaced still has its old limits in its pages.
        let mut writer = self.journal.writer();
        // One, so that each ask is judged by one configuration.
        let catalogue = self.inventory.catalogue();
        let stored = self.commit(&mut writer, &catalogue, asks)?;
        let deliver = |(record, mode): &(Arc<Record>, Mode)| {
            self.ensure_shim(record.shim.as_deref())?;
            self.admit_recorded(&mut writer, record, *mode)?;
            let delivered = self.deliver(&catalogue, record)?;
            let Record { id, resource, replicas, origin, .. } = &**record;
            match origin.claim() {
                Some(claim) => info!(%id, %claim, again = *mode == Mode::Adopt, "prepared"),
                None => info!(%id, resource, replicas = replica::grouped(replicas), "allocated"),
            }
            Ok(delivered)
        };
        let delivered: Result<Vec<_>, _> = stored.iter().map(deliver).collect();
        if delivered.is_err() {
            self.withdraw(&mut writer, &stored);
        }
        delivered
    }

    /// Enters what is asked for in the ledger, all of it or nothing: room, cordons and the seller of each GPU are judged
    /// here, beside all that is live. What it stored, in the order of the asks, with new pages or, where it was there
    /// before, with those that it has.
    fn commit(
        &self,
        writer: &mut Writer,
        catalogue: &Catalogue,
        asks: &[Ask],
    ) -> Result<Vec<(Arc<Record>, Mode)>, AllocateError> {
        let shim = shim_install::name_of(&self.delivery);
        self.ensure_shim(shim.as_deref())?;
        let mut change = Change::default();
        let mut order = Vec::with_capacity(asks.len());
        for ask in asks {
            if let Some(id) = self.known(ask, &mut change) {
                order.push((id, Mode::Adopt));
                continue;
            }
            let planned =
                self.planned(catalogue, ask, &change).map_err(|refusal| match ask.request() {
                    Some(request) => {
                        AllocateError::Request { request: request.to_owned(), refusal }
                    }
                    None => AllocateError::Refused(refusal),
                })?;
            let record = Record { shim: shim.clone(), ..self.new_generation(writer, planned) };
            let (record, reason) = self.placed(record);
            self.supersede(&record, &mut change);
            order.push((record.id.clone(), Mode::Fresh));
            change.put_because(record, What::Allocated, reason, unix_ms());
        }
        if !change.is_empty() {
            writer.ledger.commit(&change)?;
            self.store(&change);
        }
        let stored = order.into_iter().filter_map(|(id, mode)| Some((self.record(&id)?, mode)));
        Ok(stored.collect())
    }

    /// What an ask comes to, if there is room for it beside what is live and what `change` makes so.
    fn planned(
        &self,
        catalogue: &Catalogue,
        ask: &Ask,
        change: &Change,
    ) -> Result<Record, Refusal> {
        let planned = match ask {
            Ask::Replicas { resource, ids } => allocate::plan(catalogue, resource, ids)?,
            Ask::Share(share) => allocate::plan_share(catalogue, share)?,
            Ask::Recorded(id) => return Err(Refusal::Ended(id.clone())),
        };
        self.inventory.check_cordons(&planned)?;
        self.check_front_end(catalogue, &planned)?;
        self.check_room(catalogue, &planned, change)?;
        Ok(planned)
    }

    /// The record of a claim's share that is in the ledger already, if it is: it stays as it is. One that was adopted
    /// from its pages alone, because its record was lost, becomes the claim's: nothing else has such an id.
    fn known(&self, ask: &Ask, change: &mut Change) -> Option<AllocationId> {
        let (id, origin) = match ask {
            Ask::Share(share) if share.origin.claim().is_some() => (&share.id, Some(&share.origin)),
            Ask::Recorded(id) => (id, None),
            Ask::Share(_) | Ask::Replicas { .. } => return None,
        };
        let known = self.record(id).filter(|record| record.is_live());
        if let (Some(known), Some(origin)) = (&known, origin)
            && known.origin.claim().is_none()
        {
            let origin = origin.clone();
            change.put.push(Record { origin, cdi: true, ..Record::clone(known) });
        }
        known.map(|known| known.id.clone())
    }

    /// Why it lies where it does, in the record and as a sentence.
    fn placed(&self, record: Record) -> (Record, String) {
        if let Some(claim) = record.origin.claim() {
            let got = record.grants.iter().map(|grant| {
                let (memory, cores) = (grant.memory_limit_bytes, grant.cores_millis);
                let (memory, cores) = (format_bytes(memory), format_cores(cores));
                format!("{memory} and {cores} of GPU {}", grant.uuid)
            });
            let got = got.collect::<Vec<_>>().join(", ");
            let reason = format!(
                "{claim} asked for {}, and the scheduler allocated {got}: the first device with so much \
                 left",
                claim.asked_text()
            );
            return (record, reason);
        }
        // What was preferred, if kubelet asked just before.
        let last = self.preferences.lock().remove(&record.resource);
        let fits = last.filter(|placed| placed.preferred.len() == record.replicas.len());
        let placed = fits.unwrap_or_else(PlacementReason::unasked);
        let reason = placed.of_allocation(&record.replicas, &record.grants);
        (Record { placed: Some(placed), ..record }, reason)
    }

    pub(super) fn new_generation(&self, writer: &mut Writer, planned: Record) -> Record {
        writer.generation += 1;
        let before = self.record(&planned.id);
        // Kubelet's DRA manager knows CDI devices alone.
        let cdi = planned.origin.claim().is_some()
            || self.config.get().container.device_list_strategy.is_cdi();
        Record {
            generation: writer.generation,
            allocated_unix_ms: unix_ms(),
            predecessor: before.and_then(|record| record.holder.clone()),
            cdi,
            ..planned
        }
    }

    fn withdraw(&self, writer: &mut Writer, stored: &[(Arc<Record>, Mode)]) {
        let new = stored.iter().filter(|(_, mode)| *mode == Mode::Fresh);
        let ids: Vec<AllocationId> = new.map(|(record, _)| record.id.clone()).collect();
        if ids.is_empty() {
            return;
        }
        let change = Change { remove: ids, ..Change::default() };
        if let Err(error) = writer.ledger.commit(&change) {
            warn!(%error, "a failed allocation stays in the ledger until it is released");
            return;
        }
        self.store(&change);
        for id in &change.remove {
            self.remove_spec(id);
            self.dismiss(id);
        }
    }

    /// Has the engines hold a tenant; what they found goes to the audit trail.
    pub(super) fn admit_recorded(
        &self,
        writer: &mut Writer,
        record: &Record,
        mode: Mode,
    ) -> Result<(), EngineError> {
        if self.admit(record, mode)?.kept {
            writer.note(vec![Event::of(record, What::PagesKept, unix_ms())]);
        }
        Ok(())
    }

    pub(crate) fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError> {
        let mut writer = self.journal.writer();
        let mut change = Change::default();
        for record in ids.iter().filter_map(|id| self.record(id)) {
            info!(id = %record.id, "released by {}", record.name());
            change.release(&record, unix_ms());
        }
        if change.is_empty() {
            return Ok(());
        }
        // Before the ledger forgets it: pages without a record would be adopted at the next start, as nobody's.
        // Where the commit fails, or the plugin is killed before it, the pages are made again for the record.
        change.remove.iter().for_each(|id| self.dismiss(id));
        writer.ledger.commit(&change)?;
        self.store(&change);
        self.clear_away(&change);
        Ok(())
    }

    /// Removes what is left of allocations that were released, once the engines have ended with them.
    pub(super) fn clear_away(&self, released: &Change) {
        for id in &released.remove {
            // What was said of it is nobody's concern any more.
            self.board.forget(id.as_str());
            self.remove_spec(id);
        }
    }

    pub(super) fn store(&self, change: &Change) {
        let mut records = self.records.lock();
        for id in &change.remove {
            records.remove(id);
        }
        let put = change.put.iter().cloned();
        records.extend(put.map(|record| (record.id.clone(), Arc::new(record))));
    }
}
