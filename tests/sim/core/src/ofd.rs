//! Byte-range locks on the state file (fcntl(2)): the kernel drops them at death.

use std::os::fd::RawFd;

fn flock(kind: i32, start: i64) -> libc::flock {
    #[allow(clippy::cast_possible_truncation, reason = "F_RDLCK and SEEK_SET are small constants")]
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    }
}

fn set(fd: RawFd, command: i32, kind: i32, start: i64) -> bool {
    let lock = flock(kind, start);
    loop {
        // SAFETY: `lock` is a valid flock for these commands.
        if unsafe { libc::fcntl(fd, command, &raw const lock) } == 0 {
            return true;
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return false;
        }
    }
}

/// Locks one byte for this open file description, exclusively, without waiting.
#[must_use]
pub fn try_exclusive(fd: RawFd, at: i64) -> bool {
    set(fd, libc::F_OFD_SETLK, libc::F_WRLCK, at)
}

/// Locks one byte for this description, shared, waiting for an exclusive holder.
#[must_use]
pub fn shared(fd: RawFd, at: i64) -> bool {
    set(fd, libc::F_OFD_SETLKW, libc::F_RDLCK, at)
}

pub fn unlock(fd: RawFd, at: i64) {
    set(fd, libc::F_OFD_SETLK, libc::F_UNLCK, at);
}

/// Whether another description holds the byte exclusively. Errors read as "held": nobody is
/// declared dead on a doubt.
#[must_use]
pub fn is_held(fd: RawFd, at: i64) -> bool {
    let mut lock = flock(libc::F_RDLCK, at);
    // SAFETY: `lock` is a valid flock to be filled in; F_OFD_GETLK wants l_pid 0.
    let rc = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) };
    rc != 0 || i32::from(lock.l_type) != libc::F_UNLCK
}

/// Takes a traditional (per-process) lock, which carries the pid.
pub fn sign_pid(fd: RawFd, at: i64) {
    set(fd, libc::F_SETLK, libc::F_WRLCK, at);
}

/// Drops the traditional lock.
pub fn unsign_pid(fd: RawFd, at: i64) {
    set(fd, libc::F_SETLK, libc::F_UNLCK, at);
}

/// The pid, in the caller's namespace, of the process that signed the byte. 0: it is not visible
/// from here; `None`: nobody holds it.
#[must_use]
pub fn signer_pid(fd: RawFd, at: i64) -> Option<i32> {
    let mut lock = flock(libc::F_WRLCK, at);
    // SAFETY: `lock` is a valid flock to be filled in.
    let rc = unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) };
    (rc == 0 && i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid.max(0))
}
