//! From an ask to a tenant: plan, commit, materialise; and release. All of it blocks on the ledger's disk: call it
//! on a blocking thread, within a runtime.

use std::sync::Arc;

use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::percent::format_cores;
use tessera_model::placement_reason::PlacementReason;
use tessera_model::quantity::format_bytes;
use tessera_model::record::Record;
use tessera_rules::allocate::{self, Catalogue};
use tessera_rules::ask::{Ask, Plan};
use tessera_rules::refusal::Refusal;
use tessera_rules::share_plan;
use tessera_store::Change;
use tessera_system::locks::RankedGuard;
use tessera_tenant::regions::Mode;
use tessera_tenant::shim_install;
use tracing::{info, warn};

use super::Allocations;
use crate::engines::EngineError;
use crate::front_end::{AllocateError, Committed, Delivered};
use crate::journal::Writer;

/// Plans that are in the ledger, under its writer; see [`crate::front_end::Transaction`].
pub(crate) struct Granting<'a> {
    allocations: &'a Allocations,
    writer: RankedGuard<'a, Writer>,
    committed: Vec<Committed>,
    is_done: bool,
}

impl Granting<'_> {
    /// See [`crate::front_end::Transaction::committed`].
    pub(crate) fn committed(&self) -> &[Committed] {
        &self.committed
    }

    /// See [`crate::front_end::Transaction::materialise`].
    pub(crate) fn materialise(mut self) -> Result<Vec<Delivered>, AllocateError> {
        let catalogue = self.allocations.inventory.catalogue();
        let mut delivered = Vec::with_capacity(self.committed.len());
        for one in &self.committed {
            delivered.push(self.allocations.materialise(&mut self.writer, &catalogue, one)?);
            let Record { id, resource, replicas, origin, .. } = &*one.record;
            match origin.claim() {
                Some(claim) => info!(%id, %claim, again = !one.is_new, "prepared"),
                None => info!(%id, resource, ?replicas, "allocated"),
            }
        }
        self.is_done = true;
        Ok(delivered)
    }
}

impl Drop for Granting<'_> {
    /// Takes back what is new; what was there before stays.
    fn drop(&mut self) {
        let new = self.committed.iter().filter(|one| one.is_new && !self.is_done);
        let ids: Vec<AllocationId> = new.map(|one| one.record.id.clone()).collect();
        if ids.is_empty() {
            return;
        }
        let change = Change { remove: ids, ..Change::default() };
        if let Err(error) = self.writer.ledger.commit(&change) {
            warn!(%error, "a failed allocation stays in the ledger until it is released");
            return;
        }
        self.allocations.store(&change);
        for id in &change.remove {
            self.allocations.remove_spec(id);
            self.allocations.dismiss(id);
        }
    }
}

impl Allocations {
    /// See [`crate::front_end::FrontDoor::plan`].
    pub(crate) fn plan(&self, ask: &Ask) -> Result<Plan, Refusal> {
        let catalogue = self.inventory.catalogue();
        match ask {
            Ask::Replicas { resource, ids } => allocate::plan(&catalogue, resource, ids),
            Ask::Share(share) => share_plan::plan(&catalogue, share),
            Ask::Recorded(id) => self
                .record(id)
                .filter(|record| record.is_live())
                .map(|record| Plan::of(&record))
                .ok_or_else(|| Refusal::Ended(id.clone())),
        }
    }

