//! Whether a name still leads to the same file.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

/// What distinguishes one file from another that has taken its name: device, inode, and time of birth where the file
/// system knows it, because an inode number is used again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl Identity {
    /// Of the file that this was asked of.
    pub fn of(meta: &Metadata) -> Self {
        Identity { device: meta.dev(), inode: meta.ino(), born: meta.created().ok() }
    }

    /// Whether the file at `path`, which links may lead to, is this one.
    pub fn has(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|meta| Identity::of(&meta) == *self)
    }
}
