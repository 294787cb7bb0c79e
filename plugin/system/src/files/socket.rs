//! A Unix socket's file: made where nothing is or a dead one of ours, and removed only while it is ours.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat};

use super::Dir;
use super::Identity;
use super::dir::kind;

/// A listening socket's file, removed when dropped if it is still the same.
#[derive(Debug)]
pub struct SocketFile {
    dir: Dir,
    name: OsString,
    identity: Identity,
}

impl SocketFile {
    /// Listens at `path` in `dir`, where nothing may be but a socket that nobody listens at. Only this user may
    /// connect. `AddrInUse`: somebody listens. `AlreadyExists`: something else is there.
    pub fn listen(path: &Path) -> io::Result<(Self, UnixListener)> {
        let (dir, name) = Dir::of(path)?;
        let made = match make(&dir, name) {
            // Its predecessor's file was removed meanwhile, by itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => make(&dir, name),
            made => made,
        };
        let (identity, listener) = made?;
        Ok((SocketFile { dir, name: name.to_owned(), identity }, listener))
    }

    /// Whether nothing has its name any more.
    pub fn is_gone(&self) -> bool {
        self.dir.stat(&self.name).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.dir, &self.name).is_ok_and(|now| now == self.identity) {
            // A socket file nobody listens at is replaced at the next start anyway.
            let _ = self.dir.remove(&self.name);
        }
    }
}

fn make(dir: &Dir, name: &OsStr) -> io::Result<(Identity, UnixListener)> {
    remove_stale(dir, name)?;
    // Through the descriptor: also shorter than what a socket's address holds.
    let listener = UnixListener::bind(dir.path().join(name))?;
    let identity = identity(dir, name)?;
    // In the directory that was opened, where nobody but its owner has changed the name since.
    let only_this_user = Mode::S_IRUSR | Mode::S_IWUSR;
    fchmodat(dir.fd(), name, only_this_user, FchmodatFlags::FollowSymlink)?;
    Ok((identity, listener))
}

fn identity(dir: &Dir, name: &OsStr) -> io::Result<Identity> {
    Ok(Identity::of(&dir.path().join(name).symlink_metadata()?))
}

/// Removes a socket that nobody listens at; `Ok` also where there is nothing.
pub fn remove_stale(dir: &Dir, name: &OsStr) -> io::Result<()> {
    let before = match dir.stat(name) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if kind(&before) != SFlag::S_IFSOCK {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something else than a socket is there, and is left alone: move it away, or use another \
             path",
        ));
    }
    // Without waiting: a queue that is full is somebody's, too.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let asking = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(asking.as_raw_fd(), &UnixAddr::new(&dir.path().join(name))?) {
        Err(Errno::ECONNREFUSED) => dir.remove(name),
        Err(Errno::ENOENT) => Ok(()),
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    use nix::sys::socket::{Backlog, Shutdown, bind, listen, shutdown};

    use super::*;

    #[test]
    fn one_whose_predecessor_goes_meanwhile_listens() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("socket");
        for _ in 0..500 {
            let (file, listener) = SocketFile::listen(&path).unwrap();
            // A child of another test may have the descriptor until its program begins.
            shutdown(listener.as_raw_fd(), Shutdown::Both).unwrap();
            drop(listener);
            let ends = std::thread::spawn(move || drop(file));
            let next = SocketFile::listen(&path).map(drop);
            ends.join().unwrap();
            next.unwrap();
        }
    }

    #[test]
    fn only_a_dead_socket_gives_way() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        drop(UnixListener::bind(at("dead")).unwrap());
        let (made, _listener) = SocketFile::listen(&at("dead")).unwrap();
        let meta = at("dead").metadata().unwrap();
        assert!(meta.file_type().is_socket() && meta.permissions().mode() & 0o777 == 0o600);
        let error = SocketFile::listen(&at("dead")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        // Whatever kind of socket, and however many wait for it already.
        let (_of_packets, full) = (of_packets(&at("packets")), full(&at("full")));
        for name in ["packets", "full"] {
            let error = SocketFile::listen(&at(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{name}");
        }
        drop(full);
        drop(made);
        assert!(!at("dead").exists());

        std::fs::write(at("file"), "precious").unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        symlink("file", at("link")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["file", "directory", "link", "fifo"] {
            let error = SocketFile::listen(&at(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{name}: {error}");
            assert!(at(name).symlink_metadata().is_ok(), "{name}");
        }
        assert_eq!(std::fs::read(at("file")).unwrap(), b"precious");
    }

    fn of_packets(path: &Path) -> std::os::fd::OwnedFd {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let socket = socket(AddressFamily::Unix, kind, flags, None).unwrap();
        bind(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        listen(&socket, Backlog::new(1).unwrap()).unwrap();
        socket
    }

    /// A listener whose queue has no room.
    fn full(path: &Path) -> Vec<std::os::fd::OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = || socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        let address = UnixAddr::new(path).unwrap();
        let mut sockets = vec![socket()];
        bind(sockets[0].as_raw_fd(), &address).unwrap();
        listen(&sockets[0], Backlog::new(1).unwrap()).unwrap();
        loop {
            sockets.push(socket());
            if connect(sockets.last().unwrap().as_raw_fd(), &address) == Err(Errno::EAGAIN) {
                return sockets;
            }
        }
    }

    #[test]
    fn what_has_taken_its_name_stays() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("socket");
        let (made, listener) = SocketFile::listen(&path).unwrap();
        assert!(!made.is_gone());
        std::fs::remove_file(&path).unwrap();
        assert!(made.is_gone());
        std::fs::write(&path, "precious").unwrap();
        drop((made, listener));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