    /// See [`crate::front_end::FrontDoor::commit`].
    pub(crate) fn commit(&self, plans: &[Plan]) -> Result<Granting<'_>, AllocateError> {
        let mut writer = self.journal.writer();
        let catalogue = self.inventory.catalogue();
        let shim = shim_install::name_of(&self.delivery);
        self.ensure_shim(shim.as_deref())?;
        let mut change = Change::default();
        let mut order = Vec::with_capacity(plans.len());
        for plan in plans {
            if let Some(id) = self.claimed(plan, &mut change) {
                order.push((id, false));
                continue;
            }
            self.inventory.check_cordons(plan)?;
            self.check_front_end(&catalogue, plan)?;
            self.check_room(&catalogue, plan, &change)?;
            let record = Record { shim: shim.clone(), ..self.new_generation(&mut writer, plan) };
            let (record, reason) = self.placed(record, plan);
            self.supersede(&record, &mut change);
            order.push((record.id.clone(), true));
            change.put_because(record, What::Allocated, reason, unix_ms());
        }
        if !change.is_empty() {
            writer.ledger.commit(&change)?;
            self.store(&change);
        }
        let committed = |(id, is_new)| Some(Committed { record: self.record(&id)?, is_new });
        let committed = order.into_iter().filter_map(committed).collect();
        Ok(Granting { allocations: self, writer, committed, is_done: false })
    }

    /// The record of a claim's share that is in the ledger already, if it is. One that was adopted from its pages
    /// alone, because its record was lost, becomes the claim's: nothing else has such an id.
    fn claimed(&self, plan: &Plan, change: &mut Change) -> Option<AllocationId> {
        plan.origin.claim()?;
        let known = self.record(&plan.id).filter(|record| record.is_live())?;
        if known.origin.claim().is_none() {
            let origin = plan.origin.clone();
            change.put.push(Record { origin, cdi: true, ..Record::clone(&known) });
        }
        Some(plan.id.clone())
    }

    /// Why it lies where it does, in the record and as a sentence.
    fn placed(&self, record: Record, plan: &Plan) -> (Record, String) {
        if let Some(claim) = plan.origin.claim() {
            let got = plan.grants.iter().map(|grant| {
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
        let placed = self.take_preference(plan);
        let reason = placed.of_allocation(&plan.replicas, &plan.grants);
        (Record { placed: Some(placed), ..record }, reason)
    }

    /// What was preferred for this plan, if kubelet asked just before.
    fn take_preference(&self, plan: &Plan) -> PlacementReason {
        let last = self.preferences.lock().remove(&plan.resource);
        let fits = last.filter(|placed| placed.preferred.len() == plan.replicas.len());
        fits.unwrap_or_else(PlacementReason::unasked)
    }

    /// The record of a plan, as of now.
    pub(super) fn new_generation(&self, writer: &mut Writer, plan: &Plan) -> Record {
        writer.generation += 1;
        let before = self.record(&plan.id);
        // Kubelet's DRA manager knows CDI devices alone.
        let cdi = plan.origin.claim().is_some()
            || self.config.get().container.device_list_strategy.is_cdi();
        Record {
            resource: plan.resource.clone(),
            replicas: plan.replicas.clone(),
            allocated_unix_ms: unix_ms(),
            predecessor: before.and_then(|record| record.holder.clone()),
            cdi,
            origin: plan.origin.clone(),
            ..Record::new(plan.id.clone(), writer.generation, plan.grants.clone())
        }
    }

    /// Pages, time and what the container is given, of one that is in the ledger.
    fn materialise(
        &self,
        writer: &mut Writer,
        catalogue: &Catalogue,
        Committed { record, is_new }: &Committed,
    ) -> Result<Delivered, AllocateError> {
        let mode = if *is_new { Mode::Fresh } else { Mode::Adopt };
        self.ensure_shim(record.shim.as_deref())?;
        self.admit_recorded(writer, record, mode)?;
        self.deliver(catalogue, record)
    }

    /// Has the engines hold a tenant; what they found goes to the audit trail.
    pub(super) fn admit_recorded(
        &self,
        writer: &mut Writer,
        record: &Record,
        mode: Mode,
    ) -> Result<(), EngineError> {
        if self.admit(record, mode)?.kept {
            let events = vec![Event::of(record, What::PagesKept, unix_ms())];
            if let Err(error) = writer.ledger.commit(&Change { events, ..Change::default() }) {
                warn!(%error, "the event is not recorded");
            }
        }
        Ok(())
    }

    /// See [`crate::front_end::FrontDoor::release`].
    pub(crate) fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError> {
        let mut writer = self.journal.writer();
        let mut change = Change::default();
        for record in ids.iter().filter_map(|id| self.record(id)) {
            info!(id = %record.id, holder = ?record.holder, "released");
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
}
