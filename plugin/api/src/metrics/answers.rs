//! The answer to each request.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body_util::Full;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use tokio::runtime::Handle;

use super::connection_limits::{ConnectionPermit, Scrape};
use super::liveness::Liveness;
use super::text::Format;
use super::text_cache::TextCache;
use crate::admin::StatusView;

/// What connections share.
pub(super) struct Answers {
    view: Arc<StatusView>,
    text: Arc<TextCache>,
    liveness: Liveness,
}

/// A body, and the right to one that may be slow to read.
pub(super) struct Text {
    whole: Full<Bytes>,
    _scrape: Option<Scrape>,
}

impl Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.whole).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.whole.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.whole.size_hint()
    }
}

impl Answers {
    /// `main` is the runtime that serves kubelet: whether it turns is what probes ask, and what blocks is for
    /// its threads.
    pub fn new(view: Arc<StatusView>, main: Handle) -> Self {
        let text = Arc::new(TextCache::new(Arc::clone(&view), main.clone()));
        Answers { view, text, liveness: Liveness::new(main) }
    }

    pub async fn answer(
        &self,
        permit: Arc<ConnectionPermit>,
        request: Request<Incoming>,
    ) -> Result<Response<Text>, Infallible> {
        Ok(self.respond(&permit, &request).await)
    }

    async fn respond(
        &self,
        permit: &Arc<ConnectionPermit>,
        request: &Request<Incoming>,
    ) -> Response<Text> {
        let path = request.uri().path();
        if !matches!(path, "/metrics" | "/healthz" | "/readyz") {
            return plain(StatusCode::NOT_FOUND, "/metrics, /healthz, /readyz\n");
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n");
            refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        if path == "/metrics" {
            return self.metrics(permit, request).await;
        }
        if !self.liveness.check().await {
            return plain(StatusCode::SERVICE_UNAVAILABLE, "the plugin is ending\n");
        }
        if path == "/healthz" {
            return plain(StatusCode::OK, "ok\n");
        }
        let amiss = self.view.amiss();
        match amiss.is_empty() {
            true => plain(StatusCode::OK, "ready\n"),
            false => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", amiss.join("\n"))),
        }
    }

    async fn metrics(
        &self,
        permit: &Arc<ConnectionPermit>,
        request: &Request<Incoming>,
    ) -> Response<Text> {
        let Some(scrape) = permit.scrape() else {
            let text = "too many scrapes at once, in all or of this address\n";
            let mut refused = plain(StatusCode::TOO_MANY_REQUESTS, text);
            refused.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            return refused;
        };
        let accept = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
        let format = Format::wanted(accept);
        match self.text.get(format).await {
            Ok(text) => with_type(StatusCode::OK, format.content_type(), text, Some(scrape)),
            Err(error) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        }
    }
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Text> {
    with_type(status, "text/plain; charset=utf-8", text.into(), None)
}

fn with_type(
    status: StatusCode,
    kind: &'static str,
    text: Bytes,
    scrape: Option<Scrape>,
) -> Response<Text> {
    let mut response = Response::new(Text { whole: Full::new(text), _scrape: scrape });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
