//! The one directory in which everything lives, and its end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tessera_system::files::Dir;

use super::keeper::Keeper;

/// In the directory; locked while a sandbox lives there.
const LOCK: &str = "lock";
/// What temporary directories' names begin with.
pub const PREFIX: &str = "tessera-";
/// Longest path of a directory in which sockets of plugins have room: a socket's path has at most 107 bytes
/// (unix(7)), of which `/n0/k/device-plugins/` and the name of a resource's socket take the others.
const LONGEST: usize = 31;

/// A directory of our own. A temporary one goes with this value, whatever becomes of this process.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    keep: bool,
    keeper: Option<Keeper>,
    /// Held as long as the directory is in use.
    _lock: Option<Flock<fs::File>>,
}

impl Scratch {
    /// A fresh directory among the temporary files, whose name begins with `prefix`.
    pub fn temporary(prefix: &str) -> anyhow::Result<Self> {
        let template = std::env::temp_dir().join(format!("{prefix}XXXXXX"));
        let path = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("cannot make {}", template.display()))?;
        Ok(Self { path, keep: false, keeper: None, _lock: None })
    }

    /// The directory that the user named, made where there is none. It stays at the end.
    pub fn named(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        if !path.exists() {
            fs::create_dir_all(path).with_context(|| format!("cannot make {shown}"))?;
        }
        // Links on the way to it are the caller's choice.
        let path = path.canonicalize().with_context(|| format!("cannot use {shown}"))?;
        let dir = Dir::own(&path).with_context(|| format!("{shown} must be your own"))?;
        anyhow::ensure!(
            dir.stat(LOCK).is_ok() || dir.names()?.is_empty(),
            "{shown} has other files in it; name an empty directory, or one of an earlier sandbox"
        );
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot use {shown}"))?;
        Ok(Self { path, keep: true, keeper: None, _lock: None })
    }

    /// Leaves the directory where it is at the end.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Takes the directory for this process: nobody else may use it, and what was started in it ends with this
    /// process, however that ends.
    pub fn occupy(&mut self) -> anyhow::Result<()> {
        let shown = self.path.display();
        let length = self.path.as_os_str().len();
        anyhow::ensure!(
            length <= LONGEST,
            "{shown} has {length} characters, and sockets in it could have no name; set TMPDIR, or give \
             --dir, so that it has at most {LONGEST}"
        );
        let file = Dir::own(&self.path).and_then(|dir| dir.open_or_make(LOCK, 0o600));
        let file = file.with_context(|| format!("cannot write in {shown}"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            match errno {
                Errno::EAGAIN => anyhow::anyhow!(
                    "another sandbox lives in {shown}; name another directory, or talk to that one: \
                     `tessera sandbox list --dir {shown}`"
                ),
                errno => anyhow::anyhow!("cannot lock {shown}: {errno}"),
            }
        })?;
        self._lock = Some(lock);
        self.keeper = Some(Keeper::start(&self.path, !self.keep)?);
        Ok(())
    }

    /// Whether it stays at the end.
    pub fn is_kept(&self) -> bool {
        self.keep
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A directory in it, made where there is none.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
        // It ends whatever still runs here, and then itself.
        drop(self.keeper.take());
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_temporary_directory_goes_unless_it_is_to_be_kept() {
        let scratch = Scratch::temporary(PREFIX).unwrap();
        let dir = scratch.dir("a/b").unwrap();
        assert!(dir.is_dir());
        drop(scratch);
        assert!(!dir.exists());
    }

    #[test]
    fn a_directory_with_other_files_is_left_alone() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("thesis.tex"), "").unwrap();
        let error = Scratch::named(tmp.path()).unwrap_err().to_string();
        assert!(error.contains("has other files in it"), "{error}");
        assert!(tmp.path().join("thesis.tex").exists());
    }

    #[test]
    fn a_lock_that_is_a_link_is_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("precious"), "text").unwrap();
        let dir = tmp.path().join("s");
        fs::create_dir(&dir).unwrap();
        symlink("../precious", dir.join(LOCK)).unwrap();
        let mut scratch = Scratch::named(&dir).unwrap();
        scratch.occupy().unwrap_err();
        assert_eq!(fs::read_to_string(tmp.path().join("precious")).unwrap(), "text");
    }

    #[test]
    fn a_directory_of_another_user_is_left_alone() {
        let tmp = tempfile::tempdir().unwrap();
        if chown(tmp.path(), Some(65534), None).is_err() {
            eprintln!("not checked, for only root gives a directory away");
            return;
        }
        let error = format!("{:#}", Scratch::named(tmp.path()).unwrap_err());
        assert!(error.contains("must be your own: it is uid 65534's"), "{error}");
    }

    #[test]
    fn a_path_without_room_for_sockets_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::named(&tmp.path().join("x".repeat(60))).unwrap();
        let error = scratch.occupy().unwrap_err().to_string();
        assert!(error.contains("set TMPDIR"), "{error}");
    }
}
