//! Regions: an allocation's directory on the host with its pages and its session socket.
//!
//! A directory is named by its allocation id and stays as long as the allocation does; the files in
//! it are replaced when a new generation begins. Containers mount the directory, so what they see of
//! it follows.

pub mod tmpfs;

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_region::layout::MAX_GPUS;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaSpec, QuotaWriter};
use tessera_region::usage::{self, SlotView, Snapshot, Tampered, UsageFile, What};
use tessera_region::{PageError, PageFault, prepare_dir, remove_pages};
use tracing::{info, warn};

use crate::allocate::AllocationId;
use crate::config::Compute;
use crate::ledger::{Grant, Record};
use crate::observe::Observed;
use crate::session::{self, Listener, Tenant};

/// Whether pages may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A new tenant: new pages, unless a process still holds a slot in the old ones.
    Fresh,
    /// The tenant there is: what exists stays, what is missing or broken is made.
    Ensure,
}

/// What became of the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Fresh pages were asked for, but a process still used the old ones.
    pub kept: bool,
    /// Something was missing, foreign or broken, and is whole now.
    pub repaired: bool,
}

/// Why an allocation has no pages.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A page.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The session socket.
    #[error("{path}: session socket: {error}")]
    Socket {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// What processes that have ended did; their slots are zeroed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests refused because of the quota.
    pub refusals: u64,
    /// Requests within the quota that the driver refused.
    pub driver_refusals: u64,
    /// Kernel and graph launches.
    pub launches: u64,
    /// Nanoseconds of GPU time.
    pub gpu_time_ns: u64,
    /// Nanoseconds waited at the gate.
    pub gate_wait_ns: u64,
    /// Highest granted bytes of any one process, per GPU.
    pub peak: [u64; MAX_GPUS],
}

impl Tally {
    /// Adds a slot's counters. They are a container's word: sums saturate.
    pub fn add(&mut self, slot: &SlotView) {
        let add = |sum: &mut u64, value: u64| *sum = sum.saturating_add(value);
        add(&mut self.refusals, slot.refusals);
        add(&mut self.driver_refusals, slot.driver_refusals);
        add(&mut self.launches, slot.launches);
        add(&mut self.gpu_time_ns, slot.gpu_time_ns);
        add(&mut self.gate_wait_ns, slot.gate_wait_ns);
        for (peak, value) in self.peak.iter_mut().zip(slot.peak) {
            *peak = (*peak).max(value);
        }
    }
}

/// What an allocation uses now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Slots in use; empty if the page cannot be believed.
    pub snapshot: Snapshot,
    /// Everything processes did since the generation began, living ones included.
    pub tally: Tally,
}

#[derive(Debug)]
struct Open {
    quota: QuotaWriter,
    usage: UsageFile,
    ended: Tally,
    /// What was wrong with the usage page at the last look.
    wrong: Option<Tampered>,
    listener: Listener,
}

/// One allocation's directory, open.
#[derive(Debug)]
pub struct Region {
    dir: PathBuf,
    generation: AtomicU64,
    tamperings: AtomicU64,
    open: Mutex<Open>,
    observed: Observed,
}

/// The directory of an allocation.
#[must_use]
pub fn dir(root: &Path, id: &AllocationId) -> PathBuf {
    root.join(id.as_str())
}

/// Ids of all directories under `root` that are named like allocations.
#[must_use]
pub fn existing(root: &Path) -> Vec<AllocationId> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let mut ids: Vec<_> =
        entries.filter_map(|entry| AllocationId::parse(entry.file_name().to_str()?)).collect();
    ids.sort();
    ids
}

/// What the quota page of a directory without a record says, so that it can be adopted.
#[must_use]
pub fn read_spec(root: &Path, id: &AllocationId) -> Option<QuotaSpec> {
    let spec = QuotaWriter::open(&dir(root, id)).ok()?.spec();
    (spec.allocation == id.as_str()).then_some(spec)
}

