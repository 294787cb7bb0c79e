//! The listeners, TCP and root's socket, on a thread of their own: whatever connects, what else the process does goes
//! on beside it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
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
use crate::caller::Origin;
use crate::connections::{Busy, Connections, Permit};
use crate::counts::Counts;
use crate::encoded::Encodings;
use crate::fleet_cache::FleetCache;
use crate::headers;
use crate::routes::{App, router};
use crate::source::Source;
use crate::tls::{self, Tls};

/// A request's head: how long it may take, handshake included; how large it may be, a token in it; how many fields
/// it may have.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 64 << 10;
const HEAD_FIELDS: usize = 100;
/// Connections that the kernel keeps while this thread has no turn (listen(2)).
const BACKLOG: u32 = 256;
/// Connections of root's socket.
const ROOTS: usize = 32;
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

/// What is served, where, and to whom.
#[derive(Clone)]
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
    pub socket: Option<PathBuf>,
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
    let Options { source, listen, tls, authorisation, socket, interval, report, counts } = options;
    let app = Arc::new(App {
        fleets: FleetCache::new(Arc::clone(&source)),
        source,
        authorisation,
        encodings: Encodings::default(),
        streams: Arc::default(),
        interval,
    });
    let router = router(app);
    if let Some(path) = socket {
        let (router, report) = (router.clone(), Arc::clone(&report));
        tokio::spawn(serve_root(path, router, report));
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
        let _ = stream.set_nodelay(true);
        let (router, acceptor) = (router.clone(), acceptor.clone());
        let counts = Some(Arc::clone(counts));
        tokio::spawn(async move {
            match acceptor {
                None => converse(stream, permit, router, counts).await,
                Some(acceptor) => tokio::select! {
                    shaken = timeout(HEAD, acceptor.accept(stream)) => match shaken {
                        Ok(Ok(stream)) => converse(stream, Arc::clone(&permit), router, counts).await,
                        Ok(Err(error)) => debug!(%error, "a handshake"),
                        Err(_) => debug!("a handshake takes too long"),
                    },
                    () = permit.over() => {}
                },
            }
        });
    }
}

/// A removed socket is made again, as the admin socket is.
async fn serve_root(path: PathBuf, router: Router, report: Report) {
    let connections = Connections::new(ROOTS);
    let mut warned = false;
    loop {
        let bound = SocketFile::listen(&path).and_then(|(file, listener)| {
            listener.set_nonblocking(true)?;
            Ok((file, UnixListener::from_std(listener)?))
        });
        let (file, listener) = match bound {
            Ok(bound) => bound,
            Err(error) => {
                if !warned {
                    warned = true;
                    let text = format!(
                        "tessera history, recommend and waste have nobody to ask: {}: {error}",
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
                        let origin = origin_of(&stream);
                        let crowded = ListenerKind::Admin.is_reserved(&stream);
                        let Some(permit) = connections.admit(None, origin, crowded) else { continue };
                        tokio::spawn(converse(stream, permit, router.clone(), None));
                    }
                    Err(error) => {
                        debug!(%error, "accept");
                        tokio::time::sleep(PAUSE).await;
                    }
                },
            }
        }
    }
}

/// The socket's mode keeps others away already; a process that was root when it connected says so here.
fn origin_of(stream: &UnixStream) -> Origin {
    let own = nix::unistd::geteuid().as_raw();
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == own => Origin::Root,
        _ => Origin::Stranger,
    }
}

async fn converse<S>(stream: S, permit: Arc<Permit>, router: Router, counts: Option<Arc<Counts>>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let (busy, router) = (permit.begin(), router.clone());
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(permit.connection().clone());
        let counts = counts.clone();
        async move {
            let mut response = router.oneshot(request).await?;
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
