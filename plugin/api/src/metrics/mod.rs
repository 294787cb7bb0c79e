//! Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`.
//!
//! - [`families`]: the table of all metrics: name, unit, labels, help text, value. `docs/metrics.md` shows the same
//! - [`tessera_agent::front_end::Meters`]: counters of the plugin's own work
//! - `snapshot`: the whole state at one moment, as series
//! - `running_totals`: counters that never decrease, computed from figures that may
//!
//! Here is the response to each request, and who may have how many long ones. The text is built on a thread that may block,
//! by one at a time, and at most once a second for all clients, in Prometheus' format, which every tool reads.

pub mod families;
mod running_totals;
mod snapshot;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use tessera_peers::token_bucket::TokenBucket;
use tessera_system::connections::Connection;
use tessera_system::locks::lock;
use tokio::runtime::Handle;
use tracing::warn;

use self::running_totals::RunningTotals;
use self::snapshot::Snapshot;
use crate::admin::StatusView;

/// Serves metrics and probes at the first of these addresses that can be had, now or later, until dropped; that none
/// can is no reason not to serve kubelet. Call it within a runtime: whether that one's threads turn is what
/// `/healthz` tells.
pub fn serve(listen: Vec<SocketAddr>, view: Arc<StatusView>) -> Option<tessera_web::Server> {
    if listen.is_empty() {
        return None;
    }
    let known = Arc::clone(&view);
    let report = Arc::new(move |_, problem: Option<String>| {
        known.board.set_condition("metrics", problem);
    });
    let router = router(Arc::clone(&view), Handle::current());
    let server = tessera_web::Server::metrics(listen, router, report);
    let server = server
        .inspect_err(|error| warn!(%error, "metrics and probes are not served: no thread"))
        .ok()?;
    let bound = server.bound();
    tokio::spawn(async move {
        if let Some(address) = bound.await {
            let _ = view.metrics.set(address);
        }
    });
    Some(server)
}

/// Answers that may be slow to read, at a time: in all, and to one client.
const SCRAPES: usize = 16;
const SCRAPES_PER_CLIENT: usize = 4;
/// The same by time: scrapes a second of one client, and at once.
const RATE: u32 = 20;
const BURST: u32 = 40;
/// Clients whose scrapes are remembered.
const CLIENTS: usize = 256;

/// What connections share.
#[derive(Clone)]
struct Answers {
    view: Arc<StatusView>,
    text: Arc<TextCache>,
    liveness: Arc<Liveness>,
    scrapes: Scrapes,
}

/// `main` is the runtime that serves kubelet: whether it turns is what probes ask, and what blocks is for its threads.
fn router(view: Arc<StatusView>, main: Handle) -> Router {
    let text = Arc::new(TextCache::new(Arc::clone(&view), main.clone()));
    let liveness = Arc::new(Liveness::new(main));
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .fallback(|| async { (StatusCode::NOT_FOUND, "/metrics, /healthz, /readyz\n") })
        .layer(map_response(last))
        .with_state(Answers { view, text, liveness, scrapes: Scrapes::default() })
}

/// A connection is for one request.
async fn last(mut response: Response) -> Response {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

async fn healthz(State(answers): State<Answers>) -> (StatusCode, &'static str) {
    match answers.liveness.check().await {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the plugin is ending\n"),
    }
}

async fn readyz(State(answers): State<Answers>) -> Response {
    if !answers.liveness.check().await {
        return (StatusCode::SERVICE_UNAVAILABLE, "the plugin is ending\n").into_response();
    }
    let amiss = answers.view.amiss();
    match amiss.is_empty() {
        true => (StatusCode::OK, "ready\n").into_response(),
        false => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", amiss.join("\n"))).into_response()
        }
    }
}