/// What the quota page of a directory says of overhead on its `gpu`-th GPU, without a plugin.
#[must_use]
pub fn read_overhead(root: &Path, id: &AllocationId, gpu: usize) -> u64 {
    QuotaWriter::open(&dir(root, id)).map_or(0, |quota| quota.observed_overhead(gpu))
}

impl Region {
    /// Makes or renews the pages of `record` and listens for its sessions. Call it within a runtime.
    ///
    /// # Errors
    /// The pages or the socket cannot be made.
    pub fn create(
        root: &Path,
        record: &Record,
        mode: Mode,
    ) -> Result<(Arc<Self>, Outcome), RegionError> {
        let dir = dir(root, &record.id);
        let (quota, usage, outcome) = write_pages(&dir, record, mode)?;
        let tenant = Arc::new(Tenant::default());
        // The listener's tasks need the region, which holds the listener.
        let mut failed = None;
        let region = Arc::new_cyclic(|region| {
            let pages: Arc<dyn session::Pages> = Arc::new(Weak(region.clone()));
            let listener = Listener::bind(&dir, pages, tenant).unwrap_or_else(|error| {
                failed = Some(error);
                Listener::closed()
            });
            Region {
                dir: dir.clone(),
                generation: AtomicU64::new(record.generation),
                tamperings: AtomicU64::new(0),
                observed: Observed::default(),
                open: Mutex::new(Open {
                    quota,
                    usage,
                    ended: Tally::default(),
                    wrong: None,
                    listener,
                }),
            }
        });
        match failed {
            Some(error) => Err(RegionError::Socket { path: dir, error }),
            None => Ok((region, outcome)),
        }
    }

    /// As [`Region::create`] for a region that is open already.
    ///
    /// # Errors
    /// The pages or the socket cannot be made.
    pub fn renew(self: &Arc<Self>, record: &Record, mode: Mode) -> Result<Outcome, RegionError> {
        let mut open = self.open();
        let (quota, usage, outcome) = write_pages(&self.dir, record, mode)?;
        let socket = self.dir.join(tessera_region::layout::SESSION_SOCKET);
        let had_socket = socket.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket());
        let new_tenant = mode == Mode::Fresh && !outcome.kept;
        if new_tenant || !had_socket {
            let pages: Arc<dyn session::Pages> = Arc::new(Weak(Arc::downgrade(self)));
            let tenant =
                if new_tenant { Arc::default() } else { Arc::clone(open.listener.tenant()) };
            open.listener = Listener::bind(&self.dir, pages, tenant)
                .map_err(|error| RegionError::Socket { path: self.dir.clone(), error })?;
        }
        if new_tenant {
            open.ended = Tally::default();
            self.tamperings.store(0, Ordering::Relaxed);
            self.observed.clear();
        }
        open.quota = quota;
        open.usage = usage;
        self.generation.store(record.generation, Ordering::Relaxed);
        Ok(outcome)
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory on the host.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What its sessions said.
    #[must_use]
    pub fn tenant(&self) -> Arc<Tenant> {
        Arc::clone(self.open().listener.tenant())
    }

    /// Times the usage page was found impossible, or its file's size wrong.
    #[must_use]
    pub fn tamperings(&self) -> u64 {
        self.tamperings.load(Ordering::Relaxed)
    }

    /// Says "the plugin lives", `CLOCK_MONOTONIC` nanoseconds; 0 for "it stops now".
    pub fn heartbeat(&self, monotonic_ns: u64) {
        self.open().quota.set_heartbeat(monotonic_ns);
    }

    /// Limits as the quota page has them.
    #[must_use]
    pub fn spec(&self) -> QuotaSpec {
        self.open().quota.spec()
    }

