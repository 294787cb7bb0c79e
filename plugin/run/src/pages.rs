//! The command's private pages directory.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use tessera_region::quota::{self, QuotaSpec, QuotaWriter};
use tessera_region::usage::{self, UsageFile};

use super::root::Root;
use tessera_system::files;
use tessera_system::files::Dir;

/// Begins the names of directories that are whole, and of those that are being made.
pub(super) const PREFIX: &str = "run.";
const MAKING: &str = ".new.";
const LOCK: &str = "lock";
/// Younger directories are left alone: their maker may not have locked them yet.
const SETTLED: Duration = Duration::from_secs(60);

/// A directory with quota and usage page, mode 0700, removed when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    /// What `TESSERA_DIR` is set to.
    pub dir: PathBuf,
    /// What the command's processes wrote.
    pub usage: UsageFile,
    /// Their limits.
    pub quota: QuotaWriter,
    /// Held while the command runs; see [`sweep`].
    _lock: File,
}

impl Pages {
    /// Makes the pages in a fresh directory under `root`, where it appears whole.
    pub fn create(root: &Root, spec: &QuotaSpec) -> anyhow::Result<Self> {
        let making = root.make(MAKING)?;
        let made = Self::fill(making.clone(), spec);
        if made.is_err() {
            remove(&making);
        }
        made
    }

    fn fill(making: PathBuf, spec: &QuotaSpec) -> anyhow::Result<Self> {
        let lock = File::create_new(making.join(LOCK))?;
        lock.lock()?;
        let quota = quota::create(&making, spec)?;
        usage::create(&making, spec.generation)?;
        let usage = UsageFile::open(&making)?;
        let name = making.file_name().unwrap_or_default().to_string_lossy().replace(MAKING, PREFIX);
        let dir = making.with_file_name(name);
        fs::rename(&making, &dir)?;
        Ok(Self { dir, usage, quota, _lock: lock })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Nothing can be done about a failure here, and the next run sweeps.
        remove(&self.dir);
    }
}

/// Removes what earlier runs left that were killed: directories of ours whose lock is free and
/// whose usage page no process holds a slot of.
pub(super) fn sweep(root: &Root) {
    // A directory that cannot be read or removed is no reason not to run.
    let _ = root.handle().and_then(|dir| sweep_in(&dir, &root.dir, SETTLED));
}

fn sweep_in(root: &Dir, path: &Path, settled: Duration) -> io::Result<()> {
    for name in root.names()? {
        if ![PREFIX, MAKING].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            continue;
        }
        if abandoned(root, path, &name, settled).unwrap_or(false) {
            let _ = root.remove_tree(&name);
        }
    }
    Ok(())
}

fn abandoned(root: &Dir, path: &Path, name: &OsStr, settled: Duration) -> io::Result<bool> {
    let stat = root.sub(name)?.own_stat()?;
    if stat.st_uid != nix::unistd::geteuid().as_raw() {
        return Ok(false);
    }
    let modified = UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
    if modified.elapsed().is_ok_and(|age| age < settled) {
        return Ok(false);
    }
    Ok(!is_in_use(&path.join(name)))
}

/// Removes a directory of ours, and follows no link in doing so. What is left the next run sweeps.
fn remove(dir: &Path) {
    let _ = Dir::holding(dir).and_then(|(root, name)| root.remove_tree(name));
}

/// Whether a run, or a process of its command, lives. Unknown counts as yes.
pub(super) fn is_in_use(dir: &Path) -> bool {
    if files::open(&dir.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_err()) {
        return true;
    }
    UsageFile::open(dir).is_ok_and(|usage| usage.any_slot_locked())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use tessera_region::quota::{GpuQuota, Policy};

    use super::*;

    fn spec() -> QuotaSpec {
        QuotaSpec {
            allocation: "run-1".into(),
            generation: 1,
            gpus: vec![GpuQuota {
                uuid: "GPU-5e55e4a0-0000-4000-8000-000000000000".into(),
                memory_limit_bytes: 1 << 30,
                context_overhead_bytes: 0,
                cores_millis: 1000,
                policy: Policy::None,
            }],
        }
    }

    #[test]
    fn pages_are_private_and_go_when_dropped() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::open_in(base.path(), "").unwrap();
        let pages = Pages::create(&root, &spec()).unwrap();
        let dir = pages.dir.to_owned();
        assert!(is_in_use(&dir));
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        assert!(pages.usage.snapshot().is_ok());
        drop(pages);
        assert!(!dir.exists());
    }

    #[test]
    fn an_abandoned_directory_is_swept_and_a_used_one_is_not() {
        let base = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let dir = base.path().join(name);
            fs::create_dir(&dir).unwrap();
            Pages::fill(dir, &spec()).unwrap()
        };
        let used = make(".new.used");
        let left = make(".new.left");
        let (left_dir, left_lock) = (left.dir.clone(), left._lock.try_clone().unwrap());
        std::mem::forget(left);
        // What the kernel does when a killed run's descriptors are closed.
        left_lock.unlock().unwrap();
        let root = Dir::open(base.path()).unwrap();
        sweep_in(&root, base.path(), SETTLED).unwrap();
        assert!(left_dir.exists(), "too young to be judged");
        sweep_in(&root, base.path(), Duration::ZERO).unwrap();
        assert!(!left_dir.exists());
        assert!(used.dir.exists());
    }
}
