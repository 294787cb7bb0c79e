//! One request to the API server: credentials, connection, a limit of time on everything and of size on what is
//! read. The connection is `kube`'s, HTTP/1.1, and ends some seconds after its last use.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper_util::client::legacy::Builder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt};
use kube::core::request;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tower::{BoxError, ServiceBuilder};
use tracing::debug;

use crate::access::{self, Access, NoConnection};
use crate::answer::{self, Bytes};
use crate::error::{ApiError, Call, Kind, Verb};
use tessera_system::locks::lock;

/// Most of an answer that is read. A slice of 128 devices has some 200 KiB.
const LARGEST: usize = 8 << 20;
/// How long before credentials end they are asked for again.
const EARLY: Duration = Duration::from_secs(60);
/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(10);
/// Connections that wait.
const IDLE_CONNECTIONS: usize = 2;

/// The header that a plugin reads a token from, behind the API server's proxy.
pub(crate) const PASSED_ON: &str = "tessera-authorization";
/// The header's value that stands for the token of `Authorization`.
pub(crate) const PASS_ON: &str = "as-authorization";

/// Requests of one verb on one kind of object, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Requests with an answer that is a success. A watch counts when it begins.
    pub served: u64,
    /// All others.
    pub failed: u64,
}

type Counts = std::sync::Mutex<BTreeMap<(Verb, Kind), Outcomes>>;

/// A request before it has credentials.
pub(crate) type Request = Result<http::Request<Vec<u8>>, request::Error>;

/// A client; connects when it is asked for something. A clone shares its connections.
#[derive(Clone)]
pub struct Client {
    access: Arc<Access>,
    limit: Duration,
    idle: usize,
    connection: Arc<Mutex<Option<Connection>>>,
    counts: Arc<Counts>,
}

/// What is connected, and with what.
#[derive(Clone)]
struct Connection {
    client: kube::Client,
    /// Requests carry a bearer token.
    has_token: bool,
    /// Where the API server is, as configured.
    server: String,
    /// When the credentials end, where that is known.
    until: Option<SystemTime>,
}

