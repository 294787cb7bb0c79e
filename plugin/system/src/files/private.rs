//! Files that are written: one that names others' pods, for its owner alone; one that instances lock. As with those
//! that are read, nothing else that lies there is opened.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::libc::{O_NOCTTY, O_NONBLOCK};

use super::read::{file_or_nothing, regular};

const MODE: u32 = 0o600;

/// Opens a file to read and write, or makes it; nobody but its owner can read it from then on. An older version, or
/// another's umask, may have left it open to all.
///
/// # Errors
/// It cannot be opened or made, or is no regular file. A mode that cannot be changed is none: the owner of the file is another, and its mode
/// is the other's choice.
pub fn open_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = open_as(path, &mut options)?;
    if file.metadata()?.permissions().mode() & !MODE & 0o777 != 0 {
        let _ = file.set_permissions(Permissions::from_mode(MODE));
    }
    Ok(file)
}

/// Opens a file that several processes lock, or makes it.
///
/// # Errors
/// It cannot be opened or made, or is no regular file.
pub fn open_lock(path: &Path) -> io::Result<File> {
    open_as(path, File::options().create(true).append(true))
}

fn open_as(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // To open a device may do something to it, and a pipe would be waited for.
    file_or_nothing(path)?;
    let file = options.mode(MODE).custom_flags(O_NONBLOCK | O_NOCTTY).open(path)?;
    // What is there may be another by now.
    regular(&file.metadata()?)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_regular_files_are_opened_to_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/zero", at("zero")).unwrap();
        for (name, said) in [
            ("fifo", "it is a pipe"),
            ("socket", "it is a socket"),
            ("zero", "it is a device"),
            ("", "it is a directory"),
        ] {
            for open in [open_private, open_lock] {
                let error = open(&at(name)).unwrap_err();
                assert!(error.to_string().contains(said), "{name}: {error}");
            }
        }
        open_lock(&at("lock")).unwrap().try_lock().unwrap();
        open_lock(&at("lock")).unwrap();
    }

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