    /// Whether any process holds a slot. A page that cannot be asked counts as in use.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.open().usage.any_slot_locked().unwrap_or(true)
    }

    /// What the driver shows of it; see [`crate::observe`].
    #[must_use]
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// What is published as overhead on the page's `gpu`-th GPU, bytes.
    #[must_use]
    pub fn overhead(&self, gpu: usize) -> u64 {
        self.open().quota.observed_overhead(gpu)
    }

    /// Publishes overhead on the page's `gpu`-th GPU, bytes.
    pub fn publish_overhead(&self, gpu: usize, bytes: u64) {
        self.open().quota.set_observed_overhead(gpu, bytes);
    }

    /// The slots in use as they stand, with nothing recovered or repaired; none if the page cannot be
    /// believed.
    #[must_use]
    pub fn slots(&self) -> Vec<SlotView> {
        self.open().usage.snapshot().unwrap_or_default().slots
    }

    /// What is in use. A wrong size is put right; a page that still cannot be true is flagged.
    #[must_use]
    pub fn look(&self) -> Use {
        let mut open = self.open();
        let snapshot = match self.recover_in(&mut open) {
            Some(snapshot) => {
                open.wrong = None;
                snapshot
            }
            None => self.snapshot(&mut open),
        };
        let mut tally = open.ended.clone();
        snapshot.slots.iter().for_each(|slot| tally.add(slot));
        Use { snapshot, tally }
    }

    fn snapshot(&self, open: &mut Open) -> Snapshot {
        let tampered = match open.usage.snapshot() {
            Ok(snapshot) => {
                open.wrong = None;
                return snapshot;
            }
            Err(tampered) => tampered,
        };
        // Counted when it appears, not at every look.
        if open.wrong != Some(tampered) {
            self.tamperings.fetch_add(1, Ordering::Relaxed);
            warn!(dir = %self.dir.display(), %tampered, "usage page");
            // The driver's figures tell what it hides.
            self.observed.news();
        }
        open.wrong = Some(tampered);
        if is_restored(tampered.what) {
            match open.usage.restore(self.generation.load(Ordering::Relaxed)) {
                Ok(_) => open.wrong = None,
                Err(error) => warn!(%error, "usage page"),
            }
        }
        open.usage.snapshot().unwrap_or_default()
    }

    /// Takes back what dead processes held. The page as it was read before, if it was sound and there
    /// was nothing to take: then nobody need read its 132 KiB again.
    fn recover_in(&self, open: &mut Open) -> Option<Snapshot> {
        let before = open.usage.snapshot();
        match open.usage.recover_dead() {
            Ok(recovered) if recovered.slots == 0 => return before.ok(),
            Ok(recovered) => {
                let after = open.usage.snapshot().unwrap_or_default();
                for slot in before.unwrap_or_default().slots {
                    let still =
                        |s: &SlotView| s.index == slot.index && s.claimed_ns == slot.claimed_ns;
                    if !after.slots.iter().any(still) {
                        open.ended.add(&slot);
                    }
                }
                let bytes: u64 = recovered.bytes.iter().fold(0, |sum, b| sum.saturating_add(*b));
                info!(
                    dir = %self.dir.display(), slots = recovered.slots, bytes,
                    "recovered what dead processes held"
                );
            }
            Err(error) => warn!(%error, "dead processes' slots cannot be recovered"),
        }
        None
    }
}

