//! The session socket: reports to the plugin that this process uses CUDA, and what was refused.
//!
//! Nothing depends on it: every call is non-blocking, and a process runs on without a plugin. The
//! socket lives in another program's descriptor table, so it sits at 512 or above, closes on exec, and is
//! recognised by device and inode before each use: hosts close and reuse numbers they do not know.

use crate::log::{Throttle, errno, now_ns, set_errno};
use crate::spin::Spin;
use crate::thread::Deferred;
use core::ffi::{CStr, c_int};
use core::mem::{MaybeUninit, offset_of};
use tessera_region::session::Message;

/// The lowest descriptor number we take, if the limit on descriptors lets us.
const LOWEST_FD: c_int = 512;
/// Least time between two attempts to connect.
const RECONNECT_NS: u64 = 1_000_000_000;

#[derive(Debug, Default)]
pub struct Session {
    socket: Spin<Option<Socket>>,
    attempts: Throttle,
}

/// A file of ours, on a descriptor that is ours as long as nobody has taken its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    fd: c_int,
    device: libc::dev_t,
    inode: libc::ino_t,
}

impl Kept {
    /// Keeps `low`, which is the caller's, out of the range that hosts use by number, or there where the limit is
    /// low.
    pub(crate) fn keep(low: c_int) -> Option<Self> {
        // SAFETY: no pointers.
        let high = unsafe { libc::fcntl(low, libc::F_DUPFD_CLOEXEC, LOWEST_FD) };
        if high >= 0 {
            // SAFETY: the caller's descriptor, of which `high` is the copy we keep.
            unsafe { libc::close(low) };
        }
        let fd = if high >= 0 { high } else { low };
        stat_of(fd).map(|stat| Self { fd, device: stat.st_dev, inode: stat.st_ino })
    }

    pub(crate) fn is_ours(&self) -> bool {
        let is_same = |stat: libc::stat| (stat.st_dev, stat.st_ino) == (self.device, self.inode);
        stat_of(self.fd).is_some_and(is_same)
    }

