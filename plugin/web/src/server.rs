//! The listeners, TCP and root's socket, on a thread of their own: whatever connects, what else the process does goes
//! on beside it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Method, StatusCode};
use axum::middleware::from_fn;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tessera_system::descriptors::ListenerKind;
use tessera_system::files::SocketFile;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::authorise::Authorisation;
use crate::caller::{Origin, Peer};
use crate::connections::{Busy, Connections, Permit};
use crate::counts::Counts;
use crate::encoded::Encodings;
use crate::fleet_cache::FleetCache;
use crate::headers;
use crate::problem::Refusal;
use crate::routes::{App, only_root, router};
use crate::source::Source;
use crate::tls::{self, Tls};

/// A request's head: how long it may take, handshake included; how large it may be, a token in it; how many fields
/// it may have.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 64 << 10;
const HEAD_FIELDS: usize = 100;
/// A request's body at root's socket: a configuration, quoted.
const BODY: usize = 4 << 20;
/// Connections that the kernel keeps while this thread has no turn (listen(2)).
const BACKLOG: u32 = 256;
/// How often an address that cannot be had is tried, and a removed socket looked for.
const AGAIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_secs(1);
/// How long nobody is accepted while there is no room.
const PAUSE: Duration = Duration::from_millis(50);

/// What is listened at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// The addresses of [`Options::listen`].
    Network,
    /// [`Options::socket`].
    Socket,
}

/// Hears what keeps a listener from being served, and `None` once it is.
pub type Report = Arc<dyn Fn(Listener, Option<String>) + Send + Sync>;

/// Root's socket: only this user may connect to it.
#[derive(Debug)]
pub struct RootSocket {
    path: PathBuf,
    bound: Option<Bound>,
}

type Bound = (SocketFile, std::os::unix::net::UnixListener);

impl RootSocket {
    /// Listens at once: clients wait until it is served.
    ///
    /// # Errors
    /// `AddrInUse`: somebody listens there. `AlreadyExists`: something else is there. What the system says.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Ok(RootSocket { path: path.to_owned(), bound: Some(SocketFile::listen(path)?) })
    }

    /// To be had as soon as there is room for it.
    pub fn at(path: PathBuf) -> Self {
        RootSocket { path, bound: None }
    }
}

/// What is served, where, and to whom.
pub struct Options {
    /// What is shown.
    pub source: Arc<dyn Source>,
    /// The first of these addresses that can be had; none for no TCP.
    pub listen: Vec<SocketAddr>,
    /// How TCP connections are protected.
    pub tls: Tls,
    /// The readers' rights over TCP.
    pub authorisation: Authorisation,
    /// A socket whose callers, root and this process's user, may see everything.
    pub socket: Option<RootSocket>,
    /// What they may ask there besides. Each request has its [`Peer`] among its extensions, and its whole body.
    pub root: Router,
    /// How often a stream looks for changes.
    pub interval: Duration,
    /// Each listener is reported for itself: that one is served says nothing of the other.
    pub report: Report,
    /// Where what is asked over TCP is counted.
    pub counts: Arc<Counts>,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("listen", &self.listen)
            .field("tls", &self.tls)
            .field("authorisation", &self.authorisation)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// Nothing but a source, once a second: callers add where it is served.
    pub fn new(source: Arc<dyn Source>) -> Self {
        Options {
            source,
            listen: Vec::new(),
            tls: Tls::Plain,
            authorisation: Authorisation::None,
            socket: None,
            root: Router::new(),
            interval: Duration::from_secs(1),
            report: Arc::new(|_, _| {}),
            counts: Arc::default(),
        }
    }
}

