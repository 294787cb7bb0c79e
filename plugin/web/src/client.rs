//! Asking the API of a node: over root's socket, or over TCP.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use tessera_system::files::check_peer;
use tessera_view::Problem;
use tessera_view::change::Call;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

/// Longest wait for an answer: longer than the server's own.
const LIMIT: Duration = Duration::from_secs(20);
/// Most bytes of an answer.
const LARGEST: usize = 64 << 20;

/// How a command is run where the plugin is.
pub const IN_POD: &str = "`kubectl -n tessera exec ds/tessera -- tessera …`";
/// Where a plugin says why it ended.
const LOOK: &str = "see its pod and that pod's log (`kubectl -n tessera get pods -o wide`), or start `tessera serve`";

/// Why there is no answer, and what to do. Each kind has an exit status of its own.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing is at the socket's path.
    #[error(
        "the plugin does not answer: there is no socket at {0}, so it is not running; {look}",
        look = LOOK
    )]
    Missing(PathBuf),
    /// Something is at the socket's path, and nobody listens.
    #[error(
        "the plugin does not answer: nobody listens at {0}, so it has ended or was killed; {look}",
        look = LOOK
    )]
    Deserted(PathBuf),
    /// The caller may not connect to the socket.
    #[error(
        "permission denied: only root may ask the plugin at {0}, and this is uid {uid}; try again with sudo, or in the \
         plugin's pod: {in_pod}",
        uid = nix::unistd::geteuid(),
        in_pod = IN_POD
    )]
    Forbidden(PathBuf),
    /// The server says that the caller may not ask this.
    #[error("{0}")]
    Denied(String),
    /// The answer does not come or breaks off; over TCP, also: nobody listens.
    #[error(
        "the plugin does not answer at {at}: {reason}; it may be restarting: try again, and see its pod's log"
    )]
    NoAnswer { at: String, reason: String },
    /// It does not answer in time. What was asked may still be done.
    #[error(
        "the plugin does not answer at {at} within {seconds} s: it hangs, or the machine is overloaded; its pod's log \
         says more, and kubelet restarts it when its liveness probe fails"
    )]
    Late { at: String, seconds: u64 },
    /// It answers, and not with what was asked for.
    #[error("{}", .0.error)]
    Refused(Problem),
    /// The answer cannot be read: perhaps that of another version.
    #[error("the answer of {at} cannot be read: {reason}; is the plugin of another version?")]
    Unreadable { at: String, reason: String },
}

impl ClientError {
    /// The exit status, after `sysexits.h`: 69 the plugin does not answer, not now or not so that it can be read, 77 no
    /// permission, 64 the question makes no sense, 1 nothing is called so.
    pub fn exit(&self) -> u8 {
        match self {
            ClientError::Forbidden(_) | ClientError::Denied(_) => 77,
            ClientError::Refused(Problem { code: 400, .. }) => 64,
            ClientError::Refused(Problem { code: 404, .. }) => 1,
            _ => 69,
        }
    }

    /// Whether nobody answered.
    pub fn is_silence(&self) -> bool {
        use ClientError::{Denied, Refused, Unreadable};
        !matches!(self, Denied(_) | Refused(_) | Unreadable { .. })
    }

    /// The HTTP status of a refusal.
    pub fn code(&self) -> Option<u16> {
        match self {
            ClientError::Refused(problem) => Some(problem.code),
            _ => None,
        }
    }
}

/// Where a server is.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// Root's socket.
    Socket(PathBuf),
    /// HTTP.
    Plain(SocketAddr),
    /// HTTPS, whose certificate is judged by this.
    Secure(SocketAddr, Arc<ClientConfig>),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Socket(path) => write!(f, "{}", path.display()),
            Endpoint::Plain(address) => write!(f, "http://{address}"),
            Endpoint::Secure(address, _) => write!(f, "https://{address}"),
        }
    }
}

/// A client. Each question has a connection of its own.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    token: Option<String>,
    limit: Duration,
}

impl Client {
    pub fn new(endpoint: Endpoint) -> Self {
        Client { endpoint, token: None, limit: LIMIT }
    }

