//! The GPUs of the node, what they are divided into, and which of them may be given out: health, cordons, other
//! plugins that advertise them too.

mod contexts;
mod cordons;
pub mod foreign;
mod health;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tessera_config::{Config, Current};
use tessera_gpu::health::Health;
use tessera_kubelet::foreign_plugins::ForeignSale;
use tessera_model::gpu::Gpu;
use tessera_model::health::Remembered;
use tessera_model::steered::Cordon;
use tessera_model::topology::Topology;
use tessera_rules::allocate::Catalogue;
use tessera_system::locks::Ranked;

use crate::journal::Journal;
use crate::lock_order::{CATALOGUE, HEALTH, LEAF};
use contexts::Contexts;
pub use cordons::Lift;
pub(crate) use health::unreadable;
use health::{mark, moment};

#[derive(Debug)]
pub struct Inventory {
    config: Current,
    journal: Arc<Journal>,
    /// Shared with plans.
    catalogue: Ranked<Arc<Catalogue>>,
    health: Ranked<Health>,
    /// What the ledger has of it, by UUID.
    saved: Ranked<BTreeMap<String, Remembered>>,
    /// How near the GPUs are to each other; asked when it is decided which are sold.
    topology: Ranked<Arc<Topology>>,
    /// GPUs that another plugin sells too, by UUID.
    others: Ranked<BTreeMap<String, ForeignSale>>,
    /// GPUs that are given to nobody, by UUID or as the whole node.
    cordons: Ranked<BTreeMap<String, Cordon>>,
    /// What contexts were seen to take.
    contexts: Ranked<Contexts>,
}

/// What is not offered of a GPU that is well.
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

/// How a GPU of the catalogue stands.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// Originator and reason of the cordon, its own or the node's.
    pub cordon: Option<String>,
    /// It is cordoned by itself.
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
    /// How near they are to each other.
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
            contexts: Ranked::new(LEAF, Contexts::default()),
            config,
            journal,
        }
    }

    /// What is sold, with health.
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
        let gpus = self.measured(gpus, config);
        let at = (&moment(), Instant::now());
        health.configure(config.health.clone(), gpus.iter().map(|gpu| &gpu.uuid), at);
        let mut next = Catalogue::new(&gpus, config);
        next.edition = catalogue.edition + 1;
        mark(&mut next, &health);
        *catalogue = Arc::new(next);
        self.config.set(Arc::clone(config));
    }
}
