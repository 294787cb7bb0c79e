//! The GPUs of the node, what they are divided into, and which of them may be given out: health, whose changes are passed
//! to kubelet, the log, the history and `status`; cordons; other plugins that advertise them too ([`withheld`]).

pub mod withheld;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tessera_config::{Config, Current};
use tessera_gpu::health::{Health, Observation, Transition};
use tessera_kubelet::foreign_plugins::ForeignSale;
use tessera_model::audit::{Event, What};
use tessera_model::clock::{monotonic_ns, unix_ms};
use tessera_model::gpu::Gpu;
use tessera_model::health::{Moment, Remembered, State};
use tessera_model::steered::Cordon;
use tessera_model::topology::Topology;
use tessera_rules::allocate::Catalogue;
use tessera_store::Change;
use tessera_system::files;
use tessera_system::locks::Ranked;
use tracing::{info, warn};

use crate::journal::Journal;
use crate::lock_order::{CATALOGUE, HEALTH, LEAF};
pub use withheld::Lift;

#[derive(Debug)]
pub struct Inventory {
    config: Current,
    journal: Arc<Journal>,
    catalogue: Ranked<Arc<Catalogue>>,
    health: Ranked<Health>,
    saved: Ranked<BTreeMap<String, Remembered>>,
    /// How near the GPUs are to each other; asked when it is decided which are sold.
    topology: Ranked<Arc<Topology>>,
    others: Ranked<BTreeMap<String, ForeignSale>>,
    /// GPUs that are given to nobody, by UUID or as the whole node.
    cordons: Ranked<BTreeMap<String, Cordon>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Withheld {
    #[default]
    Nothing,
    /// Free replicas: another plugin sells the GPU too. Held ones stay as they are: kubelet would not
    /// admit a pod again, after a reboot of the node, whose device it takes for unhealthy.
    Free,
    /// All: it is cordoned, and what a pod leaves goes to no successor.
    All,
}

impl Withheld {
    fn by(is_cordoned: bool, is_sold_by_others: bool) -> Self {
        match (is_cordoned, is_sold_by_others) {
            (true, _) => Withheld::All,
            (false, true) => Withheld::Free,
            (false, false) => Withheld::Nothing,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// Originator and reason of the cordon, its own or the node's.
    pub cordon: Option<String>,
    pub has_own_cordon: bool,
    /// Why nothing more of it is given out although it is well; see [`Inventory::withheld`].
    pub withheld: Option<String>,
    pub health: tessera_gpu::health::View,
}

impl Standing {
    pub(crate) fn keeps_back(&self) -> Withheld {
        Withheld::by(self.cordon.is_some(), self.withheld.is_some())
    }
}

/// What another configuration leaves of the machine.
#[derive(Clone, Debug)]
pub struct GpuSelection {
    pub gpus: Vec<Gpu>,
    pub topology: Topology,
}

impl Inventory {
    /// Of these GPUs, healthy but where an earlier plugin knew otherwise.
    pub(crate) fn new(
        config: Current,
        journal: Arc<Journal>,
        gpus: &[Gpu],
        cordons: BTreeMap<String, Cordon>,
        remembered: BTreeMap<String, Remembered>,
    ) -> Self {
        let now = config.get();
        let uuids = gpus.iter().map(|gpu| &gpu.uuid);
        let saved = remembered.clone();
        let at = (&moment(), Instant::now());
        let health = Health::new(now.health.clone(), uuids, remembered, at);
        let mut catalogue = Catalogue::new(gpus, &now);
        mark(&mut catalogue, &health);
        Inventory {
            saved: Ranked::new(LEAF, saved),
            catalogue: Ranked::new(CATALOGUE, Arc::new(catalogue)),
            health: Ranked::new(HEALTH, health),
            topology: Ranked::new(LEAF, Arc::default()),
            others: Ranked::new(LEAF, BTreeMap::new()),
            cordons: Ranked::new(LEAF, cordons),
            config,
            journal,
        }
    }

    pub fn catalogue(&self) -> Arc<Catalogue> {
        Arc::clone(&self.catalogue.lock())
    }

    /// The catalogue, and how each of its GPUs stands at the same moment.
    pub(crate) fn standings(&self) -> (Arc<Catalogue>, BTreeMap<String, Standing>) {
        // Health is held: the catalogue follows it.
        let health = self.health.lock();
        let catalogue = self.catalogue();
        let cordons = self.cordons.lock().clone();
        let now = Instant::now();
        let of = |uuid: &String| {
            let cordon = cordons.get(uuid).or_else(|| cordons.get(Cordon::NODE));
            let standing = Standing {
                cordon: cordon.map(ToString::to_string),
                has_own_cordon: cordons.contains_key(uuid),
                withheld: self.withheld(uuid),
                health: health.view(uuid, now),
            };
            (uuid.clone(), standing)
        };
        let standings = catalogue.gpus.keys().map(of).collect();
        (catalogue, standings)
    }

    pub fn topology(&self) -> Arc<Topology> {
        Arc::clone(&self.topology.lock())
    }

    pub fn set_topology(&self, topology: Topology) {
        *self.topology.lock() = Arc::new(topology);
    }

    /// From now on `config` holds; `selection` where it may include other GPUs than the one before. The caller holds
    /// the writer, so that each Allocate is judged by one configuration.
    pub(crate) fn configure(&self, config: &Arc<Config>, selection: Option<GpuSelection>) {
        if let Some(GpuSelection { topology, .. }) = &selection {
            self.set_topology(topology.clone());
        }
        let mut health = self.health.lock();
        let mut catalogue = self.catalogue.lock();
        let gpus = selection.map_or_else(|| catalogue.devices(), |selection| selection.gpus);
        let at = (&moment(), Instant::now());
        health.configure(config.health.clone(), gpus.iter().map(|gpu| &gpu.uuid), at);
        let mut next = Catalogue::new(&gpus, config);
        next.edition = catalogue.edition + 1;
        mark(&mut next, &health);
        *catalogue = Arc::new(next);
        self.config.set(Arc::clone(config));
    }
}

/// How much longer quiet may seem after a restart: the ledger hears of probes that stay unanswered this often, and of
/// anything else at once.
const IMPRECISION: Duration = Duration::from_secs(60);

fn moment() -> Moment {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        let id = files::text(Path::new("/proc/sys/kernel/random/boot_id"), 64);
        id.map(|id| id.trim().to_owned()).unwrap_or_default()
    });
    Moment { boot: BOOT.clone(), monotonic_ms: monotonic_ns() / 1_000_000, unix_ms: unix_ms() }
}

/// What cannot be read of the ledger: such a GPU is not sold until it is reset.
pub(crate) fn unreadable() -> Remembered {
    let reason = "the ledger's entry about its trouble cannot be read".to_owned();
    Remembered {
        at: moment(),
        state: State::Unhealthy,
        reason: reason.clone(),
        since_ms: Some(0),
        disturbed_ms: Some(0),
        locked: Some(reason),
        ..Remembered::default()
    }
}

/// Whether more has happened than time and counters that move on by themselves.
fn says_more(before: &Remembered, now: &Remembered) -> bool {
    let fixed = |of: &Remembered| Remembered {
        at: Moment::default(),
        since_ms: None,
        disturbed_ms: None,
        suspicions_ms: vec![0; of.suspicions_ms.len()],
        energy_mj: None,
        recovered_ms: of.recovered_ms.map(|_| 0),
        ..of.clone()
    };
    // When the last trouble was, by the earlier clock.
    let quiet = before
        .at
        .until(&now.at)
        .saturating_add(Duration::from_millis(before.disturbed_ms.unwrap_or(0)));
    let last = now.disturbed_ms.map_or(quiet, Duration::from_millis);
    fixed(before) != fixed(now) || quiet.saturating_sub(last) >= IMPRECISION
}

/// Says of each GPU why it is sick, or that it is not; true if that is news.
fn mark(catalogue: &mut Catalogue, health: &Health) -> bool {
    let mut changed = false;
    for (uuid, sold) in &mut catalogue.gpus {
        let reason = health.reason(uuid);
        if sold.sick.as_deref() != reason {
            sold.sick = reason.map(str::to_owned);
            changed = true;
        }
    }
    changed
}

impl Inventory {
    /// Takes what the driver reports of a GPU. Lines for the audit trail, and whether it changes what is sold.
    pub(crate) fn observe(&self, observation: &Observation) -> (Vec<Event>, bool) {
        let mut health = self.health.lock();
        let transitions = health.observe(observation, Instant::now());
        let at_unix_ms = unix_ms();
        let event = |Transition { uuid, from, to, reason }: Transition| {
            Event::of_gpu(&uuid, What::Health { from, to }, reason, at_unix_ms)
        };
        let events: Vec<Event> = transitions.into_iter().map(event).collect();
        for event in &events {
            let (uuid, sentence) =
                (event.gpu.as_deref().unwrap_or_default(), event.sentence("the GPU"));
            match health.reason(uuid) {
                Some(_) => warn!(gpu = uuid, "{sentence}: {}", event.detail()),
                None => info!(gpu = uuid, "{sentence}: {}", event.detail()),
            }
        }
        // Also the reason of a GPU that stays ill may be another by now.
        let mut catalogue = self.catalogue.lock();
        let changed = mark(Arc::make_mut(&mut catalogue), &health);
        (events, changed)
    }