    /// Of root's socket, `paths.admin`.
    pub fn at(socket: &Path) -> Self {
        Self::new(Endpoint::Socket(socket.to_owned()))
    }

    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// A path with its query, such as `/api/v1/history?subject=chat`; parameters written by [`query`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.read(&self.bytes(path, "application/json").await?)
    }

    /// What root alone may ask, over its socket.
    pub async fn call<C: Call>(&self, request: &C) -> Result<C::Answer, ClientError> {
        let body = serde_json::to_vec(request).map_err(|error| self.silent(&error.to_string()))?;
        self.read(&self.whole(C::PATH, "application/json", body).await?)
    }

    fn read<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|error| ClientError::Unreadable {
            at: self.endpoint.to_string(),
            reason: error.to_string(),
        })
    }

    /// The bytes of an answer, of the type that is asked for.
    pub async fn bytes(&self, path: &str, accept: &'static str) -> Result<Bytes, ClientError> {
        self.whole(path, accept, Vec::new()).await
    }

    /// With a body, it is a POST.
    async fn whole(&self, path: &str, accept: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
        let asking = async {
            let response = self.response(path, accept, body).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST).collect().await;
            let body = body.map_err(|error| self.silent(&error.to_string()))?.to_bytes();
            match status.is_success() {
                true => Ok(body),
                false => Err(refused(status, &body)),
            }
        };
        let seconds = self.limit.as_secs();
        let late = || ClientError::Late { at: self.endpoint.to_string(), seconds };
        tokio::time::timeout(self.limit, asking).await.unwrap_or_else(|_| Err(late()))
    }

    /// The whole response, whatever its status; its body may be a stream.
    pub async fn ask(
        &self,
        path: &str,
        accept: &'static str,
    ) -> Result<Response<Incoming>, ClientError> {
        self.response(path, accept, Vec::new()).await
    }

    async fn response(
        &self,
        path: &str,
        accept: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, ClientError> {
        let request = self.request(path, accept, body)?;
        match &self.endpoint {
            Endpoint::Socket(socket) => {
                let stream = UnixStream::connect(socket).await;
                let stream = stream.map_err(|error| self.unconnected(socket, &error))?;
                check_peer(&stream).map_err(|error| self.silent(&error.to_string()))?;
                self.exchange(stream, request).await
            }
            Endpoint::Plain(address) => {
                let stream = TcpStream::connect(address).await;
                let stream = stream.map_err(|error| self.silent(&error.to_string()))?;
                self.exchange(stream, request).await
            }
            Endpoint::Secure(address, config) => {
                let stream = TcpStream::connect(address).await;
                let stream = stream.map_err(|error| self.silent(&error.to_string()))?;
                let name = ServerName::IpAddress(address.ip().into());
                let shaken = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
                let stream = shaken.map_err(|error| self.silent(&error.to_string()))?;
                self.exchange(stream, request).await
            }
        }
    }

    fn unconnected(&self, socket: &Path, error: &io::Error) -> ClientError {
        match error.kind() {
            io::ErrorKind::NotFound => ClientError::Missing(socket.to_owned()),
            io::ErrorKind::ConnectionRefused => ClientError::Deserted(socket.to_owned()),
            io::ErrorKind::PermissionDenied => ClientError::Forbidden(socket.to_owned()),
            _ => self.silent(&error.to_string()),
        }
    }

    fn silent(&self, reason: &str) -> ClientError {
        // The system's words without its number.
        let reason = reason.split(" (os error ").next().unwrap_or_default().to_owned();
        ClientError::NoAnswer { at: self.endpoint.to_string(), reason }
    }

    fn request(
        &self,
        path: &str,
        accept: &str,
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request =
            Request::builder().uri(path).header(HOST, "localhost").header(ACCEPT, accept);
        if !body.is_empty() {
            request = request.method(Method::POST).header(CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            let value = HeaderValue::try_from(format!("Bearer {token}"));
            let mut value =
                value.map_err(|_| ClientError::Denied("the token is no word".to_owned()))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        request.body(Full::new(body.into())).map_err(|error| self.silent(&error.to_string()))
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, ClientError> {
        let silent = |error: hyper::Error| self.silent(&error.to_string());
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(silent)?;
        // Ends with the response's body.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(silent)
    }
}

/// A query string of these parameters; those that are empty are left out.
pub fn query(parameters: &[(&str, &str)]) -> String {
    let given: Vec<_> = parameters.iter().filter(|(_, value)| !value.is_empty()).collect();
    let text = serde_urlencoded::to_string(&given).unwrap_or_default();
    if text.is_empty() { text } else { format!("?{text}") }
}

fn refused(status: StatusCode, body: &[u8]) -> ClientError {
    let said: Option<Problem> = serde_json::from_slice(body).ok();
    let mut problem = said.filter(|said| !said.error.is_empty()).unwrap_or_else(|| Problem {
        error: format!("HTTP {status}: {}", String::from_utf8_lossy(body).trim()),
        ..Problem::default()
    });
    problem.code = status.as_u16();
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ClientError::Denied(problem.error),
        _ => ClientError::Refused(problem),
    }
}
