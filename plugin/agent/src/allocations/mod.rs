//! Allocations: records, pages, and what containers get. One writer at a time
//! changes them, under [`Journal::writer`].

mod life;
pub mod mend;
pub(crate) mod room;
pub mod steer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use tessera_arbiter::Arbiter;
use tessera_config::{Config, Current, Paths};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::clock::unix_ms;
use tessera_model::holding::Holding;
use tessera_model::placement_reason::PlacementReason;
use tessera_model::record::{Record, State};
use tessera_rules::reconcile::Absences;
use tessera_store::{Change, Ledger};
use tessera_system::locks::{Ranked, RankedGuard};
use tessera_tenant::delivery::Delivery;
use tessera_tenant::regions::{self, Mode, Outcome, Region};
use tessera_tenant::shim_install::Unused;
use tokio::sync::Notify;
use tracing::info;

use crate::engines::{Engine, EngineError, Leases, Pages};
pub use crate::front_end::AllocateError;
use crate::inventory::Inventory;
use crate::journal::Journal;
use crate::lock_order::{HOUSEKEEPING, LEAF, RECORDS};
use crate::status_board::StatusBoard;
pub(crate) use room::is_moving;

pub(crate) type Records = BTreeMap<AllocationId, Arc<Record>>;

#[derive(Debug)]
pub struct Allocations {
    config: Current,
    /// Where things are on this node; that stays for as long as the plugin runs.
    pub paths: Paths,
    pub delivery: Delivery,
    journal: Arc<Journal>,
    inventory: Arc<Inventory>,
    board: Arc<StatusBoard>,
    pub pages: Arc<Pages>,
    leases: Arc<Leases>,
    /// All that hold tenants, in the order in which they are asked.
    engines: Vec<Arc<dyn Engine>>,
    /// Every reader of them all shares them: nobody copies a thousand.
    records: Ranked<Records>,
    /// What containers start with, as it was when it was last seen to be whole.
    whole: mend::Whole,
    absences: Ranked<Absences>,
    unused: Ranked<Unused>,
    /// What was preferred last, by resource, until an Allocate takes it.
    preferences: Ranked<BTreeMap<String, PlacementReason>>,
    started: Notify,
    /// The last generation of the plugin before this one.
    pub adopted_until: u64,
    /// How many allocations the start found by their pages alone, because their records were lost.
    pub adopted: usize,
}

pub(crate) struct Found {
    records: Records,
    adopted: usize,
    pub generation: u64,
}

impl Found {
    /// What the ledger has, and pages that it has not: their records are made again.
    pub(crate) fn of(
        ledger: &mut Ledger,
        (list, generation): (Vec<Record>, u64),
        config: &Config,
        board: &StatusBoard,
    ) -> Self {
        let records = list.into_iter().map(|record| (record.id.clone(), Arc::new(record)));
        let mut found = Found { records: records.collect(), adopted: 0, generation };
        let mut change = Change::default();
        for id in regions::existing(&config.paths.pages) {
            let Some(spec) = regions::read_spec(&config.paths.pages, &id) else { continue };
            found.generation = found.generation.max(spec.generation);
            if found.records.contains_key(&id) {
                continue;
            }
            info!(%id, "adopting pages without a record");
            let record = Record {
                state: State::Started,
                allocated_unix_ms: unix_ms(),
                cdi: mend::is_adopted_as_cdi(config, &id),
                ..Record::new(id.clone(), spec.generation, regions::grants(&spec))
            };
            change.put(record.clone(), What::Adopted, unix_ms());
            found.records.insert(id, Arc::new(record));
        }
        found.adopted = change.put.len();
        if found.adopted > 0 {
            let note = format!(
                "{} allocations have pages and no record: their records are lost, and they \
                 were adopted with the limits of their pages; who set them, and what they were \
                 allocated with, is not known any more",
                found.adopted
            );
            board.note(note);
        }
        if !change.is_empty()
            && let Err(error) = ledger.commit(&change)
        {
            // They are adopted again next time.
            board.note(format!("adopted pages are not recorded: {error}"));
        }
        found
    }
}

