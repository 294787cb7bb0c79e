//! Regions: an allocation's directory on the host with its pages and its session socket.
//!
//! A directory is named by its allocation id and stays as long as the allocation does; the files in
//! it are replaced when a new generation begins. Containers mount the directory, so what they see of
//! it follows.

pub mod root;
mod write;

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::monotonic_ns;
use tessera_model::record::{Grant, Record};
use tessera_peers::{self as session, Listener, TenantSessions};
use tessera_region::layout::{MAX_GPUS, SESSION_SOCKET};
use tessera_region::quota::{QuotaSpec, QuotaWriter};
use tessera_region::usage::{Fate, Recovered, SlotView, Snapshot, Tampered, UsageFile};
use tessera_region::{PageError, PageFault};
use tessera_system::locks::lock;
use tracing::{debug, warn};

pub use tessera_region::usage::Tally;
use write::TimeLimitedWorker;
pub use write::{HeldUp, grants, keep_spares, spec, sweep};

/// How often [`Region::try_snapshot`] tries, and between two tries: two milliseconds in all.
const PEEKS: usize = 9;
const PEEK_AGAIN: Duration = Duration::from_micros(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A new tenant: new pages, unless a process still holds a slot in the old ones.
    Fresh,
    /// The tenant there is, of which a container is about to start: what exists stays if it can be used;
    /// what is missing, broken or out of reach is made.
    Ensure,
    /// The tenant there is, which may be running: as `Ensure`, but nothing that a container may have
    /// mounted is replaced because it is out of reach for now.
    Adopt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Fresh pages were asked for, but a process still used the old ones.
    pub kept: bool,
    /// Something was missing, foreign or broken, and is whole now.
    pub repaired: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    #[error(transparent)]
    Page(#[from] PageError),
    /// A page cannot be changed for now: its tenant does not let go of it, or there is no thread to do it in.
    #[error("{path}: {error}")]
    HeldUp { path: PathBuf, error: HeldUp },
    #[error("{path}: session socket: {error}")]
    Socket { path: PathBuf, error: io::Error },
}

impl RegionError {
    pub fn is_full(&self) -> bool {
        match self {
            RegionError::Page(error) => matches!(error.fault, PageFault::NoSpace(_)),
            RegionError::Socket { error, .. } => error.kind() == io::ErrorKind::StorageFull,
            RegionError::HeldUp { .. } => false,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Use {
    pub snapshot: Snapshot,
    /// Everything processes did since the generation began, living ones included.
    pub tally: Tally,
}

#[derive(Debug)]
struct Open {
    usage: Arc<UsageFile>,
    worker: Arc<TimeLimitedWorker>,
    /// What processes did whose slots the plugin zeroed.
    ended: Tally,
    /// What was wrong with the usage page at the last look.
    wrong: Option<Tampered>,
    held_up: Option<Instant>,
    listener: Listener,
}

impl Open {
    /// What a page says, together with what it no longer does.
    fn used(&self, snapshot: Snapshot) -> Use {
        let mut tally = self.ended.clone();
        tally.merge(&snapshot.tally());
        Use { snapshot, tally }
    }
}

#[derive(Debug)]
pub struct Region {
    dir: PathBuf,
    generation: AtomicU64,
    tamperings: AtomicU64,
    /// No container can hold this one up: it is used on the thread that nothing may block.
    quota: Mutex<QuotaWriter>,
    open: Mutex<Open>,
    observed: Observed,
}

pub fn dir(root: &Path, id: &AllocationId) -> PathBuf {
    root.join(id.as_str())
}

/// Ids of all directories under `root` that are named like allocations.
pub fn existing(root: &Path) -> Vec<AllocationId> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let mut ids: Vec<_> =
        entries.filter_map(|entry| AllocationId::parse(entry.file_name().to_str()?)).collect();
    ids.sort();
    ids
}

/// What the quota page of a directory without a record says, so that it can be adopted.
pub fn read_spec(root: &Path, id: &AllocationId) -> Option<QuotaSpec> {
    let spec = QuotaWriter::open(&dir(root, id)).ok()?.spec();
    (spec.allocation == id.as_str()).then_some(spec)
}

impl Region {
    /// Makes or renews the pages of `record`, of the version that its containers' shim speaks where that
    /// is known, and listens for its sessions. Call it within a runtime.
    pub fn create(
        root: &Path,
        record: &Record,
        mode: Mode,
        shim_abi: Option<u32>,
    ) -> Result<(Arc<Self>, Outcome), RegionError> {
        let dir = dir(root, &record.id);
        let made = make_pages(&dir, record, (mode, shim_abi), None, Arc::default())?;
        let tenant = Arc::new(TenantSessions::default());
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
                tamperings: AtomicU64::new(u64::from(made.held_up)),
                observed: Observed::default(),
                quota: Mutex::new(made.pages.quota),
                open: Mutex::new(Open {
                    usage: Arc::new(made.pages.usage),
                    worker: made.worker,
                    ended: made.pages.ended,
                    wrong: None,
                    held_up: None,
                    listener,
                }),
            }
        });
        match failed {
            Some(error) => Err(RegionError::Socket { path: dir, error }),
            None => Ok((region, made.pages.outcome)),
        }
    }

    pub fn renew(
        self: &Arc<Self>,
        record: &Record,
        mode: Mode,
        shim_abi: Option<u32>,
    ) -> Result<Outcome, RegionError> {
        let mut open = self.open();
        // Whatever became of its mode and owner, this descriptor knows.
        let in_use = Some(open.usage.any_slot_locked());
        let how = (mode, shim_abi);
        let made = make_pages(&self.dir, record, how, in_use, Arc::clone(&open.worker))?;
        let outcome = made.pages.outcome;
        let socket = self.dir.join(SESSION_SOCKET);
        let had_socket = socket.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket());
        let new_tenant = mode == Mode::Fresh && !outcome.kept;
        if new_tenant || !had_socket {
            let pages: Arc<dyn session::Pages> = Arc::new(Weak(Arc::downgrade(self)));
            let tenant =
                if new_tenant { Arc::default() } else { Arc::clone(&open.listener.tenant) };
            open.listener = Listener::bind(&self.dir, pages, tenant)
                .map_err(|error| RegionError::Socket { path: self.dir.clone(), error })?;
        }
        if new_tenant {
            open.ended = made.pages.ended;
            self.tamperings.store(0, Ordering::Relaxed);
            self.observed.clear();
        } else {
            open.ended.merge(&made.pages.ended);
            self.tamperings.fetch_add(u64::from(made.held_up), Ordering::Relaxed);
        }
        *lock(&self.quota) = made.pages.quota;
        open.usage = Arc::new(made.pages.usage);
        open.worker = made.worker;
        open.held_up = None;
        self.generation.store(record.generation, Ordering::Relaxed);
        Ok(outcome)
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        lock(&self.open)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn tenant(&self) -> Arc<TenantSessions> {
        Arc::clone(&self.open().listener.tenant)
    }

    /// Times the usage page was found impossible, its file wrong, or changing it held up.
    pub fn tamperings(&self) -> u64 {
        self.tamperings.load(Ordering::Relaxed)
    }

    /// Says "the plugin lives", `CLOCK_MONOTONIC` nanoseconds; 0 for "it stops now". Never blocks.
    pub fn heartbeat(&self, monotonic_ns: u64) {
        lock(&self.quota).set_heartbeat(monotonic_ns);
    }

    pub fn spec(&self) -> QuotaSpec {
        lock(&self.quota).spec()
    }

    /// Changes limits while processes run: they are judged by them from their next request on. Never
    /// blocks.
    pub fn set_limits(&self, grants: &[Grant]) {
        let quota = lock(&self.quota);
        for (gpu, grant) in grants.iter().take(quota.gpus()).enumerate() {
            quota.set_memory_limit(gpu, grant.memory_limit_bytes);
            quota.set_cores(gpu, grant.cores_millis, write::policy(grant.compute));
        }
    }

    /// Whether any process holds a slot. A page that cannot be asked counts as in use.
    pub fn in_use(&self) -> bool {
        self.open().usage.any_slot_locked()
    }

    /// See `tessera_agent::observe`.
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// What is published as overhead on the page's `gpu`-th GPU, bytes.
    pub fn overhead(&self, gpu: usize) -> u64 {
        lock(&self.quota).observed_overhead(gpu)
    }

    pub fn publish_overhead(&self, gpu: usize, bytes: u64) {
        lock(&self.quota).set_observed_overhead(gpu, bytes);
    }

    /// Publishes whether the driver has memory of dead processes on the page's `gpu`-th GPU, whosever they were.
    pub fn publish_departing(&self, gpu: usize, any: bool) {
        lock(&self.quota).set_departing(gpu, any);
    }

    /// The slots in use as they stand, with nothing recovered or repaired; none if the page cannot be
    /// believed.
    pub fn slots(&self) -> Vec<SlotView> {
        self.open().usage.snapshot().unwrap_or_default().slots
    }

    /// What is in use. What dead processes held is taken back; what a tenant did to the page as a whole is
    /// put right; a page that still cannot be true is flagged. Blocking.
    pub fn recover_and_snapshot(&self) -> Use {
        let mut open = self.open();
        let snapshot = match self.recover_in(&mut open).map_or_else(|| open.usage.snapshot(), Ok) {
            Ok(snapshot) => {
                open.wrong = None;
                snapshot
            }
            Err(tampered) => self.flag(&mut open, tampered),
        };
        open.used(snapshot)
    }

    /// What is in use as it stands: nothing is recovered, repaired or flagged, and no tenant can make this
    /// wait for more than a moment. `None` if that is unknown for now.
    pub fn try_snapshot(&self) -> Option<Use> {
        // Another thread's look is over sooner, unless its tenant holds it up.
        let open = (0..PEEKS).find_map(|nth| {
            if nth > 0 {
                std::thread::sleep(PEEK_AGAIN);
            }
            self.open.try_lock().ok()
        })?;
        let snapshot = open.usage.snapshot().ok()?;
        Some(open.used(snapshot))
    }

    /// Puts right what a tenant did to its page as a whole, so that newcomers find one. Words in slots are their owners'
    /// affair.
    fn flag(&self, open: &mut Open, tampered: Tampered) -> Snapshot {
        // Counted when it appears, not at every look.
        if open.wrong != Some(tampered) {
            self.tamperings.fetch_add(1, Ordering::Relaxed);
            warn!(dir = %self.dir.display(), %tampered, "usage page");
            // The driver's figures tell what it hides.
            self.observed.news();
        }
        open.wrong = Some(tampered);
        if tampered.of_page {
            let generation = self.generation.load(Ordering::Relaxed);
            match self.change(open, move |usage| usage.restore(generation)) {
                Some(Ok(_)) => open.wrong = None,
                Some(Err(error)) => warn!(%error, "usage page"),
                None => {}
            }
        }
        open.usage.snapshot().unwrap_or_default()
    }

    /// Changes the usage file, unless the tenant keeps it from being changed.
    fn change<T: Send + 'static>(
        &self,
        open: &mut Open,
        work: impl FnOnce(&UsageFile) -> T + Send + 'static,
    ) -> Option<T> {
        if open.held_up.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            // Other callers need not wait as well.
            return None;
        }
        let usage = Arc::clone(&open.usage);
        match open.worker.spend(move || work(&usage)) {
            Ok(done) => {
                open.held_up = None;
                Some(done)
            }
            Err(error) => {
                if open.held_up.replace(Instant::now()).is_none() {
                    self.tamperings.fetch_add(u64::from(error.is_tampering()), Ordering::Relaxed);
                    warn!(dir = %self.dir.display(), %error, "usage page");
                }
                None
            }
        }
    }

    /// Takes back what dead processes held. The page as it was read before, if it was sound and there
    /// was nothing to take: then nobody need read it again.
    fn recover_in(&self, open: &mut Open) -> Option<Snapshot> {
        let departure = lock(&self.quota).departure();
        let old = monotonic_ns().saturating_sub(u64::try_from(departure.as_nanos()).unwrap_or(0));
        let stays = |slot: &SlotView| slot.departing_ns > old || open.usage.slot_locked(slot.index);
        if let Ok(before) = open.usage.snapshot()
            && before.slots.iter().all(stays)
        {
            let departing = before.slots.iter().any(SlotView::is_departing);
            self.observed.set_departing(departing);
            return Some(before);
        }
        self.recover_by(open, move |usage| usage.bury(departure))
    }

    pub fn settle(&self, fates: Vec<Fate>) {
        let mut open = self.open();
        // Nobody waits for the page as it is afterwards.
        let _ = self.recover_by(&mut open, move |usage| usage.settle(&fates));
    }

    /// Changes slots of the dead. The page as it is then, if it is sound.
    fn recover_by(
        &self,
        open: &mut Open,
        work: impl FnOnce(&UsageFile) -> Result<Recovered, PageError> + Send + 'static,
    ) -> Option<Snapshot> {
        match self.change(open, work)? {
            Ok(recovered) => {
                open.ended.merge(&recovered.tally);
                if recovered.slots > 0 {
                    let bytes = recovered.bytes.iter().fold(0u64, |sum, b| sum.saturating_add(*b));
                    let (dir, slots) = (self.dir.display(), recovered.slots);
                    debug!(%dir, slots, bytes, "recovered what dead processes held");
                }
                let after = open.usage.snapshot();
                let departing = |slots: &Snapshot| slots.slots.iter().any(SlotView::is_departing);
                self.observed.set_departing(after.as_ref().is_ok_and(departing));
                return after.ok();
            }
            Err(error) => warn!(%error, "dead processes' slots cannot be recovered"),
        }
        None
    }
}

