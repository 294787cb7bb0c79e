//! The directory of all pages. It is a tmpfs of its own with a limit, because a tenant can grow its usage file, and must
//! not be able to fill `/run` with it.
//!
//! One plugin has it: a lock on the directory itself, held for the life of the plugin and released by the kernel when it
//! ends, however it ends (flock(2)). On the directory and not on a file in or beside it, so that it makes no difference by
//! which path it is reached, and so that nothing is left.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use tessera_config::TmpfsPolicy;
use tessera_model::quantity::format_bytes;
use tessera_system::files;
use tessera_system::locks::lock;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Dedicated {
        bytes: u64,
        mounted: bool,
        /// It is not of the size asked for, and could not be made so: why.
        kept: Option<String>,
    },
    /// Something else, and that is accepted; the sentence says what it means.
    Shared {
        /// For people; empty where the configuration asked for it.
        warning: String,
    },
}

impl Found {
    pub fn warning(&self) -> Option<&str> {
        match self {
            Found::Dedicated { kept, .. } => kept.as_deref(),
            Found::Shared { warning } => Some(warning.as_str()).filter(|text| !text.is_empty()),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TmpfsError {
    #[error("paths.pages {path}: {error}")]
    Directory { path: String, error: io::Error },
    /// `pages.tmpfs = "require"` and it can't be.
    #[error(
        "paths.pages {path} is not a tmpfs of its own and none can be mounted there ({error}); run \
         `tessera prepare-host` as root on the host, or set pages.tmpfs = \"prefer\""
    )]
    Required { path: String, error: String },
}

/// Makes `dir` a tmpfs of its own of `bytes`, as far as `policy` asks and the kernel allows.
pub fn ensure(dir: &Path, policy: TmpfsPolicy, bytes: u64) -> Result<Found, TmpfsError> {
    let path = || dir.display().to_string();
    std::fs::create_dir_all(dir).map_err(|error| TmpfsError::Directory { path: path(), error })?;
    if policy == TmpfsPolicy::Off {
        return Ok(Found::Shared { warning: String::new() });
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    if let Some(found) = dedicated(dir) {
        // Whole pages, as the kernel rounds.
        if found.abs_diff(bytes) < 4096 {
            return Ok(Found::Dedicated { bytes: found, mounted: false, kept: None });
        }
        let size = format!("size={bytes}");
        let resized = mount(
            None::<&str>,
            dir,
            None::<&str>,
            flags | MsFlags::MS_REMOUNT,
            Some(size.as_str()),
        );
        let kept = resized.err().map(|errno| match errno {
            nix::errno::Errno::EINVAL => "more than that is in use".to_owned(),
            errno => errno.desc().to_owned(),
        });
        return Ok(Found::Dedicated {
            bytes: dedicated(dir).unwrap_or(found),
            mounted: false,
            kept: kept.map(|why| {
                let wanted = format_bytes(bytes);
                format!(
                    "pages.size asks for {wanted}, and it cannot be changed ({why}); run `tessera \
                     prepare-host` as root on the host"
                )
            }),
        });
    }
    let options = format!("size={bytes},mode=0755");
    let error = match mount(Some("tessera"), dir, Some("tmpfs"), flags, Some(options.as_str())) {
        Ok(()) => match dedicated(dir) {
            Some(bytes) => return Ok(Found::Dedicated { bytes, mounted: true, kept: None }),
            None => "the mount did not appear".to_owned(),
        },
        Err(error) => error.desc().to_owned(),
    };
    if policy == TmpfsPolicy::Require {
        return Err(TmpfsError::Required { path: path(), error });
    }
    Ok(Found::Shared {
        warning: format!(
            "paths.pages {} is not a tmpfs of its own and none can be mounted there ({error}): a \
             container that grows its usage file can fill the file system; run `tessera \
             prepare-host` on the host",
            path()
        ),
    })
}

/// The size of the tmpfs mounted right at `dir`; `None` for anything else.
fn dedicated(dir: &Path) -> Option<u64> {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|meta| meta.dev());
    let stat = statfs(dir).ok().filter(|stat| stat.filesystem_type() == TMPFS_MAGIC)?;
    if device(dir)? == device(dir.parent()?)? {
        return None;
    }
    let block = u64::try_from(stat.block_size()).ok()?;
    Some(stat.blocks().saturating_mul(block))
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Found::Dedicated { bytes, mounted, kept } => {
                let verb = if *mounted { "mounted" } else { "found" };
                write!(f, "{verb} a tmpfs of {}", format_bytes(*bytes))?;
                kept.as_ref().map_or(Ok(()), |kept| write!(f, "; {kept}"))
            }
            Found::Shared { .. } => f.write_str("not a tmpfs of its own"),
        }
    }
}

/// How long a plugin that is just ending is waited for: one that was asked to end has released it by then.
const PATIENCE: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum DirectoryLockError {
    #[error(
        "paths.pages {0} is in use by another Tessera plugin; stop it, or give each plugin its own paths.pages, \
         paths.ledger and paths.admin"
    )]
    InUse(PathBuf),
    #[error("paths.pages {path}: {error}")]
    Io { path: PathBuf, error: io::Error },
}

