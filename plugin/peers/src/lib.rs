//! The session sockets: one `SOCK_SEQPACKET` listener in every allocation's directory.
//!
//! A CUDA process connects at its first driver call. The kernel names it (`SO_PEERCRED`,
//! unix(7)); its death is seen by pidfd and not by end-of-file, because a forked child keeps the
//! socket open; then the slots of its allocation are recovered at once. What it sends is limited in
//! rate by not reading further, so that a flood fills the sender's own queue.
//!
//! All of it runs on the runtime's one thread, so nothing here may wait for a container: recovery goes
//! to a blocking thread, one at a time for each allocation, and so does closing ([`socket::Closer`]).
#![forbid(unsafe_code)]

pub mod socket;
pub mod tenant;
pub mod token_bucket;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket::{Closer, GuardedSocket};
use tenant::Heard;
use tessera_region::layout::SESSION_SOCKET;
use tessera_region::session::{EventKind, Message};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use tessera_system::descriptors::ListenerKind;

pub use tenant::{Counters, MAX_SESSIONS, OverQuota, Peer, TenantSessions};
pub use token_bucket::TokenBucket;

/// How long after end-of-file slots are looked at again: at `exec` the kernel drops the old mapping,
/// and with it the lock, a moment after the socket.
const SETTLE: Duration = Duration::from_millis(20);

/// Connections a second of one allocation, and how many at once: each costs a look at its slots.
const CONNECT_RATE: u32 = 200;
const CONNECT_BURST: u32 = 512;
/// Least time from one recovery of an allocation to the next.
const BREATH: Duration = Duration::from_millis(5);

/// What the sessions of an allocation need of its pages.
pub trait Pages: Send + Sync + 'static {
    /// A process of the allocation is gone: take back what it held. May block.
    fn recover(&self);
    /// The generation to welcome with.
    fn generation(&self) -> u64;
    /// A process came, or made a context: what the allocation holds of its GPUs is worth a look.
    fn news(&self) {}
    /// Bytes in use on the page's `gpu`-th GPU, and bytes that may be held there; `None` where that cannot be read at
    /// once.
    fn memory(&self, _gpu: u32) -> Option<(u64, u64)> {
        None
    }
}

/// A listening socket; closes with all its sessions when dropped.
#[derive(Debug)]
pub struct Listener {
    /// What the sessions said.
    pub tenant: Arc<TenantSessions>,
    task: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `session.sock` in `dir`, replacing what was there. Call it within a runtime.
    pub fn bind(
        dir: &Path,
        pages: Arc<dyn Pages>,
        tenant: Arc<TenantSessions>,
    ) -> io::Result<Self> {
        let closer = Arc::new(Closer::default());
        let socket = socket::watch(socket::listen(dir, SESSION_SOCKET)?)?;
        let socket = GuardedSocket::new(socket, Arc::clone(&closer));
        let task = tokio::spawn(accept(socket, pages, Arc::clone(&tenant), closer));
        Ok(Listener { tenant, task: Some(task) })
    }

