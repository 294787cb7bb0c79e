//! The session sockets: one `SOCK_SEQPACKET` listener in every allocation's directory.
//!
//! A CUDA process connects at its first driver call. The kernel says who it is (`SO_PEERCRED`,
//! unix(7)); its death is seen by pidfd and not by end-of-file, because a forked child keeps the
//! socket open; then the slots of its allocation are recovered at once. What it sends is limited in
//! rate by not reading further, so that a flood fills the sender's own queue.

mod bucket;
mod socket;
mod tenant;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_region::session::{EventKind, Message};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

pub use bucket::Bucket;
pub use tenant::{Counters, MAX_SESSIONS, Peer, Tenant};

/// How long after end-of-file slots are looked at again: at `exec` the kernel drops the old mapping,
/// and with it the lock, a moment after the socket.
const SETTLE: Duration = Duration::from_millis(20);

/// Connections a second of one allocation, and how many at once: each costs a look at its slots.
const CONNECT_RATE: u32 = 200;
const CONNECT_BURST: u32 = 512;

/// What the sessions of an allocation need of its pages.
pub trait Pages: Send + Sync + 'static {
    /// A process of the allocation is gone: take back what it held.
    fn recover(&self);
    /// The generation to welcome with.
    fn generation(&self) -> u64;
    /// A process came, or made a context: what the allocation holds of its GPUs is worth a look.
    fn news(&self) {}
}

/// A listening socket; closes with all its sessions when dropped.
#[derive(Debug)]
pub struct Listener {
    tenant: Arc<Tenant>,
    task: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `session.sock` in `dir`, replacing what was there. Call it within a runtime.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(dir: &Path, pages: Arc<dyn Pages>, tenant: Arc<Tenant>) -> io::Result<Self> {
        let socket = socket::watch(socket::listen(dir)?)?;
        let task = tokio::spawn(accept(socket, pages, Arc::clone(&tenant)));
        Ok(Listener { tenant, task: Some(task) })
    }

    /// One that listens nowhere.
    #[must_use]
    pub fn closed() -> Self {
        Listener { tenant: Arc::default(), task: None }
    }

    /// What the sessions said.
    #[must_use]
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn accept(socket: AsyncFd<OwnedFd>, pages: Arc<dyn Pages>, tenant: Arc<Tenant>) {
    // Dropped with this task, and every session with it.
    let mut sessions = tokio::task::JoinSet::new();
    let mut connects = bucket::Bucket::new(CONNECT_BURST, CONNECT_RATE, Instant::now());
    loop {
        while sessions.try_join_next().is_some() {}
        while let Err(wait) = connects.take(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
        match socket.async_io(tokio::io::Interest::READABLE, |fd| socket::accept(fd)).await {
            Ok(peer) => {
                let host_pid = socket::peer_pid(&peer);
                let Some(key) = tenant.enter(host_pid) else { continue };
                let (pages, tenant) = (Arc::clone(&pages), Arc::clone(&tenant));
                sessions.spawn(async move {
                    if let Err(error) = session(peer, host_pid, key, &*pages, &tenant).await {
                        warn!(%error, "a session ended early; slots are recovered when probed");
                    }
                    tenant.leave(key);
                    pages.recover();
                });
            }
            // Out of descriptors, or the peer has gone again: whoever waits is served later.
            Err(error) => {
                debug!(%error, "accept");
                tokio::time::sleep(SETTLE).await;
            }
        }
    }
}

/// One session, until its process is dead.
async fn session(
    peer: OwnedFd,
    host_pid: Option<u32>,
    key: u64,
    pages: &dyn Pages,
    tenant: &Tenant,
) -> io::Result<()> {
    let death = match host_pid.map(socket::pidfd) {
        None => None,
        Some(Ok(pidfd)) => Some(socket::watch(pidfd)?),
        // Dead already: it held what it held.
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Some(Err(error)) => return Err(error),
    };
    let peer = socket::watch(peer)?;
    let died = async {
        match &death {
            Some(pidfd) => pidfd.readable().await.map(drop),
            None => std::future::pending().await,
        }
    };
    tokio::pin!(died);
    tokio::select! {
        result = &mut died => return result,
        result = converse(&peer, key, pages, tenant) => result?,
    }
    // End of file or thrown out, but the process may live on: an application that closes numbers it
    // does not know, an exec.
    drop(peer);
    pages.recover();
    tokio::time::sleep(SETTLE).await;
    pages.recover();
    if death.is_some() { died.await } else { Ok(()) }
}

/// Hears messages until end-of-file or too much garbage.
async fn converse(
    peer: &AsyncFd<OwnedFd>,
    key: u64,
    pages: &dyn Pages,
    tenant: &Tenant,
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
            Err(error) => return Err(error),
        };
        while let Err(wait) = tenant.admit(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
        match Message::decode(&packet[..length]) {
            Ok(message) => {
                if is_news(&message) {
                    pages.news();
                }
                if tenant.hear(key, &message) {
                    let welcome = Message::Welcome { generation: pages.generation() }.encode();
                    // A peer that does not read its welcome does without it.
                    let _ = socket::send(peer.get_ref(), &welcome);
                }
            }
            Err(error) => {
                garbage += 1;
                let dropped = garbage >= tenant::MAX_GARBAGE;
                tenant.garbage(dropped);
                debug!(%error, "a packet on a session is no message");
                if dropped {
                    return Ok(());
                }
            }
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