    /// The driver had no such GPU before it was watched; see [`Health::was_gone`].
    pub(crate) fn was_gone(&self, uuid: &str) {
        self.health.lock().was_gone(uuid);
    }

    pub fn has_unsaved_health(&self) -> bool {
        !self.unsaved_health(false).is_empty()
    }

    /// What the ledger has to be told: with `all` also that counters have moved on.
    fn unsaved_health(&self, all: bool) -> Vec<(String, Option<Remembered>)> {
        let now = self.health.lock().remember(&moment(), Instant::now());
        let saved = self.saved.lock();
        let is_news = |uuid: &String, known: &Remembered| match saved.get(uuid) {
            Some(before) => all || says_more(before, known),
            None => true,
        };
        let news = now.into_iter().filter(|(uuid, known)| is_news(uuid, known));
        news.map(|(uuid, known)| (uuid, Some(known))).collect()
    }

    /// Writes lines of the audit trail, and what a later start has to know of the GPUs. Blocking. A disk that refuses
    /// is reported in the log, and told again.
    pub fn save_health(&self, events: Vec<Event>, all: bool) {
        let mut writer = self.journal.writer();
        let change = Change { events, health: self.unsaved_health(all), ..Change::default() };
        if change.is_empty() {
            return;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            warn!(%error, "a start of the plugin would not know of GPUs' trouble");
            return;
        }
        let health = change.health.into_iter();
        self.saved.lock().extend(health.filter_map(|(uuid, known)| Some((uuid, known?))));
    }

    /// Whether that would change nothing, whatever went before.
    pub fn ignores(&self, observation: &Observation) -> bool {
        Health::ignores(&self.config.get().health, observation)
    }

    /// GPUs that may not last, of those that are sold.
    pub fn suspects(&self) -> BTreeSet<String> {
        let health = self.health.lock();
        let catalogue = self.catalogue.lock();
        catalogue.gpus.keys().filter(|uuid| health.is_suspect(uuid)).cloned().collect()
    }

    pub(crate) fn with_health(&self, after: &Catalogue) -> Catalogue {
        let mut after = after.clone();
        mark(&mut after, &self.health.lock());
        after
    }
}
