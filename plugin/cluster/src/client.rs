//! One request to the API server: credentials, connection, a limit of time on everything. The connection is `kube`'s, HTTP/1.1, and ends some seconds after its last use.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt};
use http::header::{AUTHORIZATION, HeaderValue, USER_AGENT};
use http::response::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper_util::client::legacy::Builder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::Config;
use kube::client::{Body, ConfigExt};
use kube::core::{WatchEvent, request};
use serde::de::DeserializeOwned;
use tessera_model::printable::causes;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tower::{BoxError, ServiceBuilder};
use tracing::debug;

use crate::access::Access;
use crate::error::{self, ApiError, Bytes, Call, Failure};

/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(10);

/// The header that a plugin reads a token from, behind the API server's proxy.
pub(crate) const PASSED_ON: &str = "tessera-authorization";
/// The header's value that stands for the token of `Authorization`.
pub(crate) const PASS_ON: &str = "as-authorization";

/// A request before it has credentials.
pub(crate) type Request = Result<http::Request<Vec<u8>>, request::Error>;

/// A client; connects when it is asked for something. A clone shares its connections.
#[derive(Clone)]
pub struct Client {
    access: Arc<Access>,
    limit: Duration,
    connection: Arc<Mutex<Option<Connection>>>,
}

/// What is connected, and with what.
#[derive(Clone)]
struct Connection {
    kube: kube::Client,
    /// Requests carry a bearer token.
    has_token: bool,
    /// Where the API server is, as configured.
    server: String,
}

impl Connection {
    /// What came of a request. The address is what a person has to look at where it came to nothing on its way.
    fn failed(&self, call: &Call, error: kube::Error) -> ApiError {
        match error {
            kube::Error::Api(status) => error::refused(call, &status),
            error => {
                let reason = format!("{}: {}", self.server, causes(&error));
                call.failed(Failure::Unreachable, reason)
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("access", &self.access).finish_non_exhaustive()
    }
}

impl Client {
    /// For requests that may take `limit` each, connecting included.
    pub fn new(access: impl Into<Access>, limit: Duration) -> Self {
        let (access, connection) = (Arc::new(access.into()), Arc::default());
        Client { access, limit, connection }
    }

    pub(crate) fn access(&self) -> &Access {
        &self.access
    }

    /// Whether requests carry a bearer token of their user: not those of a kubeconfig with a client certificate, nor
    /// those that impersonate another user (`as`).
    pub(crate) async fn has_token(&self, call: &Call) -> Result<bool, ApiError> {
        Ok(self.connection(call).await?.has_token)
    }

    /// `kube`'s client, for calls that need more than a request and its answer.
    pub(crate) async fn kube(&self, call: &Call) -> Result<kube::Client, ApiError> {
        Ok(self.connection(call).await?.kube)
    }

    /// Status and body of an answer, whatever it is, of which at most `largest` bytes are read and which is
    /// waited for as long as `limit`. Connections stay: a slow answer is one of what is behind the server.
    pub(crate) async fn exchange(
        &self,
        call: &Call,
        request: Request,
        limit: Duration,
        largest: usize,
    ) -> Result<(Parts, Bytes), ApiError> {
        let connection = self.connection(call).await?;
        let exchange = async {
            let request = request.map_err(|error| unreachable(call, &error))?;
            let sent = connection.kube.send(request.map(Body::from)).await;
            let (head, body) = sent.map_err(|error| connection.failed(call, error))?.into_parts();
            let whole = Limited::new(body, largest).collect().await;
            let whole = whole.map_err(|error| match error.is::<LengthLimitError>() {
                true => {
                    call.failed(Failure::Unreadable, format!("it has more than {largest} bytes"))
                }
                false => unreachable(call, &*error),
            });
            Ok((head, whole?.to_bytes()))
        };
        in_time(call, limit, exchange).await
    }

    /// What a successful answer says.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        call: &Call,
        request: Request,
    ) -> Result<T, ApiError> {
        let begun = Instant::now();
        let connection = self.connection(call).await?;
        let asking = async {
            let request = request.map_err(|error| unreachable(call, &error))?;
            let text = connection.kube.request_text(request).await;
            text.map_err(|error| connection.failed(call, error))
        };
        let said = in_time(call, self.limit, asking).await;
        let said = said.and_then(|text| error::read(call, &text));
        debug!(%call, took = ?begun.elapsed(), error = said.as_ref().err().map(tracing::field::display));
        self.settle(said).await
    }

    /// What a watch tells. Only its beginning has to come in time.
    pub(crate) async fn watch<K: Clone + DeserializeOwned>(
        &self,
        call: &Call,
        request: Request,
    ) -> Result<impl Stream<Item = Result<WatchEvent<K>, ApiError>> + use<K>, ApiError> {
        let connection = self.connection(call).await?;
        let begin = async {
            let request = request.map_err(|error| unreachable(call, &error))?;
            let events = connection.kube.request_events(request).await;
            events.map_err(|error| connection.failed(call, error))
        };
        let events = self.settle(in_time(call, self.limit, begin).await).await?;
        let call = call.clone();
        Ok(events.map(move |event| event.map_err(|error| connection.failed(&call, error))))
    }

    /// After a failure that another connection may not have, the next request connects, with what the files say then.
    async fn settle<T>(&self, result: Result<T, ApiError>) -> Result<T, ApiError> {
        use Failure::{Slow, Unauthorized, Unreachable};
        let failure = result.as_ref().err().map(|error| &error.failure);
        if let Some(Slow(_) | Unreachable | Unauthorized) = failure {
            self.rest().await;
        }
        result
    }

    /// Lets the connections go, once no request uses them any more.
    pub async fn rest(&self) {
        *self.connection.lock().await = None;
    }

    /// What a request is sent with. It is outside of the request's limit: a person may have to log in.
    async fn connection(&self, call: &Call) -> Result<Connection, ApiError> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = &*current {
            return Ok(connection.clone());
        }
        let config = self.access.config(call).await?;
        let (access, limit, asked) = (Arc::clone(&self.access), self.limit, call.clone());
        let connecting =
            move || connect(config, limit).map_err(|error| access.wrong(&asked, &causes(&error)));
        let connected = tokio::task::spawn_blocking(connecting).await;
        let connection = connected.unwrap_or_else(|error| Err(unreachable(call, &error)))?;
        *current = Some(connection.clone());
        Ok(connection)
    }
}

