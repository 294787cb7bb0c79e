//! The plugin's state on this node: what can be allocated, what is, and the pages of it.
//!
//! Three locks, always taken in this order, never across an await:
//! `writer` (the ledger; held while the disk is waited for, so only on blocking threads), then
//! `records`, then `regions` (both held briefly). Whoever changes allocations or the catalogue holds
//! `writer`. Before `records` comes `devices`, and after it `catalogue`.

mod arbitrating;
mod audit;
mod contexts;
mod cordons;
mod delivering;
mod devices;
pub mod forecast;
mod health;
mod incidents;
mod life;
mod offers;
mod others;
mod records;
mod reload;
mod room;
mod select;
pub mod service;
mod shims;
pub mod steer;
mod trust;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tessera_model::clock::monotonic_ns;
use tessera_model::clock::unix_ms;

use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

use crate::incidents::Seen;
use crate::meters::Meters;
use crate::trust::Trust;
pub use cordons::Cordons;
pub use devices::Books;
use devices::Devices;
use records::Records;
pub use reload::Ground;
pub use select::Target;
use tessera_arbiter::Arbiter;
use tessera_config::{Config, Current, Paths};
use tessera_gpu::health::Health;
use tessera_kubelet::foreign_plugins::Finding;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::gpu::Gpu;
use tessera_model::placement_reason::Placed;
use tessera_model::record::{Record, State};
use tessera_model::steered::Cordon;
use tessera_model::topology::Topology;
use tessera_rules::allocate::Catalogue;
use tessera_rules::multi_resource as doubles;
use tessera_rules::reconcile::Absences;
use tessera_store::{Change, CommitError, Commits, Ledger, OpenError, Opened};
use tessera_system::locks::lock;
use tessera_tenant::delivery::Delivery;
use tessera_tenant::regions;
use tessera_tenant::regions::observed::Bell;
use tessera_tenant::regions::{Mode, Region};
use tessera_tenant::shim_install::ShimError;
use tessera_tenant::shim_install::unused::Unused;

/// See the module's documentation.
#[derive(Debug)]
pub struct Node {
    config: Current,
    /// They stay for as long as the plugin runs.
    paths: Paths,
    delivery: Delivery,
    /// Shared with whoever plans with it.
    catalogue: Mutex<Arc<Catalogue>>,
    health: Mutex<Health>,
    /// How near the GPUs are to each other; asked when it is decided which are sold.
    topology: Mutex<Arc<Topology>>,
    writer: Mutex<Writer>,
    /// Shared with whoever goes through them all: nobody copies a thousand.
    records: Mutex<Records>,
    regions: Mutex<BTreeMap<AllocationId, Arc<Region>>>,
    absences: Mutex<Absences>,
    /// When a container of each allocation was first about to start, where there are several resources.
    starts: Mutex<BTreeMap<AllocationId, Start>>,
    unused: Mutex<Unused>,
    /// The page version that each installed shim speaks.
    shim_abis: Mutex<BTreeMap<String, u32>>,
    /// What kubelet is told, by resource. Taken before all other locks.
    devices: Mutex<Devices>,
    resources: watch::Sender<BTreeSet<String>>,
    started: Notify,
    notes: Mutex<Vec<String>>,
    /// Wakes who observes; see [`crate::observe`].
    bell: Arc<Bell>,
    /// GPUs that another plugin sells too, by UUID.
    others: Mutex<BTreeMap<String, Finding>>,
    meters: Meters,
    commits: Arc<Commits>,
    /// The last generation of the plugin before this one.
    adopted_until: u64,
    /// Allocations that were found by their pages alone at the start.
    adopted: usize,
    /// Divides GPU time; `None` if it could not be started.
    arbiter: Option<Arbiter>,
    /// What was preferred last, by resource, until an Allocate takes it.
    preferences: Mutex<BTreeMap<String, Placed>>,
    /// What containers were refused, at the last look.
    incidents: Mutex<incidents::Looked>,
    /// GPUs that are given to nobody, by UUID or as the whole node.
    cordons: Mutex<BTreeMap<String, Cordon>>,
    /// Lines of the audit trail that are drawn together.
    pending: Mutex<audit::Pending>,
    /// What was found about those who use the GPUs.
    trust: Trust,
}

