//! One plugin for one pages directory: a lock on the directory itself, held for the life of the plugin and
//! released by the kernel when it ends, however it ends (flock(2)). On the directory and not on a file in or
//! beside it, so that it makes no difference by which path it is reached, and so that nothing is left.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tessera_model::printable;
use tessera_system::files;
use tessera_system::locks::lock;

/// How long a plugin that is just ending is waited for: one that was asked to end has released it by then.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is tried meanwhile.
const STEP: Duration = Duration::from_millis(20);
/// The holder's own words, in the directory. Containers see none of it: they have what lies below.
const NOTE: &str = ".holder";
/// Most bytes of them.
const NOTE_BYTES: u64 = 600;

/// Why the pages directory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryLockError {
    /// Somebody else holds it.
    #[error(
        "paths.pages {path} is in use by another Tessera plugin: {holder}; stop it, or give each plugin its \
         own paths.pages, paths.ledger and paths.admin"
    )]
    InUse {
        path: PathBuf,
        /// What it says of itself.
        holder: String,
    },
    /// The directory cannot be made or locked.
    #[error("paths.pages {path}: {error}")]
    Io { path: PathBuf, error: io::Error },
}

/// A pages directory that is this plugin's, until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    /// What others read of this plugin.
    note: String,
    directory: Mutex<File>,
}

impl DirectoryLock {
    /// Makes the directory where there is none, and takes it. Waits up to 3 s for one that is ending; blocks.
    /// `about` describes this plugin to one that is refused meanwhile: one line.
    pub fn take(path: &Path, about: &str) -> Result<Self, DirectoryLockError> {
        std::fs::create_dir_all(path).map_err(|error| failed(path, error))?;
        let began = Instant::now();
        let directory = loop {
            match locked(path) {
                Err(DirectoryLockError::InUse { .. }) if began.elapsed() < PATIENCE => {
                    if began.elapsed() < STEP {
                        tracing::info!(path = %path.display(), "another plugin has the pages; waiting for its end");
                    }
                    std::thread::sleep(STEP);
                }
                taken => break taken?,
            }
        };
        let lock = DirectoryLock {
            path: path.to_owned(),
            note: note(about),
            directory: Mutex::new(directory),
        };
        lock.write_note();
        Ok(lock)
    }

    /// Whether another plugin has the directory now. It may have ended a moment later, or another may have come.
    pub fn is_taken(path: &Path) -> bool {
        matches!(locked(path), Err(DirectoryLockError::InUse { .. }))
    }

    /// Takes the directory that is there now, if it is another one: somebody has removed it or mounted over
    /// it. Does nothing while there is none.
    pub fn renew(&self) -> Result<(), DirectoryLockError> {
        let mut directory = lock(&self.directory);
        let held = directory.metadata().map_err(|error| failed(&self.path, error))?;
        match std::fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) != (held.dev(), held.ino()) => {
                *directory = locked(&self.path)?;
                drop(directory);
                self.write_note();
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(failed(&self.path, error)),
        }
    }

    /// Writes a note that names the holder; the lock works without it.
    fn write_note(&self) {
        let path = self.path.join(NOTE);
        // Whatever lies there, and if nothing can be written, at least nobody else's words.
        let _ = std::fs::remove_file(&path);
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        if let Err(error) = made.and_then(|mut file| file.write_all(self.note.as_bytes())) {
            tracing::debug!(%error, "no note in the pages directory of who holds it");
        }
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        if read_note(&self.path) == self.note {
            let _ = std::fs::remove_file(self.path.join(NOTE));
        }
    }
}

/// This process's own words: its pid as it sees itself, and where it runs.
fn note(about: &str) -> String {
    let host =
        nix::sys::utsname::uname().map(|name| name.nodename().to_owned()).unwrap_or_default();
    format!("pid {} on host {}, {about}", std::process::id(), host.to_string_lossy())
}

fn read_note(directory: &Path) -> String {
    let text = files::text(&directory.join(NOTE), NOTE_BYTES);
    text.unwrap_or_else(|_| "it does not say which".to_owned())
}

fn failed(path: &Path, error: io::Error) -> DirectoryLockError {
    DirectoryLockError::Io { path: path.to_owned(), error }
}

fn locked(path: &Path) -> Result<File, DirectoryLockError> {
    let directory = files::open_directory(path).map_err(|error| failed(path, error))?;
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::WouldBlock) => Err(DirectoryLockError::InUse {
            path: path.to_owned(),
            holder: printable::line(&read_note(path)).into_owned(),
        }),
        Err(TryLockError::Error(error)) => Err(failed(path, error)),
    }
}

/// In one process: flock(2) is a description's, not a process's.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_had_once_by_whatever_path_and_again_after_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("a/pages");
        let hold = DirectoryLock::take(&pages, "the first").unwrap();
        std::os::unix::fs::symlink(&pages, dir.path().join("link")).unwrap();
        for path in [pages.clone(), dir.path().join("link"), dir.path().join("a/../a/pages")] {
            let error = locked(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("pid {} on host", std::process::id())), "{error}");
            assert!(error.contains("the first"), "{error}");
        }
        drop(hold);
        assert_eq!(std::fs::read_dir(&pages).unwrap().count(), 0, "nothing is left");
        drop(DirectoryLock::take(&pages, "the second").unwrap());
    }

    #[test]
    fn one_that_ends_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let hold = DirectoryLock::take(dir.path(), "").unwrap();
        let ending = std::thread::spawn(move || {
            std::thread::sleep(STEP * 5);
            drop(hold);
        });
        DirectoryLock::take(dir.path(), "").unwrap();
        ending.join().unwrap();
    }

    #[test]
    fn another_directory_in_its_place_is_taken_too() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let hold = DirectoryLock::take(&pages, "").unwrap();
        hold.renew().unwrap();
        std::fs::remove_dir_all(&pages).unwrap();
        hold.renew().unwrap();
        std::fs::create_dir(&pages).unwrap();
        assert!(locked(&pages).is_ok(), "nobody's yet");
        hold.renew().unwrap();
        assert!(matches!(locked(&pages), Err(DirectoryLockError::InUse { .. })));
        // Somebody was faster.
        std::fs::remove_dir_all(&pages).unwrap();
        std::fs::create_dir(&pages).unwrap();
        let other = locked(&pages).unwrap();
        assert!(matches!(hold.renew(), Err(DirectoryLockError::InUse { .. })));
        drop(other);
        hold.renew().unwrap();
    }

    #[test]
    fn what_cannot_be_made_names_the_key() {
        let error = DirectoryLock::take(Path::new("/dev/null/pages"), "").unwrap_err().to_string();
        assert!(error.starts_with("paths.pages /dev/null/pages: "), "{error}");
    }
}