async fn metrics(
    State(answers): State<Answers>,
    Extension(connection): Extension<Connection>,
) -> Response {
    let Some(scrape) = answers.scrapes.begin(connection.client) else {
        let text = "too many scrapes at once, in all or of this address\n";
        return (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], text).into_response();
    };
    match answers.text.get().await {
        // Held until the text has been read.
        Ok(text) => ([(CONTENT_TYPE, TEXT)], Extension(Arc::new(scrape)), text).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

/// The long answers that are under way.
#[derive(Clone, Debug, Default)]
struct Scrapes(Arc<Mutex<Clients>>);

#[derive(Debug, Default)]
struct Clients {
    open: usize,
    by: HashMap<u128, Scraper>,
}

#[derive(Debug)]
struct Scraper {
    open: usize,
    bucket: TokenBucket,
}

/// The right to a long answer. Ends when dropped.
#[derive(Debug)]
struct Scrape {
    scrapes: Scrapes,
    client: u128,
}

impl Scrapes {
    /// `None` while others, or the same client, have as many as there may be, or the client asks too often.
    fn begin(&self, client: u128) -> Option<Scrape> {
        let now = Instant::now();
        let mut clients = lock(&self.0);
        if clients.open >= SCRAPES {
            return None;
        }
        if clients.by.len() >= CLIENTS && !clients.by.contains_key(&client) {
            clients.by.retain(|_, scraper| scraper.open > 0 || !scraper.bucket.is_full(now));
            if clients.by.len() >= CLIENTS {
                return None;
            }
        }
        let new = || Scraper { open: 0, bucket: TokenBucket::new(BURST, RATE, now) };
        let scraper = clients.by.entry(client).or_insert_with(new);
        if scraper.open >= SCRAPES_PER_CLIENT || scraper.bucket.take(now).is_err() {
            return None;
        }
        scraper.open += 1;
        clients.open += 1;
        Some(Scrape { scrapes: self.clone(), client })
    }
}

impl Drop for Scrape {
    fn drop(&mut self) {
        let mut clients = lock(&self.scrapes.0);
        clients.open -= 1;
        if let Some(scraper) = clients.by.get_mut(&self.client) {
            scraper.open -= 1;
        }
    }
}

/// For how long an answer of that thread counts: however many ask, it is asked so often. Much longer than a turn
/// takes on a busy node, else those who ask would wait for most of the time.
const TURN: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Liveness {
    main: Handle,
    checked: tokio::sync::Mutex<Option<Instant>>,
}

impl Liveness {
    /// Of the runtime that serves kubelet.
    pub fn new(main: Handle) -> Self {
        Liveness { main, checked: Default::default() }
    }

    /// Done when that thread has had a turn; false if it has none any more.
    pub async fn check(&self) -> bool {
        let mut checked = self.checked.lock().await;
        if checked.is_some_and(|at| at.elapsed() < TURN) {
            return true;
        }
        let turns = self.main.spawn(async {}).await.is_ok();
        *checked = turns.then(Instant::now);
        turns
    }
}

/// Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// For how long a text is reused.
const FRESH: Duration = Duration::from_secs(1);
/// How long it may take: Prometheus waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(8);

/// The driver or a file system does not answer in time, so there is no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver or the file system does not answer in time")]
struct Late;

#[derive(Debug)]
struct TextCache {
    view: Arc<StatusView>,
    /// Whose threads may block.
    main: Handle,
    /// What was counted so far, held while a text is built, perhaps without a client that still waits.
    running_totals: Arc<tokio::sync::Mutex<RunningTotals>>,
    /// The last text, and when it was made.
    made: tokio::sync::Mutex<Option<(Instant, Bytes)>>,
}

impl TextCache {
    /// Of a plugin that starts now.
    pub fn new(view: Arc<StatusView>, main: Handle) -> Self {
        let totals = RunningTotals::new(Instant::now());
        let (running_totals, made) = (Arc::new(totals.into()), Default::default());
        TextCache { view, main, running_totals, made }
    }

    /// The text, not older than a second.
    pub async fn get(self: &Arc<Self>) -> Result<Bytes, Late> {
        let mut made = self.made.lock().await;
        if let Some((at, text)) = &*made
            && at.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let text = tokio::time::timeout(PATIENCE, self.make()).await.map_err(|_| Late)??;
        *made = Some((Instant::now(), text.clone()));
        tokio::spawn(Arc::clone(self).forget());
        Ok(text)
    }

    /// Frees a text that is too old to be reused: it may be large.
    async fn forget(self: Arc<Self>) {
        tokio::time::sleep(FRESH).await;
        self.made.lock().await.take_if(|(at, _)| at.elapsed() >= FRESH);
    }

    async fn make(&self) -> Result<Bytes, Late> {
        // Else each scrape would take one more of the few threads that kubelet's calls need too.
        let totals = Arc::clone(&self.running_totals).try_lock_owned();
        let (view, mut totals) = (Arc::clone(&self.view), totals.map_err(|_| Late)?);
        let making = self
            .main
            .spawn_blocking(move || Bytes::from(Snapshot::collect(&view, &mut totals).text()));
        // It panicked, or the plugin ends.
        making.await.map_err(|_| Late)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn scrapes_of_one_client_leave_room_for_others() {
        let scrapes = Scrapes::default();
        let many: Vec<_> = (0..10).filter_map(|_| scrapes.begin(2)).collect();
        assert_eq!(many.len(), SCRAPES_PER_CLIENT);
        assert!(scrapes.begin(3).is_some());
        drop(many);
        // And by time.
        let taken = (0..1000).filter(|_| scrapes.begin(4).is_some()).count();
        assert!(taken < 500, "{taken} of a thousand at once");
        assert_eq!(lock(&scrapes.0).open, 0);
    }

    #[test]
    fn clients_that_come_and_go_are_forgotten() {
        let scrapes = Scrapes::default();
        let mut held = Vec::new();
        for client in 0..2000 {
            held.push(scrapes.begin(client));
            held.truncate(3);
        }
        assert!(lock(&scrapes.0).by.len() <= CLIENTS);
    }

    #[test]
    fn a_thread_that_hangs_is_not_live_until_it_goes_on() {
        let main = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let liveness = Liveness::new(main.handle().clone());
        let (hang, hanging) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            main.block_on(async move {
                let _ = hanging.recv();
                tokio::time::sleep(Duration::from_millis(200)).await;
            });
        });
        let own = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        own.block_on(async {
            let early = tokio::time::timeout(Duration::from_millis(100), liveness.check()).await;
            assert!(early.is_err(), "nobody can have answered");
            drop(hang);
            assert!(liveness.check().await);
        });
        thread.join().unwrap();
        // Its runtime is gone.
        own.block_on(async {
            tokio::time::sleep(TURN).await;
            assert!(!liveness.check().await);
        });
    }
}
