//! Files and directories at configured paths: read and written so that nothing which lies there instead
//! can hold up the process, take its memory, or lead it elsewhere.
//!
//! All that reads or writes a file whose path comes from the configuration, the command line or the
//! environment does so through here. What the kernel itself serves (`/proc`, `/sys`) needs none of this.

mod dir;
mod read;
mod socket;

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use nix::sys::statvfs::statvfs;

pub use dir::{Dir, base, check_peer, is_directory, open_directory, put};
pub use read::{
    FileError, file_or_nothing, in_time, open, open_private, read, read_from, text, utf8,
};
pub use socket::{SocketFile, remove_stale};

/// Most bytes of a configuration: what a ConfigMap can hold.
pub const CONFIGURATION: u64 = 1 << 20;
/// Most bytes of a small file that a program writes for another: a token, a certificate, a line of state.
pub const SMALL: u64 = 1 << 20;
/// Most bytes of a library that is installed.
pub const LIBRARY: u64 = 64 << 20;

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

/// Bytes that programs without root's reserve may still write on the file system of `path` (statvfs(3), `f_bavail`).
pub fn available_bytes(path: &Path) -> io::Result<u64> {
    let stat = statvfs(path)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_space_and_nothing_has_none() {
        let dir = tempfile::tempdir().unwrap();
        assert!(available_bytes(dir.path()).unwrap() > 0);
        let error = available_bytes(&dir.path().join("none")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
