//! The system calls of a session and of a gate: SEQPACKET sockets and pidfds, non-blocking; the gates' thread.
//!
//! All other files use nix. It accepts connections as bare numbers, which only unsafe code can own, and has neither
//! pidfd_open(2) nor setpriority(2).

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, recvmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open, setpriority_process};
use tessera_region::session::MESSAGE_BYTES;
use tessera_system::files::Dir;
use tessera_system::locks::lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// One more than a message, so that a longer packet does not pass for one.
pub const PACKET: usize = MESSAGE_BYTES + 1;

/// Processes of one container that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A socket listening at `name` in `dir`, in place of whatever was there.
pub fn listen(dir: &Path, name: &str) -> io::Result<OwnedFd> {
    // Socket paths end after 107 bytes; a path through the directory's descriptor is always short.
    let dir = Dir::open(dir)?;
    let path = dir.path().join(name);
    // containerd makes missing mount sources as empty directories.
    dir.clear(OsStr::new(name))?;
    match dir.remove(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
    // Connecting needs write permission; any user of the container may.
    let anybody = Mode::from_bits_truncate(0o666);
    fchmodat(dir.fd(), name, anybody, FchmodatFlags::FollowSymlink)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Whether nothing is left in it that closing it would have to throw away.
pub(crate) fn is_drained(socket: &OwnedFd) -> bool {
    if rustix::net::sockopt::socket_acceptconn(socket).unwrap_or(false) {
        let mut poll_fd = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        return poll(&mut poll_fd, PollTimeout::ZERO) == Ok(0);
    }
    !matches!(peek(socket), Ok((1.., _)))
}

/// Length and flags of the next packet, left where it is.
fn peek(socket: impl AsFd) -> io::Result<(usize, ReturnFlags)> {
    let mut byte = [0];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let found = recvmsg(socket, &mut parts, &mut RecvAncillaryBuffer::default(), flags)?;
    Ok((found.bytes, found.flags))
}

/// Lets the runtime say when the descriptor is ready.
#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor changes, which OwnedFd's never does; the \
              replacement is unsafe to call"
)]
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

/// The next connection, not blocking.
///
/// # Errors
/// As accept4(2); `EAGAIN` where nobody waits.
pub fn accept(socket: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

/// The peer's pid here; `None` where its pid namespace is not ours or a child of ours.
pub fn peer_pid(peer: &OwnedFd) -> Option<u32> {
    let credentials = getsockopt(peer, sockopt::PeerCredentials).ok()?;
    u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0)
}

/// A descriptor that becomes readable when the process is dead. `NotFound` if it is already.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    pidfd_open(pid, PidfdFlags::NONBLOCK).map_err(|errno| match errno {
        rustix::io::Errno::SRCH => io::ErrorKind::NotFound.into(),
        errno => errno.into(),
    })
}

/// Sets the calling thread's niceness (setpriority(2); on Linux that of the thread, not of the process).
///
/// # Errors
/// No right to a lower one.
pub fn set_thread_niceness(niceness: i32) -> io::Result<()> {
    Ok(setpriority_process(None, niceness)?)
}

fn receive_plain(socket: impl AsFd, packet: &mut [u8; PACKET]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, &mut packet[..], RecvFlags::DONTWAIT)?.0)
}

/// One packet. One that carries descriptors is left unread, because to drop it is to close them:
/// `PermissionDenied`.
pub fn receive(socket: impl AsFd, packet: &mut [u8; PACKET]) -> io::Result<usize> {
    if peek(&socket)?.1.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    receive_plain(socket, packet)
}

/// The same of a packet that may carry one descriptor. It is a stranger's: to close it can wait, see
/// [`Closer`], where those of a packet with several go.
pub fn receive_one(
    socket: impl AsFd,
    packet: &mut [u8; PACKET],
    closer: &Closer,
) -> io::Result<(usize, Option<OwnedFd>)> {
    if !peek(&socket)?.1.contains(ReturnFlags::CTRUNC) {
        return Ok((receive_plain(socket, packet)?, None));
    }
    let (mut carried, all) = peek_descriptors(&socket)?;
    if carried.len() > 1 || !all {
        carried.into_iter().for_each(|fd| closer.leave(fd));
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // The packet's own references go here, and are not the last.
    Ok((receive_plain(socket, packet)?, carried.pop()))
}

/// Up to two descriptors of the next packet, which is left where it is; and whether these are all.
fn peek_descriptors(socket: impl AsFd) -> io::Result<(Vec<OwnedFd>, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
    let found = recvmsg(socket, &mut parts, &mut control, flags)?;
    let mut carried = Vec::with_capacity(2);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            carried.extend(descriptors);
        }
    }
    Ok((carried, !found.flags.contains(ReturnFlags::CTRUNC)))
}

pub(crate) fn send(socket: impl AsFd, packet: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Sockets waiting to be closed beyond which the allocation must wait.
const BEHIND: usize = 16;

/// Closes sockets that a container has put something into.
///
/// A message can carry descriptors (`SCM_RIGHTS`, unix(7)). Of those only a gate's hello has one that is taken; dropping
/// the message closes them, and the last close of a stranger's file can block for as long as the
/// stranger chooses: a TCP socket with `SO_LINGER`, a file on a dead server. So such messages are
/// recognised unread and left to a thread that has nothing else to do. There is at most one for each
/// allocation, and as long as it is behind, that allocation's processes are not accepted.
///
/// One allocation's; the thread starts when it is first needed and ends with this.
#[derive(Debug, Default)]
pub struct Closer {
    queue: Mutex<Option<mpsc::Sender<OwnedFd>>>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Whether its allocation has more sockets to be closed than it should.
    pub fn is_behind(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > BEHIND
    }

    /// Closes a socket, elsewhere if that could wait.
    pub fn close(&self, fd: OwnedFd) {
        if !is_drained(&fd) {
            self.leave(fd);
        }
    }

    /// Closes a descriptor that may be anybody's, elsewhere.
    pub fn leave(&self, fd: OwnedFd) {
        let mut queue = lock(&self.queue);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let sender = queue.get_or_insert_with(|| {
            let (sender, receiver) = mpsc::channel::<OwnedFd>();
            let waiting = Arc::clone(&self.waiting);
            let run = move || {
                for fd in receiver {
                    drop(fd);
                    waiting.fetch_sub(1, Ordering::Relaxed);
                }
            };
            let thread = std::thread::Builder::new().name("closer".into()).stack_size(64 << 10);
            if let Err(error) = thread.spawn(run) {
                tracing::warn!(%error, "no thread to close a container's sockets with");
            }
            sender
        });
        // Without a thread it is closed here and now, as the last resort.
        let _ = sender.send(fd);
    }
}

/// A socket that is closed by [`Closer`] where closing it could wait.
#[derive(Debug)]
pub(super) struct GuardedSocket {
    fd: Option<AsyncFd<OwnedFd>>,
    closer: Arc<Closer>,
}

impl GuardedSocket {
    pub(super) fn new(fd: AsyncFd<OwnedFd>, closer: Arc<Closer>) -> Self {
        GuardedSocket { fd: Some(fd), closer }
    }

    /// The socket.
    ///
    /// # Panics
    /// Never: it is there until this is dropped.
    pub(super) fn get(&self) -> &AsyncFd<OwnedFd> {
        self.fd.as_ref().expect("taken by drop alone")
    }
}

impl Drop for GuardedSocket {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take().map(AsyncFd::into_inner) else { return };
        self.closer.close(fd);
    }
}