/// Removes an allocation's directory: its pages, its socket, and itself. Processes that still map
/// the pages keep what they mapped. Does not wait for files that a tenant keeps from being removed.
pub fn remove(root: &Path, id: &AllocationId) -> io::Result<()> {
    match write::set_aside(&dir(root, id)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

struct Made {
    pages: write::Pages,
    worker: Arc<TimeLimitedWorker>,
    /// The old files were left behind, because they could not be changed.
    held_up: bool,
}

/// Makes the pages, in a limited time. A tenant that does not let go of its file loses the directory
/// with it when its next container starts; while it may run, this is an error, for later.
fn make_pages(
    dir: &Path,
    record: &Record,
    (mode, shim_abi): (Mode, Option<u32>),
    in_use: Option<bool>,
    worker: Arc<TimeLimitedWorker>,
) -> Result<Made, RegionError> {
    // At a start of the plugin, all of them: a thread for each would be most of what that takes.
    if mode == Mode::Adopt
        && let Some(pages) = write::whole(dir, record)
    {
        return Ok(Made { pages, worker, held_up: false });
    }
    // Nobody can hold up what nobody has.
    if !dir.exists() {
        let pages = write::write(dir, record, mode, in_use, shim_abi)?;
        return Ok(Made { pages, worker, held_up: false });
    }
    let (path, wanted) = (dir.to_owned(), record.clone());
    let made = worker.spend(move || write::write(&path, &wanted, mode, in_use, shim_abi));
    match made {
        Ok(pages) => Ok(Made { pages: pages?, worker, held_up: false }),
        // Without a thread nobody knows whether it could be changed.
        Err(error) if mode == Mode::Adopt || !error.is_tampering() => {
            Err(RegionError::HeldUp { path: dir.to_owned(), error })
        }
        Err(error) => {
            warn!(dir = %dir.display(), %error, "its pages are made again");
            let failed = |error| RegionError::Socket { path: dir.to_owned(), error };
            write::set_aside(dir).map_err(failed)?;
            let mut pages = write::write(dir, record, mode, Some(false), shim_abi)?;
            pages.outcome.repaired = true;
            Ok(Made { pages, worker: Arc::default(), held_up: true })
        }
    }
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

    fn memory(&self, gpu: u32) -> Option<(u64, u64)> {
        let (region, gpu) = (self.0.upgrade()?, usize::try_from(gpu).ok()?);
        // The thread that asks serves kubelet, and waits for nobody.
        let snapshot = region.open.try_lock().ok()?.usage.snapshot().ok()?;
        let limit = region.spec().gpus.get(gpu)?.memory_limit_bytes;
        // Requests under way may be refused themselves.
        Some((snapshot.granted(gpu).saturating_add(region.overhead(gpu)), limit))
    }

    fn generation(&self) -> u64 {
        self.0.upgrade().map_or(0, |region| region.generation.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    pub fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_all();
    }

    /// Waits until somebody rings or it is `due`.
    pub fn wait(&self, due: Instant) {
        let mut rung = lock(&self.rung);
        while !*rung {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(rung, left);
            rung = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *rung = false;
    }
}

/// What is known of an allocation's memory beyond its account, and the bell that says that there is news of it.
#[derive(Debug, Default)]
pub struct Observed {
    bell: OnceLock<Arc<Bell>>,
    news: AtomicBool,
    used: Mutex<[Option<u64>; MAX_GPUS]>,
    findings: AtomicU64,
    stands: AtomicBool,
    departing: AtomicBool,
}

impl Observed {
    pub fn attach(&self, bell: &Arc<Bell>) {
        // Set once, with the region's making.
        let _ = self.bell.set(Arc::clone(bell));
    }

    pub fn news(&self) {
        if let Some(bell) = self.bell.get()
            && !self.news.swap(true, Ordering::AcqRel)
        {
            bell.ring();
        }
    }

    pub fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Bytes of its processes on the page's `gpu`-th GPU as the driver said at the last look; `None`
    /// if it did not.
    pub fn used(&self, gpu: usize) -> Option<u64> {
        lock(&self.used).get(gpu).copied().flatten()
    }

    pub fn set_used(&self, gpu: usize, bytes: Option<u64>) {
        if let Some(used) = lock(&self.used).get_mut(gpu) {
            *used = bytes;
        }
    }

    pub fn findings(&self) -> u64 {
        self.findings.load(Ordering::Relaxed)
    }

    pub fn stands(&self) -> bool {
        self.stands.load(Ordering::Relaxed)
    }

    /// Whether the driver may have memory of dead processes of it.
    pub fn departing(&self) -> bool {
        self.departing.load(Ordering::Relaxed)
    }

    pub fn set_departing(&self, any: bool) {
        self.departing.store(any, Ordering::Relaxed);
    }

    pub fn found(&self, new: u64, stands: bool) {
        self.findings.fetch_add(new, Ordering::Relaxed);
        self.stands.store(stands, Ordering::Relaxed);
    }

    pub fn clear(&self) {
        *lock(&self.used) = [None; MAX_GPUS];
        self.findings.store(0, Ordering::Relaxed);
        self.stands.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_ring_once_until_they_are_taken() {
        let bell = Arc::new(Bell::default());
        let observed = Observed::default();
        observed.news();
        assert!(!observed.take_news(), "nobody listens");
        observed.attach(&bell);
        observed.news();
        let far = Instant::now() + Duration::from_secs(60);
        bell.wait(far);
        assert!(Instant::now() < far && observed.take_news() && !observed.take_news());
        let soon = Instant::now() + Duration::from_millis(5);
        bell.wait(soon);
        assert!(Instant::now() >= soon, "no news, no waking");
    }
}
