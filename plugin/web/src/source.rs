//! Where what is shown comes from.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanations;
use tessera_view::fleet::Fleet;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, Problem, SourceError, history};
use tokio::sync::Mutex;

/// An answer that may take time.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, SourceError>> + Send + 'a>>;

/// A node, or a fleet of them. It answers in full: what a reader may see is left to the server.
pub trait Source: Send + Sync + 'static {
    /// Everything at this moment; a node answers as a fleet of one.
    fn fleet(&self) -> Answer<'_, Fleet>;
    /// What was, of one node (empty: the only one).
    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer>;
    /// Why a subject is as it is, by each node that knows it.
    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations>;
    /// Advice.
    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations>;
    /// What is asked and not used.
    fn waste(&self, scope: Scope) -> Answer<'_, Waste>;
    /// What the arbiter does from now on for so many seconds, of one node (empty: all). Whoever drops the answer ends
    /// the trace.
    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace>;
}

/// The fleet as it was a moment ago: however many ask, the source is asked once at a time.
pub(crate) struct FleetCache {
    source: Arc<dyn Source>,
    kept: Mutex<Option<(Instant, Arc<Fleet>)>>,
}

impl FleetCache {
    pub fn new(source: Arc<dyn Source>) -> Self {
        FleetCache { source, kept: Mutex::default() }
    }

    /// Not older than `age`.
    pub async fn get(&self, age: Duration) -> Result<Arc<Fleet>, SourceError> {
        let mut kept = self.kept.lock().await;
        if let Some((at, fleet)) = &*kept
            && at.elapsed() < age
        {
            return Ok(Arc::clone(fleet));
        }
        // What is old goes first: a fleet may be large.
        *kept = None;
        let at = Instant::now();
        let fleet = Arc::new(self.source.fleet().await?);
        *kept = Some((at, Arc::clone(&fleet)));
        Ok(fleet)
    }
}

/// A problem on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub(crate) Problem);

impl Refusal {
    pub(crate) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        let api_version = API_VERSION.to_owned();
        Refusal(Problem { api_version, error: error.into(), code: status.as_u16() })
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json()));
        let status = StatusCode::from_u16(self.0.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

impl From<SourceError> for Refusal {
    fn from(error: SourceError) -> Self {
        let status = match &error {
            SourceError::NotFound(_) => StatusCode::NOT_FOUND,
            SourceError::Invalid(_) => StatusCode::BAD_REQUEST,
            SourceError::Conflict(_) => StatusCode::CONFLICT,
            SourceError::NoRoom(_) => StatusCode::UNPROCESSABLE_ENTITY,
            SourceError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Refusal::new(status, error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response<Body> {
        self.response()
    }
}
