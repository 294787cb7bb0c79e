//! Making an allocation's pages, whatever is in their place.
//!
//! A container can delay work on its usage file. Reading, `fstat`, `open` and locks never wait for a tenant. But writing to a file, cutting it,
//! changing its mode and unlinking it need the inode's lock, and that is held through all of a tenant's
//! `write(2)`, which a tenant can make last: from a buffer whose pages come from a FUSE file system or
//! by `userfaultfd(2)`. So such work gets a thread of its own and a limited time, and where it is not
//! done by then, no more of it is begun until it is.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaSpec, QuotaWriter};
use tessera_region::usage::{self, Tally, UsageFile};
use tessera_region::{PAIR_BYTES, PageError, PageFault, Spares, abi, prepare_dir, remove_pages};
use tessera_system::files::Dir;
use tessera_system::locks::lock;
use tracing::warn;

use super::{Mode, Outcome};

/// Begins the names of directories that are on their way out.
const ASIDE: &str = ".aside-";

const SPARE: &str = ".spare";
const SPARES: u64 = 16;

/// Sees to it that there are spare pages, which take a quarter of the file system at most. What cannot
/// be made now, because the file system is full, is made when it is not.
pub fn keep_spares(root: &Path) {
    let Ok(stat) = nix::sys::statvfs::statvfs(root) else { return };
    let total = stat.blocks().saturating_mul(stat.fragment_size());
    let pairs = (total / 4 / PAIR_BYTES).min(SPARES);
    let _ = Spares::new(root.join(SPARE)).fill(usize::try_from(pairs).unwrap_or(0));
}

#[derive(Debug)]
pub(super) struct Pages {
    pub(super) quota: QuotaWriter,
    pub(super) usage: UsageFile,
    pub(super) outcome: Outcome,
    /// What dead processes had counted in slots that were zeroed.
    pub(super) ended: Tally,
}

/// The pages of `record` in `dir`, if they are as they should be: judged by reading, which no container can
/// hold up.
pub(super) fn whole(dir: &Path, record: &Record) -> Option<Pages> {
    let abi = quota::abi_in(dir).filter(|abi| abi::speaks(*abi) && tessera_region::is_open(dir))?;
    let quota = QuotaWriter::open(dir).ok().filter(|quota| quota.spec() == spec(record))?;
    let usage = UsageFile::open_as(dir, abi).ok()?;
    let whole = usage.is_whole(record.generation);
    whole.then(|| Pages { quota, usage, outcome: Outcome::default(), ended: Tally::default() })
}

/// Makes or renews the pages of `record` in `dir`. `in_use` says whether a process still holds a slot,
/// as far as the caller knows by a descriptor it already has; a mode that shuts us out does not count.
/// `shim_abi` is the version that the shim of its containers speaks, as far as that is known.
pub(super) fn write(
    dir: &Path,
    record: &Record,
    mode: Mode,
    in_use: Option<bool>,
    shim_abi: Option<u32>,
) -> Result<Pages, PageError> {
    let spec = spec(record);
    let spares = Spares::new(dir.with_file_name(SPARE));
    let mut outcome = Outcome::default();
    let replaced = prepare_dir(dir)?;
    outcome.repaired |= !replaced.is_empty();
    let found = quota::abi_in(dir);
    let abi = version(found, shim_abi, mode);
    if !abi::speaks(abi) {
        let path = dir.join(tessera_region::layout::QUOTA_FILE);
        return Err(PageError { path, fault: PageFault::Abi { found: abi } });
    }
    if found.is_some_and(|found| found != abi) {
        // The container that starts next could not read them, even if a process still holds a slot there.
        remove_pages(dir)?;
        outcome.repaired = mode != Mode::Fresh;
    } else if mode == Mode::Fresh {
        let by_path = || UsageFile::open_as(dir, abi).is_ok_and(|usage| usage.any_slot_locked());
        if in_use.unwrap_or_else(by_path) {
            outcome.kept = true;
        } else {
            // Even sound ones: a new file has nothing of the tenant before, no lease and no
            // descriptor that outlived it.
            remove_pages(dir)?;
        }
    }
    let quota = match quota::create_from(dir, &spec, abi, Some(&spares)) {
        Err(error) if is_broken(&error.fault) => {
            warn!(%error, "replacing a quota page");
            outcome.repaired = true;
            remove_file(&error.path)?;
            quota::create_from(dir, &spec, abi, Some(&spares))?
        }
        result => result?,
    };
    // A container's root can take the file from a plugin without capabilities, lease it, or go on
    // damaging it. Its next start gets a new one. Not while it may run: it has the old one mounted.
    let replaceable = |fault: &PageFault| {
        is_broken(fault) || mode != Mode::Adopt && !matches!(fault, PageFault::IsDirectory)
    };
    let created = match usage::create_from(dir, spec.generation, abi, Some(&spares)) {
        Err(error) if replaceable(&error.fault) => {
            warn!(%error, "replacing a usage page");
            outcome.repaired = true;
            remove_file(&error.path)?;
            usage::create_from(dir, spec.generation, abi, Some(&spares))?
        }
        result => result?,
    };
    outcome.repaired |= created.repaired || (mode != Mode::Fresh && created.fresh);
    let ended = created.recovered.tally;
    Ok(Pages { quota, usage: UsageFile::open_as(dir, abi)?, outcome, ended })
}