/// Removes an allocation's directory: its pages, its socket, and itself. Processes that still map
/// the pages keep what they mapped.
///
/// # Errors
/// The file system refuses.
pub fn remove(root: &Path, id: &AllocationId) -> io::Result<()> {
    match std::fs::remove_dir_all(dir(root, id)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn write_pages(
    dir: &Path,
    record: &Record,
    mode: Mode,
) -> Result<(QuotaWriter, UsageFile, Outcome), PageError> {
    let spec = spec(record);
    let mut outcome = Outcome::default();
    let replaced = prepare_dir(dir)?;
    outcome.repaired |= !replaced.is_empty();
    if mode == Mode::Fresh {
        let in_use =
            UsageFile::open(dir).is_ok_and(|usage| usage.any_slot_locked().unwrap_or(true));
        if in_use {
            outcome.kept = true;
        } else {
            // Even sound ones: a new file has nothing of the tenant before, no lease and no
            // descriptor that outlived it.
            remove_pages(dir)?;
        }
    }
    let quota = match quota::create(dir, &spec) {
        Err(error) if is_broken(&error.fault) => {
            warn!(%error, "replacing a quota page");
            outcome.repaired = true;
            remove_file(&error.path)?;
            quota::create(dir, &spec)?
        }
        result => result?,
    };
    let created = match usage::create(dir, spec.generation) {
        Err(error) if is_broken(&error.fault) => {
            warn!(%error, "replacing a usage page");
            outcome.repaired = true;
            remove_file(&error.path)?;
            usage::create(dir, spec.generation)?
        }
        result => result?,
    };
    outcome.repaired |= created.repaired || (mode == Mode::Ensure && created.fresh);
    Ok((quota, UsageFile::open(dir)?, outcome))
}

/// What is put right at once: the page as a whole, so that newcomers find one. Words in slots are their
/// owners' affair.
fn is_restored(what: What) -> bool {
    matches!(
        what,
        What::Size
            | What::Memory
            | What::Magic
            | What::Abi
            | What::SlotCount
            | What::HighWater
            | What::Unclaimed
    )
}

/// Whether the file is not a page of this allocation, so that nothing is lost by replacing it.
fn is_broken(fault: &PageFault) -> bool {
    matches!(
        fault,
        PageFault::NotRegular
            | PageFault::BadMagic
            | PageFault::Abi { .. }
            | PageFault::WrongSize(_)
            | PageFault::Corrupt(_)
            | PageFault::Foreign { .. }
    )
}

fn remove_file(path: &Path) -> Result<(), PageError> {
    std::fs::remove_file(path).map_err(|source| PageError {
        path: path.to_owned(),
        fault: PageFault::Io { call: "unlink", source },
    })
}

fn spec(record: &Record) -> QuotaSpec {
    QuotaSpec {
        allocation: record.id.to_string(),
        generation: record.generation,
        gpus: record.grants.iter().map(gpu_quota).collect(),
    }
}

fn gpu_quota(grant: &Grant) -> GpuQuota {
    GpuQuota {
        uuid: grant.uuid.clone(),
        memory_limit_bytes: grant.memory_limit_bytes,
        context_overhead_bytes: grant.context_overhead_bytes,
        cores_millis: grant.cores_millis,
        policy: match grant.compute {
            Compute::Burst => Policy::Burst,
            Compute::Strict => Policy::Strict,
            Compute::None => Policy::None,
        },
    }
}

/// The limits of a page, to adopt it.
#[must_use]
pub fn grants(spec: &QuotaSpec) -> Vec<Grant> {
    let grant = |gpu: &GpuQuota| Grant {
        uuid: gpu.uuid.clone(),
        memory_limit_bytes: gpu.memory_limit_bytes,
        context_overhead_bytes: gpu.context_overhead_bytes,
        cores_millis: gpu.cores_millis,
        compute: match gpu.policy {
            Policy::Burst => Compute::Burst,
            Policy::Strict => Compute::Strict,
            Policy::None => Compute::None,
        },
    };
    spec.gpus.iter().map(grant).collect()
}

/// What a region's sessions hold of it: they must not keep it alive.
struct Weak(std::sync::Weak<Region>);

impl session::Pages for Weak {
    fn recover(&self) {
        if let Some(region) = self.0.upgrade() {
            let mut open = region.open();
            // The page is of no interest here.
            let _ = region.recover_in(&mut open);
            drop(open);
            region.observed.news();
        }
    }

    fn news(&self) {
        if let Some(region) = self.0.upgrade() {
            region.observed.news();
        }
    }

    fn generation(&self) -> u64 {
        self.0.upgrade().map_or(0, |region| region.generation.load(Ordering::Relaxed))
    }
}
