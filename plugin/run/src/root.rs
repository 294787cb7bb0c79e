//! Where the runs of a user are: one directory, so that they find one another.
//!
//! `$XDG_RUNTIME_DIR`, a tmpfs of the user's own, else the temporary directory, has a directory
//! `tessera-run-<uid>` in it while there are runs: a directory for each, and the arbiter's lock.
//! Runs on another simulated machine (`SIMGPU_STATE`) have another, because its GPUs are others although
//! they may be called the same.
//!
//! Every user may write to the temporary directory, so another user may have the name already. Runs fail then.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;
use nix::sys::stat::FileStat;
use sha2::{Digest, Sha256};
use tessera_model::clock::monotonic_ns;
use tessera_region::layout::{CONTAINER_PAGES_DIR, PAGES_DIR_ENV};
use tessera_region::quota::QuotaReader;
use tessera_system::files::{self, Dir, is_directory};

use super::pages::{PREFIX, is_in_use};

const LOCK: &str = "arbiter.lock";
/// Tries, where another run removes the directory as the last of them while this one comes.
const TRIES: usize = 8;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub dir: PathBuf,
}

impl Root {
    /// The directory, made if there is none.
    pub fn open() -> anyhow::Result<Self> {
        let machine = std::env::var_os("SIMGPU_STATE").unwrap_or_default();
        Self::open_in(&files::base()?, &machine.to_string_lossy())
    }

    /// `machine`: which simulated one; empty where there is none.
    pub fn open_in(base: &Path, machine: &str) -> anyhow::Result<Self> {
        let mut name = format!("tessera-run-{}", nix::unistd::geteuid());
        if !machine.is_empty() {
            let hash = Sha256::digest(machine);
            name.extend(hash.iter().take(4).map(|byte| format!("{byte:02x}")));
            name.insert(name.len() - 8, '-');
        }
        let root = Root { dir: base.join(name) };
        root.ensure()?;
        Ok(root)
    }

    /// The directory itself.
    ///
    /// # Errors
    /// It is not there, or no longer this user's alone.
    pub fn handle(&self) -> io::Result<Dir> {
        let dir = Dir::open(&self.dir)?;
        match is_own(&dir.own_stat()?) {
            true => Ok(dir),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    fn ensure(&self) -> anyhow::Result<()> {
        let dir = self.dir.display();
        match Dir::holding(&self.dir).and_then(|(base, name)| base.make_dir(name, 0o700)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make {dir}"));
            }
            _ => {}
        }
        match self.handle() {
            // Another run was the last and has removed it: it is made again when something is put there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            own => own
                .map(drop)
                .with_context(|| format!("{dir} is not yours alone: set XDG_RUNTIME_DIR")),
        }
    }

    /// A new directory, mode 0700, whose name begins with `prefix`.
    pub fn make(&self, prefix: &str) -> anyhow::Result<PathBuf> {
        for _ in 0..TRIES {
            let name = format!("{prefix}{}", unique());
            match self.handle().and_then(|dir| dir.make_dir(&name, 0o700)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.ensure()?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made.with_context(|| {
                        format!("cannot make a directory in {}", self.dir.display())
                    })?;
                    return Ok(self.dir.join(name));
                }
            }
        }
        anyhow::bail!("{} is removed again and again", self.dir.display())
    }

    /// The directories of runs.
    pub fn runs(&self) -> Vec<PathBuf> {
        let names = self.handle().and_then(|dir| dir.names()).unwrap_or_default();
        let runs = names.into_iter().filter(|name| name.as_bytes().starts_with(PREFIX.as_bytes()));
        runs.map(|name| self.dir.join(name)).collect()
    }

    /// The lock of who arbitrates, not yet taken.
    pub fn lock_file(&self) -> io::Result<File> {
        self.handle()?.open_or_make(LOCK, 0o600)
    }

    /// Whether a file that was opened as the lock still is it.
    pub fn is_lock(&self, file: &File) -> bool {
        let here = self.handle().and_then(|dir| dir.stat(LOCK));
        let (Ok(here), Ok(file)) = (here, file.metadata()) else { return false };
        (here.st_dev, here.st_ino) == (file.dev(), file.ino())
    }

