//! Page files made in advance. All pages share a file system of limited size, and a tenant can fill it by
//! growing its usage file; its memory cannot be had back faster than it takes it again. So the plugin
//! keeps some files whose memory is allocated already: a new allocation is made of those.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::files;
use crate::layout::{QUOTA_BYTES, QUOTA_FILE, USAGE_BYTES, USAGE_FILE};

/// A directory with spare page files, on the file system of the pages.
#[derive(Clone, Debug)]
pub struct Spares {
    dir: PathBuf,
}

/// What a pair of pages is made of.
const KINDS: [(&str, usize); 2] = [(USAGE_FILE, USAGE_BYTES), (QUOTA_FILE, QUOTA_BYTES)];

/// Bytes of a pair of pages.
pub const PAIR_BYTES: u64 = (USAGE_BYTES + QUOTA_BYTES) as u64;

impl Spares {
    /// Those in `dir`, which need not exist.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Makes files until there are `pairs` of them, and returns how many there are.
    ///
    /// # Errors
    /// What the file system says; those made before it are there.
    pub fn fill(&self, pairs: usize) -> io::Result<usize> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        for pair in 0..pairs {
            for (name, bytes) in KINDS {
                let path = self.path(name, pair);
                if path.exists() {
                    continue;
                }
                // Complete or not there: one that a killed plugin left half made is made again.
                let making = self.dir.join("making");
                let _ = fs::remove_file(&making);
                let mut options = OpenOptions::new();
                let file = options.write(true).create_new(true).mode(0o600).open(&making)?;
                let made = file
                    .set_len(u64::try_from(bytes).unwrap_or(0))
                    .and_then(|()| files::allocate(&file, bytes))
                    .and_then(|()| fs::rename(&making, path));
                if made.is_err() {
                    let _ = fs::remove_file(&making);
                }
                made?;
            }
        }
        Ok(pairs)
    }

    /// Renames a spare of this kind to `path`; false if there is none.
    pub(crate) fn take(&self, name: &str, path: &Path) -> bool {
        let _ = fs::remove_file(path);
        let Ok(entries) = fs::read_dir(&self.dir) else { return false };
        let is_one = |entry: &fs::DirEntry| {
            entry.file_name().to_str().is_some_and(|found| {
                found.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
            })
        };
        entries.flatten().filter(is_one).any(|entry| fs::rename(entry.path(), path).is_ok())
    }

    fn path(&self, name: &str, pair: usize) -> PathBuf {
        self.dir.join(format!("{name}.{pair}"))
    }
}