/// A pages directory that is this plugin's, until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    directory: Mutex<File>,
}

impl DirectoryLock {
    /// Makes the directory where there is none, and takes it. Waits up to 3 s for one that is ending; blocks.
    pub fn take(path: &Path) -> Result<Self, DirectoryLockError> {
        std::fs::create_dir_all(path).map_err(|error| failed(path, error))?;
        let began = Instant::now();
        let directory = loop {
            match locked(path) {
                Err(DirectoryLockError::InUse(_)) if began.elapsed() < PATIENCE => {
                    if began.elapsed() < STEP {
                        tracing::info!(path = %path.display(), "another plugin has the pages; waiting for its end");
                    }
                    std::thread::sleep(STEP);
                }
                taken => break taken?,
            }
        };
        Ok(DirectoryLock { path: path.to_owned(), directory: Mutex::new(directory) })
    }

    /// Whether another plugin has the directory now. It may have ended a moment later, or another may have come.
    pub fn is_taken(path: &Path) -> bool {
        matches!(locked(path), Err(DirectoryLockError::InUse(_)))
    }

    /// Takes the directory that is there now, if it is another one: somebody has removed it or mounted over
    /// it. Does nothing while there is none.
    pub fn renew(&self) -> Result<(), DirectoryLockError> {
        let mut directory = lock(&self.directory);
        let held = directory.metadata().map_err(|error| failed(&self.path, error))?;
        match std::fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) != (held.dev(), held.ino()) => {
                *directory = locked(&self.path)?;
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(failed(&self.path, error)),
        }
    }
}

fn failed(path: &Path, error: io::Error) -> DirectoryLockError {
    DirectoryLockError::Io { path: path.to_owned(), error }
}

fn locked(path: &Path) -> Result<File, DirectoryLockError> {
    let directory = files::open_directory(path).map_err(|error| failed(path, error))?;
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::WouldBlock) => Err(DirectoryLockError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(failed(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_file_system_is_not_dedicated() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(dedicated(dir.path()), None);
        let off = ensure(&dir.path().join("a/b"), TmpfsPolicy::Off, 1 << 20).unwrap();
        assert_eq!(off, Found::Shared { warning: String::new() });
        assert!(dir.path().join("a/b").is_dir());
    }

    #[test]
    fn a_tmpfs_of_another_size_is_resized_and_never_below_what_is_in_use() {
        use nix::mount::{MntFlags, umount2};
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("pages");
        let ensure = |bytes| ensure(&root, TmpfsPolicy::Prefer, bytes).unwrap();
        let Found::Dedicated { mounted: true, .. } = ensure(1 << 20) else {
            eprintln!("not run: file systems cannot be mounted here");
            return;
        };
        let grown = ensure(4 << 20);
        assert_eq!(grown, Found::Dedicated { bytes: 4 << 20, mounted: false, kept: None });
        std::fs::write(root.join("page"), vec![1; 2 << 20]).unwrap();
        let Found::Dedicated { bytes, kept: Some(kept), .. } = ensure(1 << 20) else { panic!() };
        assert_eq!(bytes, 4 << 20);
        assert!(kept.contains("pages.size asks for 1 MiB") && kept.contains("in use"), "{kept}");
        let options = std::fs::read_to_string("/proc/mounts").unwrap();
        let line = options.lines().find(|line| line.contains(root.to_str().unwrap())).unwrap();
        assert!(line.contains("nosuid,nodev,noexec"), "{line}");
        umount2(&root, MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn where_pages_may_not_be_made_the_error_names_the_key() {
        let path = Path::new("/dev/null/pages");
        let made = ensure(path, TmpfsPolicy::Prefer, 1 << 20).unwrap_err().to_string();
        let taken = DirectoryLock::take(path).unwrap_err().to_string();
        for error in [made, taken] {
            assert!(error.starts_with("paths.pages /dev/null/pages: "), "{error}");
        }
    }
}

/// In one process: flock(2) is a description's, not a process's.
#[cfg(test)]
mod lock_tests {
    use super::*;

    #[test]
    fn another_directory_in_its_place_is_taken_too() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let hold = DirectoryLock::take(&pages).unwrap();
        hold.renew().unwrap();
        std::fs::remove_dir_all(&pages).unwrap();
        hold.renew().unwrap();
        std::fs::create_dir(&pages).unwrap();
        assert!(locked(&pages).is_ok(), "nobody's yet");
        hold.renew().unwrap();
        assert!(matches!(locked(&pages), Err(DirectoryLockError::InUse(_))));
        // Somebody was faster.
        std::fs::remove_dir_all(&pages).unwrap();
        std::fs::create_dir(&pages).unwrap();
        let other = locked(&pages).unwrap();
        assert!(matches!(hold.renew(), Err(DirectoryLockError::InUse(_))));
        drop(other);
        hold.renew().unwrap();
    }
}
