//! Space on a file system.

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;

/// Bytes that programs without root's reserve may still write on the file system of `path` (statvfs(3), `f_bavail`).
///
/// # Errors
/// There is nothing at `path`, or the system does not tell.
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
