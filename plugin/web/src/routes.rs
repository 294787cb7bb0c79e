//! Which path is which question.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use axum::middleware::Next;
use axum::routing::any;
use sha2::{Digest, Sha256};
use tessera_system::connections::Connection;

use crate::answers;
use crate::authorise::Authorisation;
use crate::caller::{Caller, Origin};
use crate::query::Parameters;
use crate::source::{FleetCache, Refusal, Source};
use crate::stream::{self, Encodings, Streams};

/// How long an answer may take, from the request on.
const ANSWER: Duration = Duration::from_secs(15);

/// The JSON schema of the answers, as `docs/api.schema.json` has it.
pub const SCHEMA: &str = include_str!("../../../docs/api.schema.json");

macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident => $path:literal;)*) => {
        /// What can be asked under `/api/v1`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Route {
            $($(#[$doc])* $name,)*
        }

        impl Route {
            /// All of them.
            pub const ALL: [Route; [$($path),*].len()] = [$(Route::$name),*];

            pub fn path(self) -> &'static str {
                match self {
                    $(Route::$name => concat!("/api/v1/", $path),)*
                }
            }
        }
    };
}

routes! {
    /// Everything.
    Fleet => "fleet";
    /// What was.
    History => "history";
    /// Why one pod has what it has.
    Explain => "explain";
    /// What to ask for instead.
    Recommend => "recommend";
    /// What is paid for and not used.
    Waste => "waste";
    /// What the arbiter does for some seconds.
    Trace => "trace";
    /// Events.
    Stream => "stream";
    /// The schema of all these.
    Schema => "schema";
}

impl Route {
    /// Whether an answer takes as long as it is asked for, and not as long as it costs.
    pub fn lasts(self) -> bool {
        matches!(self, Route::Trace | Route::Stream)
    }
}

/// What requests share.
pub(crate) struct App {
    pub source: Arc<dyn Source>,
    pub fleets: FleetCache,
    pub encodings: Encodings,
    pub authorisation: Authorisation,
    pub streams: Arc<Streams>,
    /// How often a stream looks for changes.
    pub interval: Duration,
}

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for route in Route::ALL {
        let data = move |State(app): State<Arc<App>>, request: Request| ask(app, route, request);
        router = router.route(route.path(), any(data));
    }
    let index = |request: Request| async move { file("index.html", &request) };
    router
        .route("/", any(index))
        .route("/index.html", any(index))
        .route("/assets/{name}", any(asset))
        .fallback(|| async { nothing().response() })
        .with_state(app)
}

/// Lets root through, and nobody else.
pub(crate) async fn only_root(request: Request, next: Next) -> Response<Body> {
    match request.extensions().get::<Origin>() {
        Some(Origin::Root) => next.run(request).await,
        _ => Caller::stranger().response(),
    }
}

async fn asset(Path(name): Path<String>, request: Request) -> Response<Body> {
    file(&name, &request)
}

fn file(name: &str, request: &Request) -> Response<Body> {
    match FILES.iter().find(|file| file.name == name) {
        Some(_) if !is_read(request.method()) => read_only(),
        Some(found) => found.response(request.headers()),
        None => nothing().response(),
    }
}

fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

fn read_only() -> Response<Body> {
    let text =
        "this only shows: use GET; to change something, see tessera quota and tessera cordon";
    let mut response = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text).response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

fn nothing() -> Refusal {
    let paths = Route::ALL.map(Route::path).join(", ");
    Refusal::new(StatusCode::NOT_FOUND, format!("there is nothing here; there is /, {paths}"))
}

async fn ask(app: Arc<App>, route: Route, request: Request) -> Response<Body> {
    if !is_read(request.method()) {
        return read_only();
    }
    let (head, _) = request.into_parts();
    // The server puts them there.
    let connection = head.extensions.get::<Connection>().cloned();
    let Some((connection, origin)) = connection.zip(head.extensions.get::<Origin>().copied())
    else {
        return Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "no connection").response();
    };
    let asked = Parameters::of(&head.uri);
    let tracing = asked.as_ref().ok().filter(|_| route == Route::Trace);
    let tracing = tracing.and_then(|asked| asked.seconds().ok()).unwrap_or(0);
    let limit = ANSWER + Duration::from_secs(tracing.into());
    let answer = async {
        // No secret, and of use to those that have no token yet.
        if route == Route::Schema && origin != Origin::Stranger {
            let mut schema = answers::with_type("application/schema+json", SCHEMA);
            schema.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            return Ok(schema);
        }
        let caller = Caller::of(origin, &head.headers, &app.authorisation).await?;
        let asked = asked?;
        if route == Route::Stream && head.method == Method::GET {
            return stream::begin(
                Arc::clone(&app),
                head.headers.clone(),
                caller,
                asked,
                connection,
            )
            .await;
        }
        answers::answer(route, &app, &caller, &head.headers, &asked).await
    };
    let answer = tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
        let text = "the node, its driver or a file system does not answer in time; try again";
        Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text))
    });
    answer.unwrap_or_else(|refusal| refusal.response())
}

/// A file of the page, in the binary.
struct File {
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal)*) => {
        &[$(File { name: $name, bytes: include_bytes!(concat!("../assets/", $name)) }),*]
    };
}

/// What `/assets/NAME` serves. A new file needs its name here; a test of this module finds a missing one.
const FILES: &[File] = files! {
    "api.js" "app.js" "bars.js" "chart.js" "dialogs.js" "dom.js" "facts.js" "fleet.js" "format.js" "gpu.js" "history.js"
    "icon.svg" "index.html" "model.js" "namespaces.js" "pod.js" "router.js" "stream.js" "style.css" "trace.js"
};

impl File {
    /// Always asked for again, and sent only where it is another: a browser must not mix files of two versions.
    fn response(&self, headers: &HeaderMap) -> Response<Body> {
        let tag = tag(self.bytes);
        let known =
            headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
        let body = if known { Body::empty() } else { Body::from(self.bytes) };
        let mut response = Response::new(body);
        if known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static(match self.name.rsplit('.').next() {
                Some("html") => "text/html; charset=utf-8",
                Some("css") => "text/css; charset=utf-8",
                Some("svg") => "image/svg+xml",
                _ => "text/javascript; charset=utf-8",
            }),
        );
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if let Ok(tag) = HeaderValue::try_from(tag) {
            headers.insert(ETAG, tag);
        }
        response
    }
}

fn tag(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    format!("\"{}\"", hash[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let mut there: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        let mut served: Vec<&str> = FILES.iter().map(|file| file.name).collect();
        served.sort_unstable();
        assert_eq!(there, served);
    }
}
