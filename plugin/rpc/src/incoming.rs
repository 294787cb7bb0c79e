//! The connections that a listener accepts: a bounded number of them, of which those that ask nothing make
//! room for new ones.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::authority::AuthorityStream;
use tessera_system::descriptors::ListenerKind;
use tessera_system::eviction_queue::EvictionQueue;
use tessera_system::locks::lock;

/// How long nobody is accepted after an error, such as too many open files, or while all connections are in
/// the middle of a call.
const PAUSE: Duration = Duration::from_millis(100);
/// How long those that make room have to go before the next one is accepted.
const SHED_WAIT: Duration = Duration::from_millis(1);
/// For what has no deadline.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Whose descriptors they are.
    pub listener: ListenerKind,
    /// How long a connection may take until its first request is there; `None` where clients connect long before
    /// they ask. One that is silent makes room for others all the same.
    pub silence: Option<Duration>,
    /// How long an answer may take, and its reader; `None` where streams are served.
    pub answer: Option<Duration>,
}

impl Limits {
    /// The silence of a client that has something to ask.
    pub const SILENCE: Option<Duration> = Some(Duration::from_secs(10));
}

/// What the connections of a listener share.
#[derive(Debug, Default)]
struct Table {
    open: usize,
    /// By the client's pid; those that have not asked yet.
    silent: EvictionQueue<Option<i32>, oneshot::Sender<()>>,
    /// Those whose requests have all been answered.
    idle: EvictionQueue<Option<i32>, oneshot::Sender<()>>,
}

impl Table {
    /// Ends a connection that nobody waits for; whether there was one.
    fn shed(&mut self) -> bool {
        // Its task may have ended meanwhile.
        self.silent.shed().or_else(|| self.idle.shed()).is_some_and(|end| end.send(()).is_ok())
    }
}

/// See the module.
#[derive(Debug)]
pub struct Incoming {
    listener: UnixListener,
    limits: Limits,
    most: usize,
    table: Arc<Mutex<Table>>,
    /// Accepting pauses until then, instead of spinning.
    pause: Option<Pin<Box<Sleep>>>,
    /// Nobody could be accepted of late; said once.
    is_failing: bool,
}

impl Incoming {
    /// Connections of `listener`, as `limits` allows.
    pub fn new(listener: UnixListener, limits: Limits) -> Self {
        let most = limits.listener.max_connections();
        Self { listener, limits, most, table: Arc::default(), pause: None, is_failing: false }
    }

    fn complain(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let listener = self.limits.listener;
            tracing::warn!(?listener, "cannot take a connection, trying again: {why}");
        }
    }

    /// Takes in one more, or closes it because nobody can go for it.
    fn admit(&mut self, stream: UnixStream) -> Option<Connection> {
        let shared = Arc::clone(&self.table);
        let mut table = lock(&shared);
        let is_short = self.limits.listener.is_reserved(&stream);
        if is_short || table.open >= self.most {
            let has_shed = table.shed();
            self.pause =
                Some(Box::pin(tokio::time::sleep(if has_shed { SHED_WAIT } else { PAUSE })));
            if !has_shed && is_short {
                self.complain("descriptors are short");
                return None;
            }
        }
        table.open += 1;
        self.is_failing = false;
        let peer = stream.peer_cred().ok().and_then(|peer| peer.pid());
        let (end, ended) = oneshot::channel();
        let phase = Phase::Silent(table.silent.enter(peer, end));
        drop(table);
        Some(Connection {
            inner: AuthorityStream::new(stream),
            table: shared,
            limits: self.limits,
            peer,
            phase,
            ended,
            deadline: Box::pin(tokio::time::sleep(self.limits.silence.unwrap_or(NEVER))),
        })
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                std::task::ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let is_full = {
                let table = lock(&self.table);
                table.open >= self.most && table.silent.len() + table.idle.len() == 0
            };
            if is_full {
                self.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                continue;
            }
            match std::task::ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) => {
                    if let Some(connection) = self.admit(stream) {
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                Err(error) => {
                    self.complain(&error.to_string());
                    lock(&self.table).shed();
                    self.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
            }
        }
    }
}

/// How it stands with a connection; the number is its own in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Silent(u64),
    Calling,
    Idle(u64),
}

/// An accepted connection, each with its authority rewritten.
#[derive(Debug)]
pub struct Connection {
    inner: AuthorityStream<UnixStream>,
    table: Arc<Mutex<Table>>,
    limits: Limits,
    peer: Option<i32>,
    phase: Phase,
    /// Says that it has to make room. Its other end is in the table while nobody waits for an answer.
    ended: oneshot::Receiver<()>,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    /// Follows what has been read and written.
    fn follow(&mut self) {
        let calls = self.inner.calls();
        let after = match (self.phase, calls.is_open(), calls.has_asked()) {
            (Phase::Silent(id), true, _) => {
                lock(&self.table).silent.leave(id);
                Phase::Calling
            }
            (Phase::Idle(id), true, _) => {
                lock(&self.table).idle.leave(id);
                Phase::Calling
            }
            // Asked and answered, or given up.
            (Phase::Calling, false, _) => self.rest(),
            (Phase::Silent(id), false, true) => {
                lock(&self.table).silent.leave(id);
                self.rest()
            }
            (phase, ..) => phase,
        };
        if after != self.phase {
            self.phase = after;
            let after = match after {
                Phase::Calling => self.limits.answer.unwrap_or(NEVER),
                _ => NEVER,
            };
            self.deadline.as_mut().reset(Instant::now() + after);
        }
    }

    fn rest(&mut self) -> Phase {
        let (end, ended) = oneshot::channel();
        self.ended = ended;
        Phase::Idle(lock(&self.table).idle.enter(self.peer, end))
    }

    /// Whether its time is over, or somebody else needs its place.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        // Without its other end it makes room for nobody.
        if self.phase != Phase::Calling
            && let Poll::Ready(Ok(())) = Pin::new(&mut self.ended).poll(cx)
        {
            let text = "closed to make room for another connection";
            return Poll::Ready(io::Error::new(io::ErrorKind::ConnectionAborted, text));
        }
        std::task::ready!(self.deadline.as_mut().poll(cx));
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "the connection has had its time"))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut table = lock(&self.table);
        table.open -= 1;
        match self.phase {
            Phase::Silent(id) => drop(table.silent.leave(id)),
            Phase::Idle(id) => drop(table.idle.leave(id)),
            Phase::Calling => {}
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        // First: what has been read may be the request that it is spared for.
        self.follow();
        match read {
            Poll::Pending => self.poll_end(cx).map(Err),
            ready => ready,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.follow();
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}