/// The start of an allocation's first container, in generations.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// Of the allocation.
    generation: u64,
    /// The latest that there was.
    latest: u64,
}

/// What only one thread changes at a time.
#[derive(Debug)]
struct Writer {
    ledger: Ledger,
    generation: u64,
    contexts: contexts::Contexts,
}

impl Node {
    /// Opens the ledger, adopts what the file system knows and the ledger does not, and makes every
    /// page whole: all of it before kubelet hears of us. Blocking, within a runtime.
    ///
    /// # Errors
    /// The ledger cannot be opened at all.
    pub fn open(
        current: impl Into<Current>,
        gpus: &[Gpu],
        delivery: Delivery,
    ) -> Result<Arc<Self>, OpenError> {
        let current = current.into();
        let config = current.get();
        let (mut ledger, opened) = Ledger::open(&config.paths.ledger, config.ledger.fsync)?;
        let mut notes = Vec::new();
        if let Opened::Rebuilt { kept_as, reason } = &opened {
            let note = format!(
                "the ledger was unreadable ({reason}); a new one was made, the old one is kept as {}",
                kept_as.display()
            );
            error!("{note}");
            notes.push(note);
        }
        if let Opened::Lost { found } = opened {
            let note = format!(
                "the ledger {} {found}; a new one was made. Cordons and the audit trail are lost: \
                 cordon again what must not be given out",
                config.paths.ledger.display()
            );
            error!("{note}");
            notes.push(note);
        }
        let (list, mut generation, broken) = ledger.load().map_err(|error| OpenError::Io {
            path: config.paths.ledger.clone(),
            error: error.to_string(),
        })?;
        for text in broken {
            warn!("ledger: {text}; left out");
            notes.push(format!("ledger: {text}; left out"));
        }
        let cordons = ledger.cordons().unwrap_or_else(|error| {
            warn!(%error, "what is cordoned is not known");
            notes.push(error.to_string());
            BTreeMap::new()
        });
        let mut records: Records = list.into_iter().map(Arc::new).collect();
        let mut change = Change::default();
        for id in regions::existing(&config.paths.pages) {
            let Some(spec) = regions::read_spec(&config.paths.pages, &id) else { continue };
            generation = generation.max(spec.generation);
            if records.contains_key(&id) {
                continue;
            }
            info!(%id, "adopting pages without a record");
            let record = Record {
                id: id.clone(),
                // Kubelet says which when it names the replicas.
                resource: String::new(),
                generation: spec.generation,
                replicas: Vec::new(),
                grants: regions::grants(&spec),
                state: State::Started,
                allocated_unix_ms: unix_ms(),
                started_unix_ms: 0,
                holder: None,
                predecessor: None,
                shim: None,
                cdi: delivering::is_adopted_as_cdi(&config, &id),
                placed: None,
                overridden: None,
            };
            change.put(record.clone(), What::Adopted, unix_ms());
            records.insert(Arc::new(record));
        }
        let adopted = change.put.len();
        if adopted > 0 {
            let note = format!(
                "{adopted} allocations have pages and no record: their records are lost, and they \
                 were adopted with the limits of their pages; who set them, and what they were \
                 allocated with, is not known any more"
            );
            warn!("{note}");
            notes.push(note);
        }
        if !change.is_empty()
            && let Err(error) = ledger.commit(&change)
        {
            // They are adopted again next time.
            warn!(%error, "adopted pages are not recorded");
            notes.push(error.to_string());
        }

        let arbiter = arbitrating::start(&config, &mut notes);
        let node = Arc::new(Node {
            arbiter,
            meters: Meters::new(unix_ms()),
            commits: ledger.commits(),
            adopted_until: generation,
            adopted,
            catalogue: Mutex::new(Arc::new(Catalogue::new(gpus, &config))),
            health: Mutex::new(Health::new(
                config.health.clone(),
                gpus.iter().map(|gpu| gpu.uuid.clone()),
            )),
            topology: Mutex::default(),
            writer: Mutex::new(Writer { ledger, generation, contexts: Default::default() }),
            records: Mutex::new(records),
            regions: Mutex::default(),
            absences: Mutex::default(),
            starts: Mutex::default(),
            unused: Mutex::default(),
            shim_abis: Mutex::default(),
            devices: Mutex::default(),
            resources: watch::Sender::default(),
            started: Notify::new(),
            notes: Mutex::new(notes),
            bell: Arc::default(),
            others: Mutex::default(),
            paths: config.paths.clone(),
            config: current,
            preferences: Mutex::default(),
            incidents: Mutex::default(),
            cordons: Mutex::new(cordons),
            pending: Mutex::default(),
            trust: Trust::default(),
            delivery,
        });
        node.restore_shims();
        regions::sweep(node.pages());
        node.rebuild();
        node.rebuild_specs();
        regions::keep_spares(node.pages());
        node.refresh_devices();
        Ok(node)
    }

