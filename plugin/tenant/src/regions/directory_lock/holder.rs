//! The holder of a pages directory, as far as another process can know.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use tessera_model::printable;

/// The holder's own words, in the directory. Containers see none of it: they have what lies below.
const NOTE: &str = ".holder";
/// Bytes of a note, or of a command line, that are shown.
const SHOWN: u64 = 600;

/// This process's own words: its pid as it sees itself, and where it runs.
pub(super) fn note(about: &str) -> String {
    let host =
        nix::sys::utsname::uname().map(|name| name.nodename().to_owned()).unwrap_or_default();
    let pid = std::process::id();
    format!("pid {pid} on host {}, {about}", host.to_string_lossy())
}

pub(super) fn write(directory: &Path, note: &str) -> io::Result<()> {
    let path = directory.join(NOTE);
    // Whatever lies there, and if nothing can be written, at least nobody else's words.
    let _ = std::fs::remove_file(&path);
    let options = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    options?.write_all(note.as_bytes())
}

/// Removes the note, if it is this one.
pub(super) fn remove(directory: &Path, note: &str) {
    if read(directory).as_deref() == Some(note) {
        let _ = std::fs::remove_file(directory.join(NOTE));
    }
}

fn read(directory: &Path) -> Option<String> {
    let mut text = String::new();
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file =
        std::fs::OpenOptions::new().read(true).custom_flags(flags).open(directory.join(NOTE));
    file.ok()?.take(SHOWN).read_to_string(&mut text).ok()?;
    Some(text).filter(|text| !text.is_empty())
}

/// The process that holds the lock, its command, and what it says of itself.
pub(super) fn describe(path: &Path, directory: &File) -> String {
    let pid = directory.metadata().ok().and_then(|found| {
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        locking(&locks, found.dev(), found.ino())
    });
    let own = read(path);
    let text = match (pid, own) {
        (Some(pid), own) => {
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            let command: String = command.trim().chars().take(300).collect();
            let own = own.map(|own| format!("; it says: {own}")).unwrap_or_default();
            format!("pid {pid} ({command}){own}")
        }
        (None, Some(own)) => {
            format!("in another pid namespace, from where it says: {own}")
        }
        (None, None) => "in another pid namespace, so that nothing more is known of it".to_owned(),
    };
    printable::line(&text).into_owned()
}

/// The pid that holds an flock(2) of this file, by the text of `/proc/locks` (proc(5)):
/// `N: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END`, the device in hexadecimal digits.
fn locking(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let (major, minor) = (nix::libc::major(device), nix::libc::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, _, pid, found, ..] if found == file => {
                pid.parse().ok().filter(|pid| *pid != 0)
            }
            // One that waits has an arrow in the second place.
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found_among_all_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 77 00:1b:5678 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 78 00:1b:5678 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 79 00:1b:5678 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 80 103:02:56 0 EOF\nnonsense\n";
        assert_eq!(locking(locks, nix::libc::makedev(0, 0x1b), 5678), Some(78));
        assert_eq!(locking(locks, nix::libc::makedev(0x103, 2), 56), Some(80));
        assert_eq!(locking(locks, nix::libc::makedev(0x103, 2), 57), None);
    }
}
