//! The listeners, TCP and root's socket, on a thread of their own: whatever connects, what else the process does goes
//! on beside it. Metrics and probes have a second such thread ([`Server::metrics`]), which nothing that the API is
//! asked can hold up.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderValue, Method, Response, StatusCode};
use axum::middleware::from_fn;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tessera_system::connections::{Connections, Permit, client_at};
use tessera_system::descriptors::ListenerKind;
use tessera_system::files::SocketFile;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::authorise::Authorisation;
use crate::caller::{Origin, Peer};
use crate::counts::Counts;
use crate::routes::{App, only_root, router};
use crate::source::Refusal;
use crate::source::{FleetCache, Source};
use crate::stream::Encodings;
use crate::tls::{self, Tls};

/// A request's head: how long it may take, handshake included; how large it may be, a token in it; how many fields
/// it may have.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 64 << 10;
const HEAD_FIELDS: usize = 100;
/// A request's body at root's socket: a configuration, quoted.
const BODY: usize = 4 << 20;
/// Connections that the kernel keeps while this thread has no turn (listen(2)): half a second of a flood. More
/// would only wait longer.
const BACKLOG: u32 = 1024;
/// How often an address that cannot be had is tried, and a removed socket looked for.
const AGAIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_secs(1);

/// The page loads its own files and nothing else, and nobody frames it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

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
    pub fn start(options: Options) -> io::Result<Self> {
        Self::on_thread("api", move |known| serve(options, known))
    }

    /// Serves a router of metrics and probes at the first of these addresses that can be had. Each request has its
    /// [`Connection`](tessera_system::connections::Connection) among its extensions; what an answer has among its own
    /// is dropped when the answer has been read.
    pub fn metrics(listen: Vec<SocketAddr>, router: Router, report: Report) -> io::Result<Self> {
        Self::on_thread("metrics", move |known| async move {
            let kind = ListenerKind::Metrics;
            let network = Network { listen, tls: Tls::Plain, kind, known, report, counts: None };
            network.serve(router).await;
        })
    }

    fn on_thread<F: Future<Output = ()> + Send + 'static>(
        name: &str,
        serve: impl FnOnce(watch::Sender<Option<SocketAddr>>) -> F,
    ) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (known, address) = watch::channel(None);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name(name.into()).stack_size(1 << 20);
        let serving = serve(known);
        let thread = thread.spawn(move || {
            // A task among those of the connections: the future of `block_on` itself would have more turns.
            runtime.spawn(serving);
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
    pub fn bound(&self) -> impl Future<Output = Option<SocketAddr>> + Send + use<> {
        let mut address = self.address.clone();
        async move { address.wait_for(Option::is_some).await.ok().and_then(|address| *address) }
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
        let kind = ListenerKind::Api;
        let network = Network { listen, tls, kind, known, report, counts: Some(counts) };
        network.serve(router).await;
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

/// What is served over TCP.
struct Network {
    listen: Vec<SocketAddr>,
    tls: Tls,
    kind: ListenerKind,
    known: watch::Sender<Option<SocketAddr>>,
    report: Report,
    counts: Option<Arc<Counts>>,
}

impl Network {
    /// In messages, with the key that says where.
    fn name(&self) -> (&'static str, &'static str) {
        match self.kind {
            ListenerKind::Metrics => ("metrics and probes", "metrics.listen"),
            _ => ("the JSON API and the page", "api.listen"),
        }
    }

    fn bind(&self) -> Result<TcpListener, String> {
        let mut failed = "no address".to_owned();
        for address in &self.listen {
            match listen_at(*address) {
                Ok(listener) => return Ok(listener),
                // The last one is the plain one.
                Err(error) => failed = format!("{address}: {error}; see {}", self.name().1),
            }
        }
        Err(failed)
    }

    async fn serve(self, router: Router) {
        let name = self.name().0;
        let (listener, acceptor) = loop {
            match self.bind().and_then(|listener| Ok((listener, tls::config(&self.tls)?))) {
                Ok((listener, config)) => break (listener, config.map(TlsAcceptor::from)),
                Err(error) => {
                    let text = format!("{name} are not served: {error}");
                    (self.report)(Listener::Network, Some(text));
                    tokio::time::sleep(AGAIN).await;
                }
            }
        };
        (self.report)(Listener::Network, None);
        if let Some(counts) = &self.counts {
            counts.listens();
        }
        if let Ok(address) = listener.local_addr() {
            self.known.send_replace(Some(address));
            info!(%address, tls = acceptor.is_some(), "serving {name}");
        }
        let connections = Connections::new(self.kind);
        let next = || async { Ok(listener.accept().await?.0) };
        let client =
            |stream: &TcpStream| stream.peer_addr().map_or(0, |address| client_at(address.ip()));
        loop {
            let (stream, permit) = connections.accept(next, client).await;
            let _ = stream.set_nodelay(true);
            let caller = (Origin::Network, None);
            let (router, acceptor, counts) =
                (router.clone(), acceptor.clone(), self.counts.clone());
            tokio::spawn(async move {
                match acceptor {
                    None => converse(stream, permit, router, caller, counts, reset).await,
                    Some(acceptor) => tokio::select! {
                        shaken = timeout(HEAD, acceptor.accept(stream)) => match shaken {
                            Ok(Ok(stream)) => {
                                let permit = Arc::clone(&permit);
                                converse(stream, permit, router, caller, counts, |stream| {
                                    reset(stream.get_ref().0);
                                }).await;
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
}

/// Closes without the farewell that the kernel would remember for a minute (`SO_LINGER`, socket(7)): of a flood it would
/// remember each.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

/// A removed socket is made again: no client could reach the old one, and the readiness probe would fail until the next
/// start.
async fn serve_root(socket: RootSocket, router: Router, report: Report) {
    let RootSocket { path, mut bound } = socket;
    let connections = Connections::new(ListenerKind::Admin);
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
        let gone = async {
            while !file.is_gone() {
                tokio::time::sleep(LOOK).await;
            }
        };
        let next = || async { Ok(listener.accept().await?.0) };
        let serving = async {
            loop {
                let (stream, permit) = connections.accept(next, |_| 0).await;
                let (origin, peer) = origin_of(&stream);
                let router = router.clone();
                tokio::spawn(converse(stream, permit, router, (origin, Some(peer)), None, |_| {}));
            }
        };
        tokio::select! {
            () = gone => {}
            () = serving => {}
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

/// Serves the requests of one connection; `reset` is for one that is closed before its end.
async fn converse<S>(
    stream: S,
    permit: Arc<Permit>,
    router: Router,
    (origin, peer): (Origin, Option<Peer>),
    counts: Option<Arc<Counts>>,
    reset: impl FnOnce(&S),
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
                    let extensions = request.extensions_mut();
                    extensions.insert(permit.connection.clone());
                    extensions.insert(origin);
                    if let Some(peer) = peer {
                        extensions.insert(peer);
                    }
                    router.oneshot(request).await?
                }
                Err(refusal) => refusal.response(),
            };
            if let Some(counts) = counts {
                counts.answered(response.status().as_u16());
            }
            add_headers(&mut response);
            // Its request is under way, and what the answer has among its extensions is held, until it is read.
            let held = (busy, std::mem::take(response.extensions_mut()));
            Ok::<_, std::convert::Infallible>(response.map(|body| {
                body.map_err(move |error: axum::Error| {
                    let _held = &held;
                    error
                })
            }))
        }
    });
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS);
    let mut connection = server.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        ended = &mut connection => if let Err(error) = ended {
            debug!(%error, "a client of the API");
        },
        () = permit.over() => {
            debug!("a client of the API has had its time");
            reset(connection.into_parts().io.inner());
        }
    }
}

/// Headers that every answer has.
fn add_headers<B>(response: &mut Response<B>) {
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // What is somebody's is not left in caches; files of the page say what holds for them.
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}
