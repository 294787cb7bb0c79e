//! `/metrics`, `/healthz` and `/readyz` over HTTP/1.1, on the thread that serves kubelet: so that an answer
//! means that it turns, and so that whoever asks too often, too slowly or too much is held back here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle};
use tracing::{debug, info, warn};

use super::page::Page;
use super::text::Format;
use crate::admin::Sources;
use crate::locks::lock;
use crate::session::bucket::Bucket;

/// Connections at a time. One more, and the oldest is closed: those that do nothing must not keep kubelet's
/// probes out.
const CONNECTIONS: usize = 16;
/// Connections and requests a second, and how many at once.
const RATE: u32 = 100;
const BURST: u32 = 200;
/// A request's head: how long it may take, how large it may be, how many fields it may have.
const HEAD: Duration = Duration::from_secs(5);
const HEAD_BYTES: usize = 16 << 10;
const HEAD_FIELDS: usize = 64;
/// After that a connection is closed, whatever it does.
const LIFE: Duration = Duration::from_secs(60);
/// How often an address that cannot be had is tried.
const AGAIN: Duration = Duration::from_secs(10);

/// The server. Ends when dropped.
#[derive(Debug)]
pub struct Server {
    task: JoinHandle<()>,
}

impl Server {
    /// Listens at the first of these addresses that can be had, now or later; that none can is no reason
    /// not to serve kubelet. Call it within a runtime.
    #[must_use]
    pub fn start(listen: Vec<SocketAddr>, sources: Arc<Sources>) -> Option<Self> {
        (!listen.is_empty()).then(|| Server { task: tokio::spawn(serve(listen, sources)) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What connections share.
struct Shared {
    sources: Arc<Sources>,
    page: Arc<Page>,
    bucket: Mutex<Bucket>,
}

impl Shared {
    fn take(&self) -> Result<(), Duration> {
        let mut bucket = lock(&self.bucket);
        bucket.take(Instant::now())
    }

    /// Done when one more connection or request may be taken.
    async fn turn(&self) {
        loop {
            match self.take() {
                Ok(()) => return,
                Err(wait) => tokio::time::sleep(wait).await,
            }
        }
    }
}

async fn bind(listen: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut failed = io::Error::other("no address");
    for address in listen {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            // The last one is the plain one.
            Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(failed)
}

async fn serve(listen: Vec<SocketAddr>, sources: Arc<Sources>) {
    let listener = loop {
        match bind(&listen).await {
            Ok(listener) => break listener,
            Err(error) => {
                let text =
                    format!("metrics and probes are not served: {error}; see metrics.listen");
                if sources.set_condition("metrics", Some(text.clone())) {
                    warn!("{text}");
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    sources.set_condition("metrics", None);
    if let Ok(address) = listener.local_addr() {
        sources.set_metrics_address(address);
        info!(%address, "serving metrics and probes");
    }
    let shared = Arc::new(Shared {
        page: Arc::new(Page::new(Arc::clone(&sources))),
        sources,
        bucket: Mutex::new(Bucket::new(BURST, RATE, Instant::now())),
    });
    let mut open = Open(VecDeque::with_capacity(CONNECTIONS));
    loop {
        shared.turn().await;
        match listener.accept().await {
            Ok((stream, _)) => open.add(tokio::spawn(converse(stream, Arc::clone(&shared)))),
            // The client has gone already, or there are too many files.
            Err(error) => {
                debug!(%error, "accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Connections, the oldest first. They end with this.
struct Open(VecDeque<AbortHandle>);

impl Open {
    fn add(&mut self, task: JoinHandle<()>) {
        self.0.retain(|task| !task.is_finished());
        if self.0.len() >= CONNECTIONS
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        self.0.push_back(task.abort_handle());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

async fn converse(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(|request| {
        let shared = Arc::clone(&shared);
        async move {
            shared.turn().await;
            Ok::<_, Infallible>(answer(&shared, &request).await)
        }
    });
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS);
    let connection = server.serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(LIFE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a metrics client"),
        Err(_) => debug!("a metrics client has had its time"),
    }
}

async fn answer(shared: &Shared, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    if !matches!(path, "/metrics" | "/healthz" | "/readyz") {
        return plain(StatusCode::NOT_FOUND, "/metrics, /healthz, /readyz\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match path {
        "/metrics" => {
            let accept = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
            let format = Format::wanted(accept);
            match shared.page.text(format).await {
                Ok(text) => with_type(StatusCode::OK, format.content_type(), text),
                Err(error) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
            }
        }
        "/readyz" => {
            let amiss = shared.sources.amiss();
            match amiss.is_empty() {
                true => plain(StatusCode::OK, "ready\n"),
                false => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", amiss.join("\n"))),
            }
        }
        // That it comes is the answer.
        _ => plain(StatusCode::OK, "ok\n"),
    }
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    with_type(status, "text/plain; charset=utf-8", text.into())
}

fn with_type(status: StatusCode, kind: &'static str, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