pub(crate) async fn in_time<T>(
    call: &Call,
    limit: Duration,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(call.failed(Failure::Slow(limit), "")))
}

/// An object as a request's body.
pub(crate) fn body(object: &impl serde::Serialize) -> Vec<u8> {
    // What Kubernetes' types hold is JSON; the server would refuse what is none.
    serde_json::to_vec(object).unwrap_or_default()
}

/// `kube`'s client without its layers for tracing and retrying: failures are the caller's to say and to repeat.
/// Blocking, on a thread of a runtime: reads files, and may run a kubeconfig's credential plugin.
fn connect(config: Config, limit: Duration) -> Result<Connection, kube::Error> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(limit));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let mut builder = Builder::new(TokioExecutor::new());
    builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE);
    let auth = config.auth_layer()?;
    let of_user = &config.auth_info;
    let has_token = auth.is_some() && of_user.username.is_none() && of_user.impersonate.is_none();
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(auth)
        .map_request(complete)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(builder.build(tls));
    let server = config.cluster_url.to_string();
    let kube = kube::Client::new(service, config.default_namespace);
    Ok(Connection { kube, has_token, server })
}

/// Says who asks, and carries the token in a header of ours as well, where the request says [`PASS_ON`]: the API server
/// passes no `Authorization` on to what is behind it.
fn complete<B>(mut request: http::Request<B>) -> http::Request<B> {
    let headers = request.headers_mut();
    let agent = HeaderValue::from_static(concat!("tessera/", env!("CARGO_PKG_VERSION")));
    headers.insert(USER_AGENT, agent);
    if headers.get(PASSED_ON).is_some_and(|value| value == PASS_ON) {
        match headers.get(AUTHORIZATION).cloned() {
            Some(token) => headers.insert(PASSED_ON, token),
            None => headers.remove(PASSED_ON),
        };
    }
    request
}

fn unreachable(call: &Call, error: &(dyn Error + 'static)) -> ApiError {
    call.failed(Failure::Unreachable, causes(error))
}
