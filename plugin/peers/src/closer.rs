//! Closing sockets that a container has put something into.
//!
//! A message can carry descriptors (`SCM_RIGHTS`, unix(7)). Of those only a gate's hello has one that is taken; dropping
//! the message closes them, and the last close of a stranger's file can block for as long as the
//! stranger chooses: a TCP socket with `SO_LINGER`, a file on a dead server. From Linux 6.16 on such
//! messages are refused at the sender; before, they are recognised unread and left to a thread that has
//! nothing else to do. There is at most one for each allocation, and as long as it is behind,
//! that allocation's processes are not accepted.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use tokio::io::unix::AsyncFd;

use super::socket;
use tessera_system::locks::lock;

/// Sockets waiting to be closed beyond which the allocation must wait.
const BEHIND: usize = 16;

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
        if !socket::is_drained(&fd) {
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