    /// Removes the directory if there are no runs. The caller holds the lock.
    pub fn remove_if_empty(&self) {
        if self.runs().is_empty()
            && let Ok(dir) = self.handle()
        {
            let _ = dir.remove(LOCK);
            // Fails if a run starts just now, which makes the lock again.
            let _ = Dir::holding(&self.dir).and_then(|(base, name)| base.remove_dir(name));
        }
    }
}

/// Whether a directory is this user's alone.
fn is_own(stat: &FileStat) -> bool {
    is_directory(stat)
        && stat.st_uid == nix::unistd::geteuid().as_raw()
        && stat.st_mode & 0o077 == 0
}

/// A name that no other directory of this machine has had.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:x}-{:x}-{next:x}", std::process::id(), monotonic_ns())
}

/// Refuses to run within a quota. A process is held by the pages that it finds first, and by no others: a run within
/// a run would take its command out of the outer quota, and several of them together would hold more
/// than that allows. Within a container the container's pages count, so that the run's own would not.
///
/// # Errors
/// There is one around this process: what to do instead.
pub(super) fn refuse() -> anyhow::Result<()> {
    anyhow::ensure!(
        Path::new(CONTAINER_PAGES_DIR).symlink_metadata().is_err(),
        "this container has a quota already ({CONTAINER_PAGES_DIR}), which holds every command in it, \
         and a smaller one within it would not be held: leave `tessera run` out, or ask for a smaller \
         share in the pod"
    );
    anyhow::ensure!(
        !is_named(std::env::var_os(PAGES_DIR_ENV).as_deref().map(Path::new)),
        "this is within another `tessera run`, whose quota would not hold what this one starts: leave \
         the inner `tessera run` out, or start both side by side, each with a part of the memory"
    );
    Ok(())
}

/// Whether the environment names pages of a run that lives.
fn is_named(dir: Option<&Path>) -> bool {
    dir.is_some_and(|dir| QuotaReader::attach(dir).is_ok() && is_in_use(dir))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn machines_have_directories_of_their_own_which_go_when_they_are_empty() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::open_in(base.path(), "").unwrap();
        let other = Root::open_in(base.path(), "/dev/shm/x").unwrap();
        assert_ne!(root.dir, other.dir);
        let run = root.make(PREFIX).unwrap();
        let lock = root.lock_file().unwrap();
        root.remove_if_empty();
        assert!(root.is_lock(&lock) && run.exists());
        fs::remove_dir(&run).unwrap();
        root.remove_if_empty();
        assert!(!root.is_lock(&lock) && !root.dir.exists());
        // The next run makes it again.
        assert!(root.make(PREFIX).unwrap().exists());
    }

    #[test]
    fn what_somebody_else_has_put_in_its_place_is_left_alone_and_named() {
        let base = tempfile::tempdir().unwrap();
        let victim = tempfile::tempdir().unwrap();
        let taken = base.path().join(format!("tessera-run-{}", nix::unistd::geteuid()));
        let hostile: [&dyn Fn(); 4] = [
            &|| std::os::unix::fs::symlink(victim.path(), &taken).unwrap(),
            &|| fs::write(&taken, "").unwrap(),
            &|| nix::unistd::mkfifo(&taken, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            &|| {
                fs::create_dir(&taken).unwrap();
                fs::set_permissions(&taken, fs::Permissions::from_mode(0o777)).unwrap();
            },
        ];
        for put in hostile {
            put();
            let before = fs::symlink_metadata(&taken).unwrap();
            let error = Root::open_in(base.path(), "").unwrap_err().to_string();
            assert!(error.contains("not yours alone: set XDG_RUNTIME_DIR"), "{error}");
            assert_eq!(fs::symlink_metadata(&taken).unwrap().ino(), before.ino(), "left alone");
            match before.is_dir() {
                true => fs::remove_dir(&taken).unwrap(),
                false => fs::remove_file(&taken).unwrap(),
            }
        }
        assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_takes_its_place_later_is_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let victim = tempfile::tempdir().unwrap();
        fs::create_dir(victim.path().join("run.victim")).unwrap();
        let root = Root::open_in(base.path(), "").unwrap();
        fs::rename(&root.dir, base.path().join("aside")).unwrap();
        std::os::unix::fs::symlink(victim.path(), &root.dir).unwrap();
        assert!(root.runs().is_empty() && root.lock_file().is_err() && root.handle().is_err());
        root.remove_if_empty();
        assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 1);
    }
}