/// The server. Ends when dropped.
#[derive(Debug)]
pub struct Server {
    address: watch::Receiver<Option<SocketAddr>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves, now or as soon as an address can be had: what is amiss is reported.
    ///
    /// # Errors
    /// No thread.
    pub fn start(options: Options) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (known, address) = watch::channel(None);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("api".into()).stack_size(1 << 20);
        let thread = thread.spawn(move || {
            // A task among those of the connections: the future of `block_on` itself would have more turns.
            runtime.spawn(serve(options, known));
            let _ = runtime.block_on(stopped);
            // Nobody waits for a file or an API server that does not answer.
            runtime.shutdown_background();
        })?;
        Ok(Server { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where TCP is served, once it is.
    pub fn address(&self) -> Option<SocketAddr> {
        *self.address.borrow()
    }

    /// As [`Server::address`]; waits for it.
    pub async fn bound(&self) -> Option<SocketAddr> {
        let mut address = self.address.clone();
        address.wait_for(Option::is_some).await.ok().and_then(|address| *address)
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

async fn serve(options: Options, known: watch::Sender<Option<SocketAddr>>) {
    let Options { source, listen, tls, authorisation, socket, root, interval, report, counts } =
        options;
    let app = Arc::new(App {
        fleets: FleetCache::new(Arc::clone(&source)),
        source,
        authorisation,
        encodings: Encodings::default(),
        streams: Arc::default(),
        interval,
    });
    let router = router(app);
    if let Some(socket) = socket {
        let root = root.layer(from_fn(only_root)).merge(router.clone());
        tokio::spawn(serve_root(socket, root, Arc::clone(&report)));
    }
    if !listen.is_empty() {
        counts.expect_listener();
        serve_network(&listen, &tls, router, &known, &report, &counts).await;
    }
    std::future::pending::<()>().await;
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted plugin gets its port at once.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn bind(listen: &[SocketAddr]) -> Result<TcpListener, String> {
    let mut failed = "no address".to_owned();
    for address in listen {
        match listen_at(*address) {
            Ok(listener) => return Ok(listener),
            // The last one is the plain one.
            Err(error) => failed = format!("{address}: {error}; see api.listen"),
        }
    }
    Err(failed)
}

async fn serve_network(
    listen: &[SocketAddr],
    tls: &Tls,
    router: Router,
    known: &watch::Sender<Option<SocketAddr>>,
    report: &Report,
    counts: &Arc<Counts>,
) {
    let (listener, acceptor) = loop {
        match bind(listen).and_then(|listener| Ok((listener, tls::config(tls)?))) {
            Ok((listener, config)) => break (listener, config.map(TlsAcceptor::from)),
            Err(error) => {
                let text = format!("the JSON API and the page are not served: {error}");
                report(Listener::Network, Some(text));
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    report(Listener::Network, None);
    counts.listens();
    if let Ok(address) = listener.local_addr() {
        known.send_replace(Some(address));
        info!(%address, tls = acceptor.is_some(), "serving the JSON API and the page");
    }
    let connections = Connections::new(ListenerKind::Api.max_connections());
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                debug!(%error, "accept");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let crowded = ListenerKind::Api.is_reserved(&stream);
        let client = Some(address.ip().to_canonical());
        let Some(permit) = connections.admit(client, Origin::Network, crowded) else {
            // Everybody inside is being answered: it may come again.
            drop(stream);
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        connections.room().await;
        let _ = stream.set_nodelay(true);
        let (router, acceptor) = (router.clone(), acceptor.clone());
        let counts = Some(Arc::clone(counts));
        tokio::spawn(async move {
            match acceptor {
                None => converse(stream, permit, router, None, counts).await,
                Some(acceptor) => tokio::select! {
                    shaken = timeout(HEAD, acceptor.accept(stream)) => match shaken {
                        Ok(Ok(stream)) => {
                            converse(stream, Arc::clone(&permit), router, None, counts).await;
                        }
                        Ok(Err(error)) => debug!(%error, "a handshake"),
                        Err(_) => debug!("a handshake takes too long"),
                    },
                    () = permit.over() => {}
                },
            }
        });
    }
}

/// A removed socket is made again: no client could reach the old one, and the readiness probe would fail until the next
/// start.
async fn serve_root(socket: RootSocket, router: Router, report: Report) {
    let RootSocket { path, mut bound } = socket;
    let connections = Connections::new(ListenerKind::Admin.max_connections());
    let mut warned = false;
    loop {
        let bound = bound.take().map_or_else(|| SocketFile::listen(&path), Ok);
        let bound = bound.and_then(|(file, listener)| {
            listener.set_nonblocking(true)?;
            Ok((file, UnixListener::from_std(listener)?))
        });
        let (file, listener) = match bound {
            Ok(bound) => bound,
            Err(error) => {
                if !warned {
                    warned = true;
                    let text = format!(
                        "the command line has nobody to ask on this node: {}: {error}",
                        path.display()
                    );
                    warn!("{text}");
                    report(Listener::Socket, Some(text));
                }
                tokio::time::sleep(LOOK).await;
                continue;
            }
        };
        if warned {
            warned = false;
            report(Listener::Socket, None);
        }
        let mut looks = tokio::time::interval(LOOK);
        while !file.is_gone() {
            tokio::select! {
                _ = looks.tick() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        let (origin, peer) = origin_of(&stream);
                        let crowded = ListenerKind::Admin.is_reserved(&stream);
                        let Some(permit) = connections.admit(None, origin, crowded) else { continue };
                        connections.room().await;
                        tokio::spawn(converse(stream, permit, router.clone(), Some(peer), None));
                    }
                    Err(error) => {
                        debug!(%error, "accept");
                        tokio::time::sleep(PAUSE).await;
                    }
                },
            }
        }
        warn!(path = %path.display(), "the admin socket was removed; making a new one");
    }
}

/// The socket's mode keeps others away already; a process that was root when it connected says so here.
fn origin_of(stream: &UnixStream) -> (Origin, Peer) {
    let own = nix::unistd::geteuid().as_raw();
    let peer = stream.peer_cred().map(|peer| {
        let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
        Peer { uid: peer.uid(), pid: pid.unwrap_or(0) }
    });
    match peer {
        Ok(peer) if peer.uid == 0 || peer.uid == own => (Origin::Root, peer),
        Ok(peer) => (Origin::Stranger, peer),
        // Whom the kernel does not name is nobody, in the sense of `nobody`.
        Err(_) => (Origin::Stranger, Peer { uid: 65534, pid: 0 }),
    }
}

/// The whole request: a connection that has not sent it is waiting, and may be closed for another.
async fn whole(request: hyper::Request<Incoming>) -> Result<hyper::Request<Body>, Refusal> {
    let (head, body) = request.into_parts();
    if head.method != Method::POST {
        return Ok(hyper::Request::from_parts(head, Body::empty()));
    }
    let refused = |status, text| Err(Refusal::new(status, text));
    match timeout(HEAD, Limited::new(body, BODY).collect()).await {
        Ok(Ok(body)) => Ok(hyper::Request::from_parts(head, Body::from(body.to_bytes()))),
        Ok(Err(_)) => refused(StatusCode::PAYLOAD_TOO_LARGE, "a request is at most 4 MiB"),
        Err(_) => refused(StatusCode::REQUEST_TIMEOUT, "the request did not come in time"),
    }
}

async fn converse<S>(
    stream: S,
    permit: Arc<Permit>,
    router: Router,
    peer: Option<Peer>,
    counts: Option<Arc<Counts>>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let (permit, router, counts) = (Arc::clone(&permit), router.clone(), counts.clone());
        async move {
            let request = match peer {
                // Whatever is sent over TCP, it is not read.
                None => Ok(request.map(Body::new)),
                Some(_) => whole(request).await,
            };
            let busy = permit.begin();
            let mut response = match request {
                Ok(mut request) => {
                    request.extensions_mut().insert(permit.connection().clone());
                    if let Some(peer) = peer {
                        request.extensions_mut().insert(peer);
                    }
                    router.oneshot(request).await?
                }
                Err(refusal) => refusal.response(),
            };
            if let Some(counts) = counts {
                counts.answered(response.status().as_u16());
            }
            headers::add(&mut response);
            Ok::<_, std::convert::Infallible>(response.map(|body| Answer { body, _busy: busy }))
        }
    });
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS);
    let connection = server.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        ended = connection => if let Err(error) = ended {
            debug!(%error, "a client of the API");
        },
        () = permit.over() => debug!("a client of the API has had its time"),
    }
}

/// A body, and that its request is under way.
struct Answer {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
