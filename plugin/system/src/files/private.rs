//! A file that names others' pods: for its owner alone.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

const MODE: u32 = 0o600;

/// Opens a file to read and write, or makes it; nobody but its owner can read it from then on. An older version, or
/// another's umask, may have left it open to all.
///
/// # Errors
/// It cannot be opened or made. A mode that cannot be changed is none: the owner of the file is another, and its mode
/// is the other's choice.
pub fn open_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(MODE);
    let file = options.open(path)?;
    if file.metadata()?.permissions().mode() & !MODE & 0o777 != 0 {
        let _ = file.set_permissions(Permissions::from_mode(MODE));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_and_old_files_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new"), dir.path().join("old"));
        std::fs::write(&old, "kept").unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();
        for path in [&new, &old] {
            open_private(path).unwrap();
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, MODE);
        }
        assert_eq!(std::fs::read(&old).unwrap(), b"kept");
    }
}
