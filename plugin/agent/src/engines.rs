//! Engines: what holds a tenant to its limits.
//!
//! The core decides and records; an engine carries it out. [`Pages`] is memory: pages that the shim obeys; [`Leases`] those of
//! GPU time, which the arbiter grants. The driver's own limits and MPS will be others. An engine knows the record and nothing of the front end
//! that asked; [`crate::allocations`] asks each engine in one order and knows none by name when it does.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_arbiter::Arbiter;
use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::monotonic_ns;
use tessera_model::record::Record;
use tessera_system::files;
use tessera_system::locks::{Ranked, RankedGuard};
use tessera_tenant::regions::Bell;
use tessera_tenant::regions::{self, Mode, Outcome, Region, RegionError};
use tessera_tenant::shim_install::SHIM;
use tracing::{info, warn};

use crate::incidents::{self, Seen};
use crate::lock_order::LEAF;
use crate::status_board::StatusBoard;

/// Why a tenant cannot be held, so that it must not run.
#[derive(Debug, thiserror::Error)]
#[error("cannot make the pages of the allocation: {0}")]
pub struct EngineError(pub String);

impl From<RegionError> for EngineError {
    fn from(error: RegionError) -> Self {
        EngineError(error.to_string())
    }
}

/// One way of holding tenants to a part of their limits. Calls for one tenant come one at a time, under the
/// journal's writer; they may block.
pub trait Engine: fmt::Debug + Send + Sync {
    /// Holds the tenant of `record` from now on, or makes whole what holds it. Repeating it changes nothing.
    ///
    /// Errors: The tenant is not held, and must not run.
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError>;

    fn set_limits(&self, record: &Record);

    /// Ends with a tenant; one that it does not know is fine.
    fn release(&self, id: &AllocationId);
}

/// GPU time. Without an arbiter GPU time is not divided, which `status` says: silence opens
/// for time.
#[derive(Debug)]
pub struct Leases {
    arbiter: Option<Arbiter>,
    pages: PathBuf,
    board: Arc<StatusBoard>,
}

impl Leases {
    pub(crate) fn start(config: &Config, board: Arc<StatusBoard>) -> Self {
        let arbiter = match Arbiter::start(&config.compute) {
            Ok(arbiter) => Some(arbiter),
            Err(error) => {
                let note = format!("GPU time is not divided: the arbiter cannot start: {error}");
                // Nothing starts it again before the plugin does.
                board.stand("arbiter", "thread", note);
                None
            }
        };
        Leases { arbiter, pages: config.paths.pages.clone(), board }
    }

    pub fn arbiter(&self) -> Option<&Arbiter> {
        self.arbiter.as_ref()
    }
}

impl Engine for Leases {
    fn admit(&self, record: &Record, _mode: Mode) -> Result<Outcome, EngineError> {
        if let Some(arbiter) = &self.arbiter {
            let id = &record.id;
            let admitted = arbiter.admit(&regions::dir(&self.pages, id));
            let text = |error: &_| format!("allocation {id}: its GPU time is not divided: {error}");
            self.board.keep(id.as_str(), "time", &admitted, text);
        }
        Ok(Outcome::default())
    }

    fn set_limits(&self, record: &Record) {
        // It reads the limits from the page when it is admitted again.
        let _ = self.admit(record, Mode::Adopt);
    }

    fn release(&self, id: &AllocationId) {
        if let Some(arbiter) = &self.arbiter {
            arbiter.release(id.as_str());
        }
    }
}

pub(crate) type Regions = BTreeMap<AllocationId, Arc<Region>>;

#[derive(Debug)]
pub struct Pages {
    root: PathBuf,
    shims: PathBuf,
    regions: Ranked<Regions>,
    shim_abis: Ranked<BTreeMap<String, u32>>,
    /// Wakes the observer; see [`crate::observe`].
    bell: Arc<Bell>,
}