    /// Closes the number, behind which the caller has just found our file.
    fn close(self) {
        // SAFETY: by the caller's word our own file is behind it.
        unsafe { libc::close(self.fd) };
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Socket(Kept);

impl Session {
    /// Sends `message` to the plugin at `path` if that is possible right now, connecting (at most
    /// once a second) and saying `hello` first where needed. True when it was sent.
    pub fn send(&self, path: &CStr, hello: Message, message: Option<Message>) -> bool {
        let errno = errno();
        let _deferred = Deferred::new();
        let mut socket = self.socket.lock();
        Socket::check(&mut socket);
        if socket.is_none() && self.attempts.allows(now_ns(), RECONNECT_NS) {
            *socket = Socket::connect(path);
            if socket.is_some_and(|socket| !socket.put(&hello)) {
                Socket::close(&mut socket);
            }
        }
        let sent = match (*socket, message) {
            (Some(socket), Some(message)) => socket.put(&message),
            (Some(_), None) => true,
            (None, _) => false,
        };
        set_errno(errno);
        sent
    }
}

impl Socket {
    /// Forgets a socket whose number the host has taken, and closes one that is hung up.
    pub(crate) fn check(socket: &mut Option<Self>) {
        if socket.is_some_and(|socket| !socket.is_ours()) {
            // The host closed our number; it may be a file of the host's by now.
            *socket = None;
        }
        if socket.is_some_and(Self::is_hung_up) {
            Self::close(socket);
        }
    }

    /// Closes the socket, which the caller has just found to be ours.
    pub(crate) fn close(socket: &mut Option<Self>) {
        if let Some(Self(socket)) = socket.take() {
            socket.close();
        }
    }

    pub(crate) fn connect(path: &CStr) -> Option<Self> {
        let (address, length) = address_of(path)?;
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers.
        let low = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
        if low < 0 {
            return None;
        }
        let socket = Kept::keep(low)?;
        // SAFETY: `address` is an initialised sockaddr_un of which `length` bytes count.
        if unsafe { libc::connect(socket.fd, (&raw const address).cast(), length) } != 0 {
            socket.close();
            return None;
        }
        Some(Self(socket))
    }

    pub(crate) fn is_ours(self) -> bool {
        self.0.is_ours()
    }

    /// Reads what the plugin said (nothing to act on yet) and whether it is still there.
    pub(crate) fn is_hung_up(self) -> bool {
        let mut packet = [0u8; tessera_region::session::MESSAGE_BYTES];
        // A few packets at most: a plugin that talks without end must not hold up its tenant.
        for _ in 0..8 {
            // SAFETY: `packet` is valid for its length.
            let got = unsafe {
                libc::recv(self.0.fd, packet.as_mut_ptr().cast(), packet.len(), libc::MSG_DONTWAIT)
            };
            match got {
                0 => return true,
                1.. => {}
                _ => return !matches!(errno(), libc::EAGAIN | libc::EINTR),
            }
        }
        false
    }

    pub(crate) fn put(self, message: &Message) -> bool {
        self.put_with(message, None)
    }

    /// Sends `message`, and a descriptor of `file`.
    pub(crate) fn put_with(self, message: &Message, file: Option<Kept>) -> bool {
        let mut bytes = message.encode();
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = [0u64; 4];
        // SAFETY: all-zero is a valid msghdr.
        let mut packet: libc::msghdr = unsafe { core::mem::zeroed() };
        (packet.msg_iov, packet.msg_iovlen) = (&raw mut part, 1);
        if let Some(file) = file.filter(Kept::is_ours) {
            const BYTES: u32 = 4;
            const _: () = assert!(BYTES as usize == size_of::<c_int>());
            // SAFETY: room for a header and one descriptor, aligned as a header, in `control` (`cmsg(3)`).
            unsafe {
                const { assert!(libc::CMSG_SPACE(BYTES) as usize <= size_of::<[u64; 4]>()) };
                packet.msg_control = control.as_mut_ptr().cast();
                packet.msg_controllen = libc::CMSG_SPACE(BYTES) as _;
                let header = libc::CMSG_FIRSTHDR(&raw const packet);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(BYTES) as _;
                libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(file.fd);
            }
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `packet` points to what lives until here.
        let sent = unsafe { libc::sendmsg(self.0.fd, &raw const packet, flags) };
        usize::try_from(sent).is_ok_and(|sent| sent == bytes.len())
    }
}

/// The address of a socket file; `None` where the path is too long for one (`unix(7)`).
fn address_of(path: &CStr) -> Option<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    let bytes = path.to_bytes_with_nul();
    if bytes.len() > address.sun_path.len() {
        return None;
    }
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).ok()?;
    for (to, &from) in address.sun_path.iter_mut().zip(bytes) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + bytes.len();
    Some((address, libc::socklen_t::try_from(length).ok()?))
}

pub(crate) fn stat_of(fd: c_int) -> Option<libc::stat> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` is a valid place; fstat writes it when it returns 0.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: written, as just checked.
    Some(unsafe { stat.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::ffi::OsStrExt;
    use tessera_region::session::MESSAGE_BYTES;

    const HELLO: Message = Message::Hello { slot: 1, pid: 2, generation: 3 };
    const WANT: Message = Message::Want { gpu: 0 };

    /// A listening SEQPACKET socket, which std does not offer.
    fn listen(path: &CStr) -> OwnedFd {
        let (address, length) = address_of(path).expect("a short path");
        // SAFETY: plain socket calls on a descriptor of our own and a filled address.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            assert!(fd >= 0);
            let fd = OwnedFd::from_raw_fd(fd);
            assert_eq!(libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length), 0);
            assert_eq!(libc::listen(fd.as_raw_fd(), 8), 0);
            fd
        }
    }

    fn accept(listener: &OwnedFd) -> OwnedFd {
        // SAFETY: our own listening socket, and a fresh descriptor that only we know.
        unsafe {
            let fd =
                libc::accept(listener.as_raw_fd(), core::ptr::null_mut(), core::ptr::null_mut());
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    fn receive(peer: &OwnedFd) -> Message {
        let mut packet = [0u8; MESSAGE_BYTES];
        // SAFETY: `packet` is valid for its length.
        let got =
            unsafe { libc::recv(peer.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
        assert_eq!(usize::try_from(got), Ok(MESSAGE_BYTES));
        Message::decode(&packet).expect("a message")
    }

    fn path_in(dir: &tempfile::TempDir) -> CString {
        CString::new(dir.path().join("s").as_os_str().as_bytes()).expect("no NUL")
    }

    #[test]
    fn hello_comes_first_on_a_high_descriptor() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = listen(&path_in(&dir));
        let session = Session::default();
        assert!(session.send(&path_in(&dir), HELLO, Some(WANT)));
        let peer = accept(&listener);
        assert_eq!(receive(&peer), HELLO);
        assert_eq!(receive(&peer), WANT);
        assert!(session.socket.lock().expect("connected").0.fd >= LOWEST_FD);
    }

    #[test]
    fn a_descriptor_that_the_host_reused_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = listen(&path_in(&dir));
        let session = Session::default();
        assert!(session.send(&path_in(&dir), HELLO, None));
        drop(accept(&listener));
        let fd = session.socket.lock().expect("connected").0.fd;
        let file = tempfile::tempfile().expect("a file");
        // SAFETY: replaces the session's own descriptor, as a careless host would.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), fd) }, fd);
        assert!(!session.send(&path_in(&dir), HELLO, Some(WANT)), "one attempt a second");
        assert_eq!(file.metadata().expect("metadata").len(), 0, "nothing was written into it");
        let mode = stat_of(fd).expect("still open").st_mode;
        assert_eq!(mode & libc::S_IFMT, libc::S_IFREG, "still the host's file");
        // SAFETY: the test's own descriptor.
        assert_eq!(unsafe { libc::close(fd) }, 0);
    }

    /// The descriptor that comes with the next message, if one does.
    fn receive_file(peer: &OwnedFd) -> Option<OwnedFd> {
        let mut packet = [0u8; MESSAGE_BYTES];
        let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
        let mut control = [0u64; 8];
        // SAFETY: all-zero is a valid msghdr; what it points to lives until the end of the call, and a descriptor that
        // comes is this test's.
        unsafe {
            let mut message: libc::msghdr = core::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control) as _;
            assert!(libc::recvmsg(peer.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) > 0);
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if header.is_null() {
                return None;
            }
            assert_eq!((*header).cmsg_type, libc::SCM_RIGHTS);
            let fd = libc::CMSG_DATA(header).cast::<c_int>().read_unaligned();
            Some(OwnedFd::from_raw_fd(fd))
        }
    }

    #[test]
    fn a_file_of_ours_goes_with_a_message_and_a_strangers_on_its_number_does_not() {
        use tessera_region::flight::FlightPage;
        let dir = tempfile::tempdir().expect("a directory");
        let listener = listen(&path_in(&dir));
        let socket = Socket::connect(&path_in(&dir)).expect("a connection");
        let peer = accept(&listener);
        let (fd, page) = FlightPage::create().expect("a page");
        let kept = Kept::keep(fd).expect("a number");
        assert!(socket.put_with(&HELLO, Some(kept)));
        let file = receive_file(&peer).expect("a descriptor");
        let size = stat_of(file.as_raw_fd()).expect("it is open").st_size;
        assert_eq!(usize::try_from(size), Ok(size_of_val(page)));
        // The host has closed the number, and opened another file there.
        let other = std::fs::File::open("/dev/null").expect("a file");
        // SAFETY: the number is this test's.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), kept.fd) }, kept.fd);
        assert!(socket.put_with(&WANT, Some(kept)));
        assert!(receive_file(&peer).is_none());
        // SAFETY: as above.
        unsafe { libc::close(kept.fd) };
        Socket::close(&mut Some(socket));
    }

    #[test]
    fn without_a_plugin_nothing_is_sent_and_nothing_stays_open() {
        let dir = tempfile::tempdir().expect("a directory");
        let session = Session::default();
        assert!(!session.send(&path_in(&dir), HELLO, Some(WANT)));
        assert!(session.socket.lock().is_none());
    }
}