    /// Makes every page of the ledger whole. What can't be is left out, and said so.
    fn rebuild(&self) {
        let records: Vec<Arc<Record>> = lock(&self.records).values().cloned().collect();
        for record in records {
            // A plugin that died between commit and pages left those of the tenant before.
            let found = regions::read_spec(self.pages(), &record.id);
            let mode = match found {
                Some(spec) if spec.generation < record.generation => Mode::Fresh,
                _ => Mode::Adopt,
            };
            match Region::create(self.pages(), &record, mode, self.shim_abi(&record)) {
                Ok((region, outcome)) => {
                    if outcome.repaired {
                        info!(id = %record.id, "pages rebuilt");
                    }
                    region.heartbeat(monotonic_ns());
                    region.observed().attach(&self.bell);
                    self.arbitrate(&record.id, &region);
                    lock(&self.regions).insert(record.id.clone(), region);
                }
                Err(error) => {
                    error!(id = %record.id, %error, "pages cannot be rebuilt");
                    self.note(format!("allocation {} has no pages: {error}", record.id));
                }
            }
        }
    }

    /// The directory of an allocation's pages.
    #[must_use]
    pub fn pages_of(&self, id: &AllocationId) -> PathBuf {
        regions::dir(self.pages(), id)
    }

    fn pages(&self) -> &std::path::Path {
        &self.paths.pages
    }