impl Pages {
    /// Pages in `root`, of containers whose shims are installed in `shims`.
    pub(crate) fn new(root: &Path, shims: &Path) -> Self {
        Pages {
            root: root.to_owned(),
            shims: shims.to_owned(),
            regions: Ranked::new(LEAF, BTreeMap::new()),
            shim_abis: Ranked::new(LEAF, BTreeMap::new()),
            bell: Arc::default(),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn get(&self, id: &AllocationId) -> Option<Arc<Region>> {
        self.regions.lock().get(id).cloned()
    }

    pub(crate) fn lock(&self) -> RankedGuard<'_, Regions> {
        self.regions.lock()
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(crate) fn is_used(&self, id: &AllocationId) -> bool {
        // Not in a closure under the lock: asking takes a system call for each slot.
        let region = self.get(id);
        region.is_some_and(|region| region.in_use())
    }

    /// Looks at every usage page: takes back what dead processes held, puts right what a tenant broke. What each
    /// allocation was refused. Blocking.
    pub(crate) fn inspect(&self) -> Vec<(AllocationId, Seen)> {
        // Not under the lock: looking takes system calls.
        let regions = self.regions.lock().clone();
        let seen = regions.into_iter().map(|(id, region)| {
            let used = region.recover_and_snapshot();
            (id, incidents::seen(&region, &used))
        });
        seen.collect()
    }

    /// Says "the plugin lives" on every page; with 0, "it stops now".
    pub fn heartbeat(&self, now_ns: u64) {
        let regions: Vec<Arc<Region>> = self.regions.lock().values().cloned().collect();
        for region in regions {
            region.heartbeat(now_ns);
        }
    }

    /// Makes pages in advance, as far as there is room. After a look, which cuts back what has grown.
    pub fn keep_spares(&self) {
        regions::keep_spares(&self.root);
    }

    pub(crate) fn mode_at_start(&self, record: &Record) -> Mode {
        // A plugin that died between commit and pages left those of the tenant before.
        match regions::read_spec(&self.root, &record.id) {
            Some(spec) if spec.generation < record.generation => Mode::Fresh,
            _ => Mode::Adopt,
        }
    }

    /// The page version that the shim of this allocation's containers speaks, by the file that they
    /// would mount now; `None` where nobody knows which that is.
    fn shim_abi(&self, record: &Record) -> Option<u32> {
        let name = record.shim.as_deref()?;
        if let Some(abi) = self.shim_abis.lock().get(name) {
            return Some(*abi);
        }
        let library = files::read(&self.shims.join(name).join(SHIM), files::LIBRARY).ok()?;
        let abi = tessera_region::abi::of_program(&library);
        self.shim_abis.lock().insert(name.to_owned(), abi);
        Some(abi)
    }

    pub(crate) fn forget_shim(&self, name: &str) {
        self.shim_abis.lock().remove(name);
    }

    fn open(&self, record: &Record, mode: Mode) -> Result<(Arc<Region>, Outcome), RegionError> {
        if let Some(region) = self.get(&record.id) {
            let outcome = region.renew(record, mode, self.shim_abi(record))?;
            return Ok((region, outcome));
        }
        let (region, outcome) = Region::create(&self.root, record, mode, self.shim_abi(record))?;
        region.observed().attach(&self.bell);
        self.regions.lock().insert(record.id.clone(), Arc::clone(&region));
        Ok((region, outcome))
    }
}

impl Engine for Pages {
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError> {
        let (region, outcome) = match self.open(record, mode) {
            // Another tenant may have grown its usage file, which looking undoes.
            Err(error) if error.is_full() => {
                let _ = self.inspect();
                self.open(record, mode)?
            }
            result => result?,
        };
        region.heartbeat(monotonic_ns());
        let id = &record.id;
        if outcome.repaired {
            info!(%id, "pages repaired");
        }
        if outcome.kept {
            warn!(%id, "a process of the tenant before still runs; its pages are kept");
        }
        Ok(outcome)
    }

    fn set_limits(&self, record: &Record) {
        if let Some(region) = self.get(&record.id) {
            region.set_limits(&record.grants);
        }
    }

    fn release(&self, id: &AllocationId) {
        let region = self.regions.lock().remove(id);
        // Pages without a record would be adopted, and counted, at the next start: right if
        // somebody still uses them.
        if region.is_none_or(|region| !region.in_use())
            && let Err(error) = regions::remove(&self.root, id)
        {
            warn!(%id, %error, "the pages of an allocation that has ended cannot be removed");
        }
    }
}
