//! A copy of a database that another process may have open, to be looked at: opening one that a killed process left
//! writes into it, which is the next owner's affair.

use std::fs::{File, Permissions, TryLockError};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::read::{FileError, open};

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A process has it open.
    #[error("a process has it open")]
    InUse,
    /// It could not be locked, or copied.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// A copy in a directory of its own, which nobody else can read. Both go when this is dropped.
#[derive(Debug)]
pub struct Copied {
    dir: TempDir,
}

impl Copied {
    /// Copies a file of at most so many bytes while no process holds it exclusively, as redb locks the database that
    /// it has open.
    ///
    /// # Errors
    /// The file cannot be read, is larger, or is in use; no room for the copy.
    pub fn of(path: &Path, most: u64) -> Result<Self, CopyError> {
        let mut file = open(path)?;
        if file.metadata()?.len() > most {
            return Err(FileError::TooLarge(most).into());
        }
        match file.try_lock_shared() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CopyError::InUse),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        let private = Permissions::from_mode(0o700);
        let dir = tempfile::Builder::new().prefix("tessera-").permissions(private).tempdir()?;
        let copied = Copied { dir };
        std::io::copy(&mut file, &mut File::create_new(copied.path())?)?;
        Ok(copied)
    }

    /// Where the copy is.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("copy.redb")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_private_and_goes_when_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.redb");
        std::fs::write(&path, "what it says").unwrap();
        let copied = Copied::of(&path, 12).unwrap();
        let copy = copied.path();
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), "what it says");
        let parent = copy.parent().unwrap().to_owned();
        assert_eq!(parent.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        drop(copied);
        assert!(!parent.exists());
        assert!(File::open(&path).unwrap().try_lock().is_ok(), "not locked any more");
    }

    #[test]
    fn what_is_in_use_too_large_or_no_file_is_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.redb");
        std::fs::write(&path, "what it says").unwrap();
        let too_large = Copied::of(&path, 11).unwrap_err();
        assert!(matches!(too_large, CopyError::File(FileError::TooLarge(11))), "{too_large}");
        let owner = File::open(&path).unwrap();
        owner.lock().unwrap();
        assert!(matches!(Copied::of(&path, 12).unwrap_err(), CopyError::InUse));
        owner.unlock().unwrap();
        // Another that reads is in nobody's way.
        owner.lock_shared().unwrap();
        Copied::of(&path, 12).unwrap();
        assert!(matches!(Copied::of(dir.path(), 12).unwrap_err(), CopyError::File(_)));
    }
}