impl Allocations {
    /// Over what the start found; [`Allocations::restore`] makes it whole. `more`: engines that are asked after the others.
    pub(crate) fn new(
        config: Current,
        delivery: Delivery,
        found: Found,
        (journal, inventory, board): (Arc<Journal>, Arc<Inventory>, Arc<StatusBoard>),
        more: Vec<Arc<dyn Engine>>,
    ) -> Self {
        let now = config.get();
        let pages = Arc::new(Pages::new(&now.paths.pages, &now.paths.shim));
        let leases = Arc::new(Leases::start(&now, Arc::clone(&board)));
        let mut engines = vec![Arc::clone(&pages) as Arc<dyn Engine>, Arc::clone(&leases) as _];
        engines.extend(more);
        Allocations {
            engines,
            pages,
            leases,
            paths: now.paths.clone(),
            delivery,
            records: Ranked::new(RECORDS, found.records),
            whole: mend::Whole::default(),
            absences: Ranked::new(HOUSEKEEPING, Absences::default()),
            unused: Ranked::new(HOUSEKEEPING, Unused::default()),
            preferences: Ranked::new(LEAF, BTreeMap::new()),
            started: Notify::new(),
            adopted_until: found.generation,
            adopted: found.adopted,
            config,
            journal,
            inventory,
            board,
        }
    }

    /// Makes shims, pages and specs of the records whole. What can't be held is left out, and said so. Blocking.
    pub(crate) fn restore(&self) {
        let records = self.records();
        // Pages are made for the version that the shim's file speaks.
        self.mend_shims(&records);
        regions::sweep(self.pages.root());
        for record in &records {
            let _said = self.admit(record, self.pages.mode_at_start(record));
        }
        self.mend();
        self.sweep_specs();
        self.pages.keep_spares();
    }

    /// Has each engine hold a tenant; the first one's outcome, which is that of its pages. One that cannot be held is
    /// a warning until it can, or is no more.
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError> {
        let admit = |first: Option<Outcome>, engine: &Arc<dyn Engine>| {
            let outcome = engine.admit(record, mode)?;
            Ok(first.or(Some(outcome)))
        };
        let admitted = self.engines.iter().try_fold(None, admit).map(Option::unwrap_or_default);
        if admitted.is_ok() {
            self.note_pages(record);
        }
        let text = |error: &EngineError| format!("allocation {} has no pages: {error}", record.id);
        self.board.keep(record.id.as_str(), "pages", &admitted, text);
        admitted
    }

    fn dismiss(&self, id: &AllocationId) {
        self.engines.iter().rev().for_each(|engine| engine.release(id));
    }

    pub fn pages_of(&self, id: &AllocationId) -> PathBuf {
        regions::dir(self.pages.root(), id)
    }

    pub fn arbiter(&self) -> Option<&Arbiter> {
        self.leases.arbiter()
    }

    pub(crate) fn all(&self) -> RankedGuard<'_, Records> {
        self.records.lock()
    }

    pub fn records(&self) -> Vec<Arc<Record>> {
        self.records.lock().values().cloned().collect()
    }

    pub fn record(&self, id: &AllocationId) -> Option<Arc<Record>> {
        self.records.lock().get(id).cloned()
    }

    /// All records, with the regions that are open, in the order of ids.
    pub fn with_regions(&self) -> Vec<(Arc<Record>, Option<Arc<Region>>)> {
        let records = self.records();
        let regions = self.pages.lock();
        let open = |record: Arc<Record>| {
            let region = regions.get(&record.id).cloned();
            (record, region)
        };
        records.into_iter().map(open).collect()
    }

    /// Whether what a container holds is an allocation of ours. The resources of pages without a record
    /// are not known otherwise.
    pub fn knows(&self, holding: &Holding) -> bool {
        self.records.lock().contains_key(&holding.allocation())
    }

    /// Resources that are ours, now or when an allocation was made.
    pub fn own_resources(&self) -> BTreeSet<String> {
        let mut names: BTreeSet<String> =
            self.records.lock().values().map(|record| record.resource.clone()).collect();
        let config = self.config.get();
        let layouts = config.layouts.iter().flat_map(|layout| &layout.shares);
        names.extend(layouts.map(|share| share.resource.clone()));
        names.insert(config.resource.name.clone());
        names
    }

    /// Remembers what was preferred of a resource, until the Allocate that follows takes it.
    pub(crate) fn prefer(&self, resource: &str, placed: PlacementReason) {
        self.preferences.lock().insert(resource.to_owned(), placed);
    }

    /// A claim's containers start, and kubelet may name them by now: no PreStartContainer says so.
    pub fn expect_start(&self) {
        self.started.notify_one();
    }

    /// Done when a container has started since the last time: its holder may be known now.
    pub async fn container_started(&self) {
        self.started.notified().await;
    }
}
