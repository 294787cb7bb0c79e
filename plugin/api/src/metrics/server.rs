//! The listener of `/metrics`, `/healthz` and `/readyz`, on a thread of its own: however many connect, kubelet's
//! calls go on beside it, and however slowly, others are answered.
//!
//! A connection is for one request. It is accepted at once, whatever others wait for, so that the kernel's queue
//! stays short; without a whole request it may have to make room ([`super::connection_limits`]), with one never.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use super::answers::Answers;
use super::connection_limits::{ConnectionLimits, ConnectionPermit};
use crate::admin::StatusView;

/// A request's head: how long it may take from the connection on, how large it may be, how many fields it may
/// have.
const HEAD: Duration = Duration::from_secs(5);
const HEAD_BYTES: usize = 8 << 10;
const HEAD_FIELDS: usize = 64;
/// How long an answer may take, and its reader. Prometheus waits for 10 s.
const ANSWER: Duration = Duration::from_secs(15);
/// Connections that the kernel keeps while this thread has no turn (listen(2)): half a second of a flood. More
/// would only wait longer.
const BACKLOG: u32 = 1024;
/// How often an address that cannot be had is tried.
const AGAIN: Duration = Duration::from_secs(10);
/// How long nobody is accepted while all connections wait for answers.
const MOMENT: Duration = Duration::from_millis(5);
/// How long nobody is accepted after an error with nobody to make room.
const PAUSE: Duration = Duration::from_millis(100);

/// The server. Ends when dropped.
#[derive(Debug)]
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at the first of these addresses that can be had, now or later; that none can is no reason
    /// not to serve kubelet. Call it within a runtime: whether that one's threads turn is what
    /// `/healthz` tells.
    pub fn start(listen: Vec<SocketAddr>, view: Arc<StatusView>) -> Option<Self> {
        if listen.is_empty() {
            return None;
        }
        let (stop, stopped) = oneshot::channel();
        let (main, known) = (Handle::current(), Arc::clone(&view));
        let work = move || {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            // A task among those of the connections: the future of `block_on` itself would have more turns than
            // all of them together, and accept faster than they are read.
            runtime.spawn(serve(listen, view, main));
            let _ = runtime.block_on(stopped);
            Ok::<_, io::Error>(())
        };
        let thread = std::thread::Builder::new().name("metrics".into()).stack_size(512 << 10);
        let thread = thread.spawn(move || {
            if let Err(error) = work() {
                let text = format!("metrics and probes are not served: {error}");
                warn!("{text}");
                known.board().set_condition("metrics", Some(text));
            }
        });
        match thread {
            Ok(thread) => Some(Server { stop: Some(stop), thread: Some(thread) }),
            Err(error) => {
                warn!(%error, "metrics and probes are not served: no thread");
                None
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        // It waits for nothing but sockets.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted plugin gets its port at once.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn bind(listen: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut failed = io::Error::other("no address");
    for address in listen {
        match listen_at(*address) {
            Ok(listener) => return Ok(listener),
            // The last one is the plain one.
            Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(failed)
}

async fn serve(listen: Vec<SocketAddr>, view: Arc<StatusView>, main: Handle) {
    let listener = loop {
        match bind(&listen) {
            Ok(listener) => break listener,
            Err(error) => {
                let text =
                    format!("metrics and probes are not served: {error}; see metrics.listen");
                if view.board().set_condition("metrics", Some(text.clone())) {
                    warn!("{text}");
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    view.board().set_condition("metrics", None);
    if let Ok(address) = listener.local_addr() {
        view.set_metrics_address(address);
        info!(%address, "serving metrics and probes");
    }
    let limits = Arc::new(ConnectionLimits::new());
    let answers = Arc::new(Answers::new(view, main));
    loop {
        while !limits.is_ready() {
            // Connections have their turns; then the runtime asks the kernel which are readable.
            tokio::task::yield_now().await;
        }
        while limits.is_full() {
            tokio::time::sleep(MOMENT).await;
        }
        match listener.accept().await {
            Ok((stream, address)) => {
                if let Some(permit) = limits.admit(&stream, address.ip()) {
                    tokio::spawn(converse(stream, permit, Arc::clone(&answers)));
                }
            }
            // The client has gone already, or there are too many files.
            Err(error) => {
                debug!(%error, "accept");
                match limits.shed() {
                    true => tokio::task::yield_now().await,
                    false => tokio::time::sleep(PAUSE).await,
                }
            }
        }
    }
}

/// Done when this connection has to make room.
async fn evicted_by_limit(evicted: &mut oneshot::Receiver<()>) {
    if evicted.await.is_err() {
        // Its request has been read: nobody will ask it.
        std::future::pending::<()>().await;
    }
}

/// Waits until it speaks, without buffers; false if its time is over.
async fn listens(stream: &TcpStream, permit: &ConnectionPermit) -> bool {
    // Then the runtime has asked the kernel about it.
    tokio::task::yield_now().await;
    let mut evicted = tokio::select! {
        biased;
        ready = stream.ready(Interest::READABLE) => return ready.is_ok(),
        () = std::future::ready(()) => permit.is_silent(),
    };
    tokio::select! {
        biased;
        ready = stream.ready(Interest::READABLE) => ready.is_ok(),
        () = evicted_by_limit(&mut evicted) => false,
        () = tokio::time::sleep(HEAD) => false,
    }
}

async fn converse(stream: TcpStream, permit: ConnectionPermit, answers: Arc<Answers>) {
    if !listens(&stream, &permit).await {
        return reset(&stream);
    }
    let Some(mut evicted) = permit.speaks() else { return reset(&stream) };
    let permit = Arc::new(permit);
    let service = service_fn(|request| {
        permit.request_read();
        answers.answer(Arc::clone(&permit), request)
    });
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .keep_alive(false)
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS);
    let mut connection = server.serve_connection(TokioIo::new(stream), service);
    let ended = tokio::select! {
        biased;
        ended = &mut connection => ended,
        () = evicted_by_limit(&mut evicted) => return reset(connection.into_parts().io.inner()),
        () = tokio::time::sleep(ANSWER) => return debug!("a metrics client has had its time"),
    };
    if let Err(error) = ended {
        debug!(%error, "a metrics client");
    }
}

/// Closes without the farewell that the kernel would remember for a minute (`SO_LINGER`, socket(7)).
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}