    /// The configuration in force. It may be another at the next call.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        self.config.get()
    }

    /// Where the shim is.
    #[must_use]
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    /// What is sold, with health.
    #[must_use]
    pub fn catalogue(&self) -> Arc<Catalogue> {
        Arc::clone(&lock(&self.catalogue))
    }

    /// All records, with the regions that are open, in the order of ids.
    #[must_use]
    pub fn allocations(&self) -> Vec<(Arc<Record>, Option<Arc<Region>>)> {
        let records: Vec<Arc<Record>> = lock(&self.records).values().cloned().collect();
        let regions = lock(&self.regions);
        records
            .into_iter()
            .map(|record| {
                let region = regions.get(&record.id).cloned();
                (record, region)
            })
            .collect()
    }

    /// Allocations of other resources that may have been made for the container that is about to start with
    /// these replicas; see [`tessera_rules::multi_resource`].
    #[must_use]
    pub fn siblings(&self, resource: &str, ids: &[String]) -> Vec<AllocationId> {
        let resources = self.resources.borrow().len();
        if resources < 2 {
            return Vec::new();
        }
        let id = AllocationId::of(resource, ids.iter().map(String::as_str));
        let records = lock(&self.records);
        let Some(record) = records.get(&id) else { return Vec::new() };
        let mut starts = lock(&self.starts);
        starts.retain(|id, _| records.contains_key(id));
        let start = Start { generation: record.generation, latest: records.latest() };
        let known = starts.entry(id).or_insert(start);
        if known.generation != record.generation {
            *known = start;
        }
        let had_started = |first: &Record, second: &Record| match starts.get(&first.id) {
            Some(start) if start.generation == first.generation => start.latest < second.generation,
            // Of the time before this plugin: what was made since is for others.
            _ => first.generation <= self.adopted_until && second.generation > self.adopted_until,
        };
        let near = records.near(record.generation, doubles::generations(resources));
        doubles::siblings(record, near, resources, &had_started)
    }

    /// Adds a sentence to what `status` warns of.
    pub fn note(&self, note: String) {
        let mut notes = lock(&self.notes);
        // What goes wrong again and again is told once, and there is an end to it.
        if !notes.contains(&note) && notes.len() < 64 {
            notes.push(note);
        }
    }

    /// What needs somebody's attention since the start.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        lock(&self.notes).clone()
    }

    /// Done when a container has started since the last time: its holder may be known now.
    pub async fn container_started(&self) {
        self.started.notified().await;
    }

    /// What is counted where it happens.
    #[must_use]
    pub fn meters(&self) -> &Meters {
        &self.meters
    }

    /// Transactions of the ledger.
    #[must_use]
    pub fn commits(&self) -> &Commits {
        &self.commits
    }

    /// Allocations up to this generation are older than this plugin.
    #[must_use]
    pub fn adopted_until(&self) -> u64 {
        self.adopted_until
    }

    /// How many allocations the start found by their pages alone, because their records were lost.
    #[must_use]
    pub fn adopted(&self) -> usize {
        self.adopted
    }

    /// Rung when there is news of an allocation's memory.
    #[must_use]
    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Looks at every usage page: takes back what dead processes held, puts right what a tenant broke.
    /// What each allocation was refused, for [`Node::note_incidents`]. Blocking.
    pub fn inspect(&self) -> Vec<(AllocationId, Seen)> {
        let regions = lock(&self.regions).clone();
        let seen = regions.into_iter().map(|(id, region)| {
            let used = region.look();
            (id, incidents::seen(&region, &used))
        });
        let seen = seen.collect();
        // After looking, which cuts back what has grown.
        regions::keep_spares(self.pages());
        seen
    }

    /// The end: tenants need not wait for a heartbeat that will not come, and the next plugin need not
    /// wait for the ledger. Blocking.
    pub fn close(&self) {
        self.heartbeat(0);
        if let Some(arbiter) = &self.arbiter {
            arbiter.stop();
        }
        self.finish_audit();
        lock(&self.writer).ledger.close();
    }

    /// Says "the plugin lives" on every page; with 0, "it stops now".
    pub fn heartbeat(&self, now_ns: u64) {
        let regions: Vec<Arc<Region>> = lock(&self.regions).values().cloned().collect();
        for region in regions {
            region.heartbeat(now_ns);
        }
    }
}

/// Why kubelet gets no answer.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    /// The request.
    #[error(transparent)]
    Refused(#[from] tessera_rules::allocate::Refusal),
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] CommitError),
    /// The pages.
    #[error("cannot make the pages of the allocation: {0}")]
    Pages(#[from] regions::RegionError),
    /// The driver, as far as we deliver it.
    #[error(transparent)]
    Driver(#[from] tessera_tenant::delivery::driver::DriverError),
    /// What does not fit into a CDI spec.
    #[error(transparent)]
    Spec(#[from] tessera_tenant::delivery::cdi::spec::SpecError),
    /// The CDI spec's file.
    #[error(transparent)]
    SpecFile(#[from] tessera_tenant::delivery::cdi::files::FileError),
    /// The shim's files are gone and could not be put back.
    #[error("the shim is gone from {path} and cannot be restored: {error}")]
    Shim {
        /// Where containers mount it from.
        path: PathBuf,
        /// Why not.
        error: ShimError,
    },
}