impl Connection {
    /// A request that came to nothing on its way. The address is what a person has to look at.
    fn unreachable(&self, call: &Call, error: &(dyn Error + 'static)) -> ApiError {
        let reason = format!("{}: {}", self.server, chain(error));
        ApiError::Unreachable { call: call.clone(), reason }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Client { access, limit, .. } = self;
        f.debug_struct("Client")
            .field("access", access)
            .field("limit", limit)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// For requests that may take `limit` each, connecting included.
    pub fn new(access: impl Into<Access>, limit: Duration) -> Self {
        Client {
            access: Arc::new(access.into()),
            limit,
            idle: IDLE_CONNECTIONS,
            connection: Arc::default(),
            counts: Arc::default(),
        }
    }

    /// Keeps so many connections for the next requests, for one that asks much at once.
    pub(crate) fn keeping(self, idle: usize) -> Self {
        Client { idle, ..self }
    }

    pub(crate) fn access(&self) -> &Access {
        &self.access
    }

    /// Whether requests carry a bearer token of their user: not those of a kubeconfig with a client certificate, nor
    /// those that impersonate another user (`as`).
    pub(crate) async fn has_token(&self, call: &Call) -> Result<bool, ApiError> {
        Ok(self.connection(call).await?.has_token)
    }

    /// Status and body of an answer, whatever it is, of which at most `largest` bytes are read and which is
    /// waited for as long as `limit`. Connections stay: a slow answer is one of what is behind the server.
    ///
    /// # Errors
    /// [`ApiError::Unreachable`], [`ApiError::Slow`]; [`ApiError::Unreadable`] for an answer that is too large.
    pub(crate) async fn exchange(
        &self,
        call: &Call,
        request: Request,
        limit: Duration,
        largest: usize,
    ) -> Result<(http::response::Parts, Bytes), ApiError> {
        let connection = self.counted_connection(call).await?;
        let exchange = async {
            let mut request = request.map_err(|error| unreachable(call, &error))?;
            self.complete(call, &mut request).await?;
            let sent = connection.client.send(request.map(Body::from)).await;
            let sent = sent.map_err(|error| connection.unreachable(call, &error));
            let (head, body) = sent?.into_parts();
            let whole = Limited::new(body, largest).collect().await;
            let whole = whole.map_err(|error| match error.is::<LengthLimitError>() {
                true => {
                    let reason = format!("it has more than {largest} bytes");
                    ApiError::Unreadable { call: call.clone(), reason }
                }
                false => unreachable(call, &*error),
            });
            Ok((head, whole?.to_bytes()))
        };
        let slow = || ApiError::Slow { call: call.clone(), limit };
        let result = timeout(limit, exchange).await.unwrap_or_else(|_| Err(slow()));
        self.count(call.verb, call.kind, result.is_ok());
        result
    }

    /// A client of `kube` for calls that need more than a request and its answer.
    pub(crate) async fn upgradable(&self, call: &Call) -> Result<kube::Client, ApiError> {
        let (access, limit, idle) = (Arc::clone(&self.access), self.limit, self.idle);
        let connection = blocking(call, move || connect(&access, limit, idle, true)).await?;
        Ok(connection.client)
    }

    /// The requests so far, of all clones.
    pub fn requests(&self) -> BTreeMap<(Verb, Kind), Outcomes> {
        lock(&self.counts).clone()
    }

    fn count(&self, verb: Verb, kind: Kind, served: bool) {
        let mut counts = lock(&self.counts);
        let outcomes = counts.entry((verb, kind)).or_default();
        match served {
            true => outcomes.served += 1,
            false => outcomes.failed += 1,
        }
    }

    /// Lets the connections go, once no request uses them any more.
    pub async fn rest(&self) {
        *self.connection.lock().await = None;
    }

    /// The body of a successful answer.
    pub(crate) async fn send(&self, call: &Call, request: Request) -> Result<Bytes, ApiError> {
        let connection = self.counted_connection(call).await?;
        let exchange = async {
            let body = self.begin(call, &connection, request).await?;
            let whole = Limited::new(body, LARGEST).collect().await;
            Ok(whole.map_err(|error| unreachable(call, &*error))?.to_bytes())
        };
        self.limited(call, exchange).await
    }

    /// The body of a successful answer, of which only the beginning has to come in time.
    pub(crate) async fn stream(&self, call: &Call, request: Request) -> Result<Body, ApiError> {
        let connection = self.counted_connection(call).await?;
        self.limited(call, self.begin(call, &connection, request)).await
    }

    async fn limited<T>(
        &self,
        call: &Call,
        exchange: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let begun = Instant::now();
        let slow = || ApiError::Slow { call: call.clone(), limit: self.limit };
        let result = timeout(self.limit, exchange).await.unwrap_or_else(|_| Err(slow()));
        self.count(call.verb, call.kind, result.is_ok());
        match &result {
            Ok(_) => debug!(%call, took = ?begun.elapsed(), "a request"),
            Err(error) => debug!(%error, took = ?begun.elapsed(), "a request"),
        }
        let stale = |error: &ApiError| {
            use ApiError::{Slow, Unauthorized, Unreachable};
            matches!(error, Slow { .. } | Unreachable { .. } | Unauthorized { .. })
        };
        if result.as_ref().is_err_and(stale) {
            // The next one connects, with what the files say then.
            self.rest().await;
        }
        result
    }

    async fn begin(
        &self,
        call: &Call,
        connection: &Connection,
        request: Request,
    ) -> Result<Body, ApiError> {
        let mut request = request.map_err(|error| unreachable(call, &error))?;
        self.complete(call, &mut request).await?;
        let sent = connection.client.send(request.map(Body::from)).await;
        let response = sent.map_err(|error| connection.unreachable(call, &error))?;
        let (head, body) = response.into_parts();
        if head.status.is_success() {
            return Ok(body);
        }
        let text = Limited::new(body, LARGEST).collect().await;
        let text = text.map_err(|error| unreachable(call, &*error))?.to_bytes();
        Err(answer::refused(call, head.status.as_u16(), &head.headers, &text))
    }

    /// What every request has beside its own.
    async fn complete(
        &self,
        call: &Call,
        request: &mut http::Request<Vec<u8>>,
    ) -> Result<(), ApiError> {
        use http::header::{ACCEPT, AUTHORIZATION, HeaderValue, USER_AGENT};
        // `kube` leaves a mark where there are no parameters, and an ampersand before the first.
        let target = request.uri().to_string().replacen("?&", "?", 1);
        let target = target.trim_end_matches('?');
        *request.uri_mut() = target.parse().map_err(|error| unreachable(call, &error))?;
        let headers = request.headers_mut();
        let agent = HeaderValue::from_static(concat!("tessera/", env!("CARGO_PKG_VERSION")));
        headers.insert(USER_AGENT, agent);
        headers.entry(ACCEPT).or_insert(HeaderValue::from_static("application/json"));
        let access = Arc::clone(&self.access);
        let token = move || access.token().map_err(NoConnection::Unreachable);
        if let Some(token) = blocking(call, token).await? {
            let value = HeaderValue::try_from(format!("Bearer {token}"));
            let mut value = value.map_err(|_| ApiError::Unreachable {
                call: call.clone(),
                reason: "the service account's token is no word".to_owned(),
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(())
    }

    /// What a request is sent with. It is outside of the request's limit: a login has one of its own.
    async fn counted_connection(&self, call: &Call) -> Result<Connection, ApiError> {
        let connection = self.connection(call).await;
        if connection.is_err() {
            self.count(call.verb, call.kind, false);
        }
        connection
    }

    async fn connection(&self, call: &Call) -> Result<Connection, ApiError> {
        let mut current = self.connection.lock().await;
        let now = SystemTime::now();
        let is_good = |until: SystemTime| until.duration_since(now).is_ok_and(|left| left > EARLY);
        if let Some(connection) = current.as_ref().filter(|one| one.until.is_none_or(is_good)) {
            return Ok(connection.clone());
        }
        let (access, limit, idle) = (Arc::clone(&self.access), self.limit, self.idle);
        let connection = blocking(call, move || connect(&access, limit, idle, false)).await?;
        *current = Some(connection.clone());
        Ok(connection)
    }
}

/// `kube`'s client without its layers for tracing and retrying: failures are the caller's to say and to repeat.
/// Blocking, on a thread of a runtime: reads files, and may run a kubeconfig's credential plugin.
/// With `complete`, requests need nothing of [`Client::complete`].
fn connect(
    access: &Access,
    limit: Duration,
    idle: usize,
    complete: bool,
) -> Result<Connection, NoConnection> {
    let (mut config, origin) = access.config()?;
    let until = access::log_in(&origin, &mut config.auth_info)?;
    if let (true, Access::Server(server)) = (complete, access) {
        config.auth_info.token_file = Some(server.token.display().to_string());
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(limit));
    let tls = config.rustls_https_connector_with_connector(tcp);
    let tls = tls.map_err(|error| origin.no_identity(&chain(&error)))?;
    let mut builder = Builder::new(TokioExecutor::new());
    builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).pool_max_idle_per_host(idle);
    // `kube` ends the thread by a panic on a token that is not a word, which an auth-provider may hold.
    let auth = catch_unwind(AssertUnwindSafe(|| config.auth_layer()));
    let auth =
        auth.map_err(|_| origin.no_word())?.map_err(|error| origin.no_credentials(&error))?;
    let of_user = &config.auth_info;
    let has_token = matches!(access, Access::Server(_))
        || auth.is_some() && of_user.username.is_none() && of_user.impersonate.is_none();
    let headers = config.extra_headers_layer();
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(auth)
        .map_request(pass_on)
        .layer(headers.map_err(|error| origin.no_impersonation(&chain(&error)))?)
        .map_err(BoxError::from)
        .service(builder.build(tls));
    let server = config.cluster_url.to_string();
    let client = kube::Client::new(service, config.default_namespace);
    Ok(Connection { client, has_token, server, until })
}

/// Carries the token in a header of ours as well, where the request says [`PASS_ON`]: the API server passes no
/// `Authorization` on to what is behind it.
fn pass_on<B>(mut request: http::Request<B>) -> http::Request<B> {
    let headers = request.headers_mut();
    if headers.get(PASSED_ON).is_some_and(|value| value == PASS_ON) {
        match headers.get(http::header::AUTHORIZATION).cloned() {
            Some(token) => headers.insert(PASSED_ON, token),
            None => headers.remove(PASSED_ON),
        };
    }
    request
}

async fn blocking<T: Send + 'static>(
    call: &Call,
    work: impl FnOnce() -> Result<T, NoConnection> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.unwrap_or_else(|error| Err(NoConnection::Unreachable(error.to_string())));
    let call = || call.clone();
    done.map_err(|error| match error {
        NoConnection::Kubeconfig(reason) => ApiError::Kubeconfig { call: call(), reason },
        NoConnection::Login { command, reason } => {
            ApiError::Login { call: call(), command, reason }
        }
        NoConnection::Unreachable(reason) => ApiError::Unreachable { call: call(), reason },
    })
}

fn unreachable(call: &Call, error: &(dyn Error + 'static)) -> ApiError {
    ApiError::Unreachable { call: call.clone(), reason: chain(error) }
}

/// An error with its causes: the outer ones say little.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}
