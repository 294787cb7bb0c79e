//! Two processes: the scenario's own and a child, forked before either initialises the driver.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// The way to the other process.
pub struct Peer(UnixStream);

/// Runs `child` in a child process while `parent` runs here; both must end well.
pub fn pair(parent: impl FnOnce(&Peer), child: impl FnOnce(&Peer)) {
    let (mine, its) = UnixStream::pair().unwrap();
    // SAFETY: this test process has one thread that matters; the child leaves with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        drop(mine);
        let peer = Peer(its);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| child(&peer)));
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    drop(its);
    let peer = Peer(mine);
    parent(&peer);
    drop(peer);
    let mut status = 0;
    // SAFETY: our own child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
    assert!(killed || libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
}

impl Peer {
    /// Sends bytes.
    pub fn send(&self, bytes: &[u8]) {
        use std::io::Write;
        (&self.0).write_all(bytes).unwrap();
    }

    /// Receives bytes.
    pub fn receive<const N: usize>(&self) -> [u8; N] {
        use std::io::Read;
        let mut bytes = [0; N];
        (&self.0).read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The other is as far as this one.
    pub fn meet(&self) {
        self.send(&[1]);
        assert_eq!(self.receive::<1>(), [1]);
    }

    /// Waits until the other is gone.
    pub fn until_gone(&self) {
        use std::io::Read;
        assert!(matches!((&self.0).read(&mut [0]), Ok(0) | Err(_)));
    }

    /// Sends a descriptor (unix(7), SCM_RIGHTS).
    pub fn send_fd(&self, fd: RawFd) {
        let mut space = [0u64; 8];
        let mut byte = 7u8;
        let mut io = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: a message of one byte and one descriptor, in buffers that are large enough.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut io, 1);
            message.msg_control = space.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
            assert_eq!(libc::sendmsg(self.0.as_raw_fd(), &raw const message, 0), 1);
        }
    }

    /// Receives one.
    pub fn receive_fd(&self) -> OwnedFd {
        let mut space = [0u64; 8];
        let mut byte = 0u8;
        let mut io = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: as in `send_fd`; the descriptor is new and nobody else's.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut io, 1);
            message.msg_control = space.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&space);
            assert_eq!(libc::recvmsg(self.0.as_raw_fd(), &raw mut message, 0), 1);
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            assert!(!header.is_null());
            OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())
        }
    }
}
