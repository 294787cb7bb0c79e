//! A features file for node feature discovery: whole at any time, by rename. Its worker reads every file of
//! the directory but those whose names begin with a dot.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Makes `text` the content of `path`, unless it is already; whether it was not.
///
/// # Errors
/// The file system's. What was there before is still there then.
pub(super) fn put(path: &Path, text: &str) -> io::Result<bool> {
    let plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if plain && std::fs::read(path).is_ok_and(|found| found == text.as_bytes()) {
        return Ok(false);
    }
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let temporary = temporary(path);
    // One that a killed plugin left, or a link that somebody put there.
    let _ = std::fs::remove_file(&temporary);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&temporary)
        // No fsync: after a power cut it is written anew.
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.map(|()| true)
}

/// Removes the file, if it is there.
///
/// # Errors
/// The file system's.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Beside it: a rename is atomic only within one file system.
fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_replaced_as_a_whole_and_only_when_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("features.d/tessera");
        assert!(put(&path, "a=1\n").unwrap());
        let before = std::fs::File::open(&path).unwrap();
        assert!(!put(&path, "a=1\n").unwrap());
        assert!(put(&path, "a=2\nb=3\n").unwrap());
        // Who reads the old one reads all of it.
        assert_eq!(io::read_to_string(before).unwrap(), "a=1\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a=2\nb=3\n");
        let names: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_a_killed_plugin_left_and_links_are_overwritten_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("tessera"), dir.path().join("other"));
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        std::os::unix::fs::symlink(&other, temporary(&path)).unwrap();
        assert!(temporary(&path).file_name().unwrap().to_str().unwrap().starts_with('.'));
        assert!(put(&path, "a=1\n").unwrap());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
    }
}
