//! The answer to each request, and who may have how many long ones; and whether the thread that serves kubelet makes
//! progress.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::header::{ACCEPT, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use tessera_peers::token_bucket::TokenBucket;
use tessera_system::connections::Connection;
use tessera_system::locks::lock;
use tokio::runtime::Handle;

use super::text::{Format, TextCache};
use crate::admin::StatusView;

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
pub(super) fn router(view: Arc<StatusView>, main: Handle) -> Router {
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
    headers: HeaderMap,
) -> Response {
    let Some(scrape) = answers.scrapes.begin(connection.client()) else {
        let text = "too many scrapes at once, in all or of this address\n";
        return (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], text).into_response();
    };
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::wanted(accept);
    match answers.text.get(format).await {
        // Held until the text has been read.
        Ok(text) => {
            let kind = [(CONTENT_TYPE, format.content_type())];
            (kind, Extension(Arc::new(scrape)), text).into_response()
        }
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
const FRESH: Duration = Duration::from_secs(1);

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
        if checked.is_some_and(|at| at.elapsed() < FRESH) {
            return true;
        }
        let turns = self.main.spawn(async {}).await.is_ok();
        *checked = turns.then(Instant::now);
        turns
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
            tokio::time::sleep(FRESH).await;
            assert!(!liveness.check().await);
        });
    }
}