    /// One that listens nowhere.
    pub fn closed() -> Self {
        Listener { tenant: Arc::default(), task: None }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn accept(
    socket: GuardedSocket,
    pages: Arc<dyn Pages>,
    tenant: Arc<TenantSessions>,
    closer: Arc<Closer>,
) {
    // Dropped with this task, and every session with it.
    let mut sessions = tokio::task::JoinSet::new();
    let gone = Arc::new(Notify::new());
    sessions.spawn(recover(Arc::clone(&pages), Arc::clone(&gone)));
    let mut connects = token_bucket::TokenBucket::new(CONNECT_BURST, CONNECT_RATE, Instant::now());
    // One line in a while, whatever a container does.
    let mut said = token_bucket::TokenBucket::new(1, 1, Instant::now());
    loop {
        while let Some(ended) = sessions.try_join_next() {
            if let Ok(Err(error)) = ended
                && said.take(Instant::now()).is_ok()
            {
                warn!(%error, "a session ended early; slots are recovered when probed");
            }
        }
        while let Err(wait) = connects.take(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
        while closer.is_behind() {
            tokio::time::sleep(SETTLE).await;
        }
        match socket.get().async_io(tokio::io::Interest::READABLE, |fd| socket::accept(fd)).await {
            Ok(peer) => {
                // Reserved for other listeners: this process gets no session.
                if ListenerKind::Pages.is_reserved(&peer) {
                    tenant.turned_away();
                    closer.close(peer);
                    tokio::time::sleep(SETTLE).await;
                    continue;
                }
                let host_pid = socket::peer_pid(&peer);
                let Ok(peer) = socket::watch(peer) else { continue };
                let peer = GuardedSocket::new(peer, Arc::clone(&closer));
                let Some(key) = tenant.enter(host_pid) else { continue };
                let (pages, tenant) = (Arc::clone(&pages), Arc::clone(&tenant));
                let gone = Arc::clone(&gone);
                sessions.spawn(async move {
                    let result = session(peer, host_pid, key, &*pages, &tenant, &gone).await;
                    tenant.leave(key);
                    gone.notify_one();
                    result
                });
            }
            // Out of descriptors, or the peer has gone: other connections are served later.
            Err(error) => {
                debug!(%error, "accept");
                tokio::time::sleep(SETTLE).await;
            }
        }
    }
}

/// Recovers slots when processes are gone: at once, and together those that go meanwhile.
async fn recover(pages: Arc<dyn Pages>, gone: Arc<Notify>) -> io::Result<()> {
    loop {
        gone.notified().await;
        let pages = Arc::clone(&pages);
        if let Err(error) = tokio::task::spawn_blocking(move || pages.recover()).await {
            warn!(%error, "recovery");
        }
        tokio::time::sleep(BREATH).await;
    }
}

/// One session, until its process is dead.
async fn session(
    peer: GuardedSocket,
    host_pid: Option<u32>,
    key: u64,
    pages: &dyn Pages,
    tenant: &TenantSessions,
    gone: &Notify,
) -> io::Result<()> {
    let death = match host_pid.map(socket::pidfd) {
        None => None,
        Some(Ok(pidfd)) if ListenerKind::Pages.is_reserved(&pidfd) => {
            tenant.turned_away();
            return Ok(());
        }
        Some(Ok(pidfd)) => Some(socket::watch(pidfd)?),
        // Dead already: it held what it held.
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Some(Err(error)) => return Err(error),
    };
    let died = async {
        match &death {
            Some(pidfd) => pidfd.readable().await.map(drop),
            None => std::future::pending().await,
        }
    };
    tokio::pin!(died);
    tokio::select! {
        result = &mut died => return result,
        result = converse(peer.get(), key, pages, tenant) => result?,
    }
    // End of file or thrown out, but the process may live on: an application that closes numbers it
    // does not know, an exec.
    drop(peer);
    gone.notify_one();
    tokio::time::sleep(SETTLE).await;
    gone.notify_one();
    if death.is_some() { died.await } else { Ok(()) }
}

/// Hears messages until end-of-file or too much garbage.
async fn converse(
    peer: &AsyncFd<OwnedFd>,
    key: u64,
    pages: &dyn Pages,
    tenant: &TenantSessions,
) -> io::Result<()> {
    let mut garbage = 0;
    loop {
        let mut packet = [0; socket::PACKET];
        let read =
            peer.async_io(tokio::io::Interest::READABLE, |fd| socket::receive(fd, &mut packet));
        let length = match read.await {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            // It carries descriptors, which no message of ours does: enough is known of this peer.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tenant.garbage(true);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        while let Err(wait) = tenant.admit(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
        match Message::decode_spoken(&packet[..length]) {
            Some((message, abi)) => {
                let heard = tenant.hear(key, &message, |gpu| pages.memory(gpu));
                if heard != Heard::Nonsense {
                    if is_news(&message) {
                        pages.news();
                    }
                    if heard == Heard::Greeted {
                        let welcome = Message::Welcome { generation: pages.generation() };
                        let welcome = welcome.encode_as(abi);
                        // A peer that does not read its welcome does without it.
                        let _ = socket::send(peer.get_ref(), &welcome);
                    }
                    continue;
                }
            }
            None => debug!("a packet on a session is not a message"),
        }
        garbage += 1;
        let dropped = garbage >= tenant::MAX_GARBAGE;
        tenant.garbage(dropped);
        if dropped {
            return Ok(());
        }
    }
}

/// Whether device memory has been taken, or will be soon, that no call shows.
fn is_news(message: &Message) -> bool {
    match message {
        Message::Hello { .. } => true,
        Message::Event(event) => event.kind == EventKind::ContextMade,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
