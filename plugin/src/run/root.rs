//! Where the runs of a user are: one directory, so that they find one another.
//!
//! `$XDG_RUNTIME_DIR`, a tmpfs of the user's own, else the temporary directory, has a directory
//! `tessera-run-<uid>` in it while there are runs: a directory for each, and the lock of who arbitrates.
//! Runs on another simulated machine (`SIMGPU_STATE`) have another, because its GPUs are others although
//! they may be called the same.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use sha2::{Digest, Sha256};

use super::pages::PREFIX;

const LOCK: &str = "arbiter.lock";
/// Tries, where another run removes the directory as the last of them while this one comes.
const TRIES: usize = 8;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Root {
    dir: PathBuf,
}

impl Root {
    /// The directory, made if there is none.
    ///
    /// # Errors
    /// It cannot be made, or is somebody else's.
    pub fn open() -> anyhow::Result<Self> {
        let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let base = base.filter(|dir| dir.is_dir()).unwrap_or_else(std::env::temp_dir);
        let machine = std::env::var_os("SIMGPU_STATE").unwrap_or_default();
        Self::open_in(&base, &machine.to_string_lossy())
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

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn ensure(&self) -> anyhow::Result<()> {
        match fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.with_context(|| format!("cannot make {}", self.dir.display()))?,
        }
        let Ok(meta) = fs::symlink_metadata(&self.dir) else { return Ok(()) };
        let own = meta.is_dir() && meta.uid() == nix::unistd::geteuid().as_raw();
        anyhow::ensure!(
            own && meta.mode() & 0o077 == 0,
            "{} is not a directory of yours alone (mode 0700); remove it, or set XDG_RUNTIME_DIR to \
             a directory of your own",
            self.dir.display()
        );
        Ok(())
    }

    /// A new directory, mode 0700, whose name begins with `prefix`.
    ///
    /// # Errors
    /// A full or read-only file system.
    pub fn make(&self, prefix: &str) -> anyhow::Result<PathBuf> {
        let template = self.dir.join(format!("{prefix}XXXXXX"));
        for _ in 0..TRIES {
            match nix::unistd::mkdtemp(&template) {
                Err(nix::errno::Errno::ENOENT) => self.ensure()?,
                made => {
                    return made.with_context(|| {
                        format!("cannot make a directory in {}", self.dir.display())
                    });
                }
            }
        }
        anyhow::bail!("{} is removed again and again", self.dir.display())
    }

    /// The directories of runs.
    pub fn runs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let run = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default();
            name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
        };
        entries.map(|entry| entry.path()).filter(run).collect()
    }

    /// The lock of who arbitrates, not yet taken.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn lock_file(&self) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(nix::libc::O_NOFOLLOW);
        options.open(self.dir.join(LOCK))
    }

    /// Whether a file that was opened as the lock still is it.
    pub fn is_lock(&self, file: &File) -> bool {
        let here = fs::symlink_metadata(self.dir.join(LOCK));
        let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        matches!((&here, &file.metadata()), (Ok(here), Ok(file)) if same(here, file))
    }

    /// Removes the directory if there are no runs. Only for who holds the lock.
    pub fn remove_if_empty(&self) {
        if self.runs().is_empty() {
            let _ = fs::remove_file(self.dir.join(LOCK));
            // Fails if somebody comes just now, who makes the lock anew.
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn machines_have_directories_of_their_own_which_go_when_they_are_empty() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::open_in(base.path(), "").unwrap();
        let other = Root::open_in(base.path(), "/dev/shm/x").unwrap();
        assert_ne!(root.dir(), other.dir());
        let run = root.make(PREFIX).unwrap();
        let lock = root.lock_file().unwrap();
        root.remove_if_empty();
        assert!(root.is_lock(&lock) && run.exists());
        fs::remove_dir(&run).unwrap();
        root.remove_if_empty();
        assert!(!root.is_lock(&lock) && !root.dir().exists());
        // Whoever comes then makes it again.
        assert!(root.make(PREFIX).unwrap().exists());
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::open_in(base.path(), "").unwrap();
        fs::set_permissions(root.dir(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = Root::open_in(base.path(), "").unwrap_err().to_string();
        assert!(error.contains("XDG_RUNTIME_DIR"), "{error}");
    }
}