/// The version of the pages: that of the shim which reads them. What a running container has mounted
/// stays as it is, whatever becomes of its shim's file.
fn version(found: Option<u32>, shim: Option<u32>, mode: Mode) -> u32 {
    let kept = match mode {
        Mode::Adopt => found,
        Mode::Ensure if shim.is_none() => found.filter(|abi| abi::speaks(*abi)),
        _ => None,
    };
    kept.or(shim).unwrap_or_else(abi::version)
}

/// Gives the directory another name, because what is in it cannot be changed now, and lets it be removed
/// when it can. Renaming a directory needs the lock of nothing that a container has open.
pub(super) fn set_aside(dir: &Path) -> std::io::Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name = format!("{ASIDE}{}-{serial}", std::process::id());
    let aside = dir.with_file_name(name);
    let (root, own) = Dir::holding(dir)?;
    root.rename(own, aside.file_name().unwrap_or_default())?;
    remove_later(vec![aside]);
    Ok(())
}

/// Removes what [`super::remove`] has not finished when an earlier plugin ended.
pub fn sweep(root: &Path) {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let aside = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(ASIDE.as_bytes()))
    };
    let left: Vec<_> = entries.map(|entry| entry.path()).filter(aside).collect();
    if !left.is_empty() {
        remove_later(left);
    }
}

fn remove_later(dirs: Vec<PathBuf>) {
    let remove = move || {
        for dir in dirs {
            let _ = Dir::holding(&dir).and_then(|(root, name)| root.remove_tree(name));
        }
    };
    // If there is no thread to be had, the next start sweeps.
    let _ = std::thread::Builder::new().name("sweep".into()).stack_size(128 << 10).spawn(remove);
}

/// Whether the file is not a page of this allocation, so that nothing is lost by replacing it.
fn is_broken(fault: &PageFault) -> bool {
    matches!(
        fault,
        PageFault::NotRegular
            | PageFault::BadMagic
            | PageFault::Abi { .. }
            | PageFault::WrongSize(_)
            | PageFault::Foreign { .. }
    )
}

fn remove_file(path: &Path) -> Result<(), PageError> {
    let removed = Dir::holding(path).and_then(|(dir, name)| dir.remove(name));
    removed.map_err(|source| PageError {
        path: path.to_owned(),
        fault: PageFault::Io { call: "unlink", source },
    })
}

pub fn spec(record: &Record) -> QuotaSpec {
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
        policy: policy(grant.compute),
    }
}

pub(super) fn policy(compute: Compute) -> Policy {
    match compute {
        Compute::Burst => Policy::Burst,
        Compute::Strict => Policy::Strict,
        Compute::None => Policy::None,
    }
}

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

/// How long to wait. What there is to do takes microseconds.
const LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldUp {
    /// The tenant is in the middle of a write to its usage file that does not end.
    #[error("a process holds up every change of the usage file by a write that does not end")]
    ByTenant,
    /// The node has no room for a thread, which is nobody's fault; the work was never begun.
    #[error("no thread to change the usage file in (too many processes or too little memory)")]
    NoThread,
}

impl HeldUp {
    pub fn is_tampering(self) -> bool {
        self == HeldUp::ByTenant
    }
}

#[derive(Debug, Default)]
pub(super) struct TimeLimitedWorker {
    turn: Mutex<()>,
    busy: Arc<AtomicBool>,
}

impl TimeLimitedWorker {
    /// Does `work`, or gives up on it; then it goes on by itself.
    pub(super) fn spend<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HeldUp> {
        self.spend_at_most(LIMIT, work, spawn)
    }

    fn spend_at_most<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>,
    ) -> Result<T, HeldUp> {
        let _turn = lock(&self.turn);
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(HeldUp::ByTenant);
        }
        let (done, result) = mpsc::sync_channel(1);
        let busy = Done(Arc::clone(&self.busy));
        let run = move || {
            let value = work();
            drop(busy);
            let _ = done.send(value);
        };
        if spawn(Box::new(run)).is_err() {
            // `run` and with it the mark are gone; the next round tries again.
            return Err(HeldUp::NoThread);
        }
        result.recv_timeout(limit).map_err(|_| HeldUp::ByTenant)
    }
}

fn spawn(work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("pages".into()).stack_size(256 << 10);
    thread.spawn(work).map(drop)
}

/// Takes the mark back when the work is done, or was never begun.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_left_alone_and_tried_again_when_it_has() {
        let time_limited_worker = TimeLimitedWorker::default();
        assert_eq!(time_limited_worker.spend(|| 7), Ok(7));
        let (end, held) = mpsc::channel::<()>();
        let short = Duration::from_millis(20);
        let held_up = Err(HeldUp::ByTenant);
        assert_eq!(
            time_limited_worker.spend_at_most(short, move || held.recv().is_ok(), spawn),
            held_up
        );
        assert_eq!(time_limited_worker.spend(|| 7), Err(HeldUp::ByTenant), "at once");
        end.send(()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while time_limited_worker.spend(|| 7) != Ok(7) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_cannot_be_had_is_not_the_tenants_doing() {
        let time_limited_worker = TimeLimitedWorker::default();
        let none = |_: Box<dyn FnOnce() + Send>| Err(io::ErrorKind::WouldBlock.into());
        assert_eq!(time_limited_worker.spend_at_most(LIMIT, || 7, none), Err(HeldUp::NoThread));
        assert_eq!(time_limited_worker.spend(|| 7), Ok(7), "the next is not kept from its turn");
    }
}
