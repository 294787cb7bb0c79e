//! What is this user's own: directories that no other user made or can replace, and peers at a Unix socket that act
//! for nobody else.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::sockopt::{PeerCredentials, SendTimeout};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket,
};
use nix::sys::stat::FileStat;
use nix::sys::time::{TimeVal, TimeValLike};
use nix::unistd::geteuid;

use super::Dir;

/// What the kernel shows for an owner that this user namespace has no name for (`overflowuid`, proc(5)). Nobody
/// here is one.
const UNMAPPED: u32 = 65534;

impl Dir {
    /// As [`Dir::open`], of a directory that this user owns.
    ///
    /// # Errors
    /// As [`Dir::open`]; it is another's.
    pub fn own(path: &Path) -> io::Result<Self> {
        let dir = Self::open(path)?;
        let (owner, caller) = (dir.own_stat()?.st_uid, geteuid().as_raw());
        match owner == caller {
            true => Ok(dir),
            false => Err(not_ours(format!("it is uid {owner}'s, and this is uid {caller}"))),
        }
    }

    /// Connects to the socket of this name, whose listener must act for this user or root. What is written from then
    /// on may wait for `limit`, too.
    ///
    /// # Errors
    /// The system's; somebody else listens; `WouldBlock`: its queue is full.
    pub fn connect_own(&self, name: impl AsRef<OsStr>, limit: Duration) -> io::Result<UnixStream> {
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        // Before it connects: a queue that is full is waited for (unix(7)).
        let limit = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
        setsockopt(&fd, SendTimeout, &TimeVal::milliseconds(limit))?;
        connect(fd.as_raw_fd(), &UnixAddr::new(&self.path().join(name.as_ref()))?)?;
        check_peer(&fd)?;
        Ok(fd.into())
    }
}

/// Whether the other end of a connection over a Unix socket acts for this user, or for root, who may be anybody.
///
/// # Errors
/// It acts for another user, or the kernel does not say.
pub fn check_peer(stream: &impl AsFd) -> io::Result<()> {
    let (peer, caller) = (getsockopt(stream, PeerCredentials)?.uid(), geteuid().as_raw());
    match peer == 0 || peer == caller {
        true => Ok(()),
        false => Err(not_ours(format!("the other end is uid {peer}'s, and this is uid {caller}"))),
    }
}

fn not_ours(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Where this user may keep what no other user can replace: `$XDG_RUNTIME_DIR`, if it is this user's own; else the
/// temporary directory.
///
/// # Errors
/// Others can change what is in the temporary directory.
pub fn base() -> io::Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // With sudo it may be the caller's.
    if let Some(runtime) = runtime.filter(|dir| is_own(dir)) {
        return Ok(runtime);
    }
    let temporary = std::env::temp_dir();
    match is_shared_safely(&temporary) {
        true => Ok(temporary),
        false => Err(not_ours(format!(
            "others may replace what is in {}: set XDG_RUNTIME_DIR to a directory of your own with mode 0700, in \
             which and above which nobody else may write",
            temporary.display()
        ))),
    }
}

/// Whether only this user can change what is in `dir`.
fn is_own(dir: &Path) -> bool {
    dir.is_absolute()
        && Dir::own(dir).and_then(|dir| dir.own_stat()).is_ok_and(|stat| stat.st_mode & 0o022 == 0)
        && dir.canonicalize().is_ok_and(|real| real.ancestors().all(is_kept))
}

/// Whether others can change only what is theirs in `dir`.
fn is_shared_safely(dir: &Path) -> bool {
    dir.canonicalize().is_ok_and(|real| real.is_dir() && real.ancestors().all(is_kept))
}

/// Whether what others own in this directory is all that they can rename or remove: it is root's or the
/// user's, and either nobody else may write or it is sticky.
fn is_kept(dir: &Path) -> bool {
    let owners = [0, geteuid().as_raw(), UNMAPPED];
    let kept = |stat: FileStat| {
        owners.contains(&stat.st_uid) && (stat.st_mode & 0o022 == 0 || stat.st_mode & 0o1000 != 0)
    };
    Dir::open(dir).and_then(|dir| dir.own_stat()).is_ok_and(kept)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::CommandExt;

    use nix::sys::socket::{Backlog, listen};

    use super::*;

    fn set_mode(dir: &Path, mode: u32) {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_change_is_not_taken() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("dir");
        fs::create_dir(&dir).unwrap();
        for (mode, own, shared) in
            [(0o700, true, true), (0o755, true, true), (0o777, false, false), (0o1777, false, true)]
        {
            set_mode(&dir, mode);
            assert_eq!((is_own(&dir), is_shared_safely(&dir)), (own, shared), "{mode:o}");
        }
        set_mode(&dir, 0o700);
        // A user that may write above may put another in its place.
        set_mode(base.path(), 0o777);
        assert!(!is_own(&dir) && !is_shared_safely(&dir));
        set_mode(base.path(), 0o700);
        let link = base.path().join("link");
        symlink("dir", &link).unwrap();
        assert!(!is_own(&link), "a link is nobody's");
        assert!(!is_own(Path::new("relative")) && !is_own(&base.path().join("absent")));
        if chown(&dir, Some(12345), None).is_ok() {
            assert!(!is_own(&dir) && !is_shared_safely(&dir), "somebody else's");
        }
    }

    #[test]
    fn only_the_own_user_and_root_are_connected_to() {
        let base = tempfile::tempdir().unwrap();
        let own = Dir::own(base.path()).unwrap();
        let limit = Duration::from_millis(50);
        let listener = UnixListener::bind(base.path().join("socket")).unwrap();
        let talk = own.connect_own("socket", limit).unwrap();
        assert!(talk.write_timeout().unwrap().is_some());
        check_peer(&listener.accept().unwrap().0).unwrap();
        // A queue that nobody empties.
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let full = (0..10).map(|_| own.connect_own("socket", limit)).find_map(Result::err);
        assert_eq!(full.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));

        let Some(mut other) = of_another_user(base.path()) else { return };
        let error = own.connect_own("another", limit).unwrap_err();
        assert!(error.to_string().contains("uid 65534's"), "{error}");
        let error = Dir::own(&base.path().join("theirs")).unwrap_err();
        assert!(error.to_string().contains("uid 65534's"), "{error}");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    /// A listener and a directory of another user's in `dir`; `None` where this is not root.
    fn of_another_user(dir: &Path) -> Option<std::process::Child> {
        set_mode(dir, 0o1777);
        let mut command = std::process::Command::new("python3");
        command.arg("-c").arg(
            "import os, socket, time; os.mkdir('theirs'); s = socket.socket(socket.AF_UNIX); s.bind('another'); \
             s.listen(); open('ready', 'w'); time.sleep(100)",
        );
        if !geteuid().is_root() {
            eprintln!("not checked, for only root can be another user");
            return None;
        }
        let mut child = command.current_dir(dir).uid(65534).gid(65534).spawn().unwrap();
        while !dir.join("ready").exists() {
            assert_eq!(child.try_wait().unwrap(), None);
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(child)
    }
}
