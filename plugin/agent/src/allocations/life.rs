//! The life of an allocation after it was made: container starts, holders, and release of what nobody holds. All of
//! it blocks on the ledger's disk: call it on a blocking thread, within a runtime.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use super::{AllocateError, Allocations};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::holding::Census;
use tessera_model::record::{Record, State};
use tessera_rules::allocate;
use tessera_rules::reconcile;
use tessera_rules::reconcile::Round;
use tessera_store::Change;
use tessera_tenant::regions::Mode;

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
        let records = self.records.lock().all();
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
