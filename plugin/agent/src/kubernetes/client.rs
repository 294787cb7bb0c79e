//! Two requests of Kubernetes' API: making an event and updating it. Over one connection, HTTP/1.1, with a
//! limit of time on everything and of size on what is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, USER_AGENT};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::series::Series;
use tessera_model::time_format::rfc3339;
use tessera_system::files;

/// Where Kubernetes puts a pod's credentials ("Accessing the Kubernetes API from a Pod").
const CREDENTIALS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Most of an answer that is read; events are a few KiB.
const LARGEST: usize = 64 << 10;
/// What reports.
const COMPONENT: &str = "tessera";

/// The API server, and who we are to it.
#[derive(Clone, Debug)]
pub struct Server {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The token, read again for each request: kubelet renews it.
    pub token: PathBuf,
    /// The certificates that vouch for it; `None` speaks plain HTTP, to a proxy on this host.
    pub authority: Option<PathBuf>,
}

impl Server {
    /// As kubelet tells a pod; `None` outside of pods, and in those without a service account's token.
    #[must_use]
    pub fn of_pod() -> Option<Self> {
        let dir = Path::new(CREDENTIALS);
        let (token, authority) = (dir.join("token"), dir.join("ca.crt"));
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok()?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok()?.parse().ok()?;
        token.is_file().then_some(Server { host, port, token, authority: Some(authority) })
    }
}

/// Why a request came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No connection, or one that broke.
    #[error("the API server cannot be reached: {0}")]
    Unreachable(String),
    /// No answer in time.
    #[error("the API server did not answer within {0:?}")]
    Slow(Duration),
    /// An answer that is no success.
    #[error("the API server answered {status}: {message}")]
    Refused {
        /// HTTP's.
        status: u16,
        /// What it said.
        message: String,
    },
}

/// A client; connects when it is asked for something.
#[derive(Debug)]
pub struct Client {
    server: Server,
    /// The node's name.
    node: String,
    limit: Duration,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl Client {
    /// For requests that may take `limit` each, connecting included.
    #[must_use]
    pub fn new(server: Server, node: String, limit: Duration) -> Self {
        Client { server, node, limit, connection: None }
    }

    /// Makes an event. Gives its name.
    ///
    /// # Errors
    /// See [`Failure`].
    pub async fn create(&mut self, event: &Series) -> Result<String, Failure> {
        let namespace = &event.subject.namespace;
        let name = name(event);
        let body = body(event, &name, &self.node);
        let path = format!("/api/v1/namespaces/{namespace}/events");
        match self.request(Method::POST, &path, "application/json", &body).await {
            // Ours: it was made, and the answer came too late.
            Ok(()) | Err(Failure::Refused { status: 409, .. }) => Ok(name),
            Err(failure) => Err(failure),
        }
    }

    /// Says that it happened again.
    ///
    /// # Errors
    /// See [`Failure`]; 404 if Kubernetes has forgotten it.
    pub async fn update(&mut self, event: &Series, name: &str) -> Result<(), Failure> {
        let path = format!("/api/v1/namespaces/{}/events/{name}", event.subject.namespace);
        let body = json!({
            "count": count(event),
            "lastTimestamp": rfc3339(event.last_unix_ms),
            "message": event.words.message,
        });
        self.request(Method::PATCH, &path, "application/merge-patch+json", &body).await
    }

    /// Lets the connection go.
    pub fn rest(&mut self) {
        self.connection = None;
    }

    async fn request(
        &mut self,
        method: Method,
        path: &str,
        kind: &str,
        body: &Value,
    ) -> Result<(), Failure> {
        let limit = self.limit;
        let answer = timeout(limit, self.exchange(method, path, kind, body)).await;
        let result = answer.unwrap_or(Err(Failure::Slow(limit)));
        if !matches!(result, Ok(()) | Err(Failure::Refused { .. })) {
            self.connection = None;
        }
        result
    }

    async fn exchange(
        &mut self,
        method: Method,
        path: &str,
        kind: &str,
        body: &Value,
    ) -> Result<(), Failure> {
        let token = credential(&self.server.token).await?;
        let mut connection = match self.connection.take().filter(|sender| !sender.is_closed()) {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, format!("{}:{}", self.server.host, self.server.port))
            .header(USER_AGENT, concat!("tessera/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, kind)
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(unreachable)?;
        connection.ready().await.map_err(unreachable)?;
        let answer = connection.send_request(request).await.map_err(unreachable)?;
        let status = answer.status();
        let text = Limited::new(answer.into_body(), LARGEST).collect().await;
        // The whole answer was read: the connection may serve the next request.
        let text = text.map(http_body_util::Collected::to_bytes).map_err(unreachable)?;
        self.connection = Some(connection);
        if status.is_success() {
            return Ok(());
        }
        let said: Option<Value> = serde_json::from_slice(&text).ok();
        let message = said.as_ref().and_then(|said| said["message"].as_str());
        let message = message.unwrap_or_default().chars().take(400).collect();
        Err(Failure::Refused { status: status.as_u16(), message })
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let Server { host, port, authority, .. } = &self.server;
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(unreachable)?;
        match authority {
            None => open(stream).await,
            Some(authority) => {
                let config = tls(authority, &credential(authority).await?)?;
                let name = ServerName::try_from(host.clone()).map_err(unreachable)?;
                let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
                open(connector.connect(name, stream).await.map_err(unreachable)?).await
            }
        }
    }
}

async fn open<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(unreachable)?;
    // It ends with the sender.
    tokio::spawn(connection);
    Ok(sender)
}

/// What a file of the pod's credentials says.
async fn credential(path: &Path) -> Result<String, Failure> {
    let read = path.to_owned();
    let text = tokio::task::spawn_blocking(move || files::text(&read, files::SMALL)).await;
    let at = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    match text {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => Err(Failure::Unreachable(at(&error))),
        Err(error) => Err(Failure::Unreachable(at(&error))),
    }
}

/// Made for each connection: between events nothing of it is in memory, and the file may change.
fn tls(authority: &Path, pem: &str) -> Result<ClientConfig, Failure> {
    let at = |error: &dyn std::fmt::Display| {
        Failure::Unreachable(format!("{}: {error}", authority.display()))
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        // One that is of no use leaves the others.
        let _ = roots.add(certificate.map_err(|error| at(&error))?);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| at(&error))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn unreachable(error: impl std::fmt::Display) -> Failure {
    Failure::Unreachable(error.to_string())
}

/// As client-go names them: the pod's name and a number that no other event has.
fn name(event: &Series) -> String {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(&event.subject.container);
    hash.update(event.words.reason);
    let hash = hash.finalize();
    let pod = &event.subject.pod;
    format!("{pod}.{:x}{:02x}{:02x}", event.first_unix_ms, hash[0], hash[1])
}

fn count(event: &Series) -> i32 {
    i32::try_from(event.count).unwrap_or(i32::MAX)
}

fn body(event: &Series, name: &str, node: &str) -> Value {
    let subject = &event.subject;
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "namespace": subject.namespace, "name": subject.pod,
    });
    if let Some(uid) = &subject.uid {
        pod["uid"] = json!(uid);
    }
    if !subject.container.is_empty() {
        pod["fieldPath"] = json!(format!("spec.containers{{{}}}", subject.container));
    }
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "name": name, "namespace": subject.namespace },
        "involvedObject": pod,
        "reason": event.words.reason,
        "message": event.words.message,
        "type": if event.words.warning { "Warning" } else { "Normal" },
        "count": count(event),
        "firstTimestamp": rfc3339(event.first_unix_ms),
        "lastTimestamp": rfc3339(event.last_unix_ms),
        "source": { "component": COMPONENT, "host": node },
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    })
}
