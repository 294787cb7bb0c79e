//! What root alone may ask over the socket of the JSON API: the whole status, a sign of life, and changes.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::de::DeserializeOwned;
use tessera_view::change::Call;
use tessera_view::status::{LIVE, STATUS};
use tessera_web::{Peer, SourceError};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::status::StatusView;
use super::{config, steer};

/// Calls that may be at work at a time: half of the threads that may block are left to kubelet's.
const CALLS: usize = 4;
/// The longest is a reload of the configuration. It goes on when nobody waits for it any more.
const LONGEST: Duration = Duration::from_secs(25);

/// What answers.
#[derive(Clone)]
struct Service {
    view: Arc<StatusView>,
    turns: Turns,
}

/// Work in the runtime that serves kubelet: so much at a time, the other threads are left to kubelet's calls.
#[derive(Clone)]
pub(crate) struct Turns {
    free: Arc<Semaphore>,
    main: Handle,
}

/// The routes. Call it within the runtime that serves kubelet.
pub fn routes(view: Arc<StatusView>) -> Router {
    let service = Service { view, turns: Turns::new(CALLS) };
    let router = Router::new()
        // Whether the threads that serve kubelet still turn: asks nobody. A liveness probe.
        .route(
            LIVE,
            get(|State(service): State<Service>| async move {
                let turned = service.turns.main.spawn(async {}).await;
                turned.map(|()| Json(serde_json::json!({}))).map_err(failed)
            }),
        )
        .route(
            STATUS,
            get(|State(service): State<Service>| async move {
                // Reads pages and asks the driver: not on the thread that serves kubelet.
                let status = |view: Arc<StatusView>| async move {
                    tokio::task::spawn_blocking(move || view.status()).await.map_err(failed)
                };
                service.at_work(status).await.map(Json)
            }),
        );
    let router = with(router, config::plan);
    let router = with(router, config::reload);
    let router = with(router, steer::set_quota);
    let router = with(router, steer::reset_quota);
    let router = with(router, steer::cordon);
    let router = with(router, steer::uncordon);
    router.with_state(service)
}

/// With a request that is posted.
fn with<C: Call, F>(
    router: Router<Service>,
    answer: impl Fn(Arc<StatusView>, C, Peer) -> F + Clone + Send + Sync + 'static,
) -> Router<Service>
where
    F: Future<Output = Result<C::Answer, SourceError>> + Send + 'static,
{
    let handler =
        move |State(service): State<Service>, Extension(peer): Extension<Peer>, body: Bytes| {
            let answer = answer.clone();
            async move {
                let request: C = read(&body)?;
                service.at_work(move |view| answer(view, request, peer)).await.map(Json)
            }
        };
    router.route(C::PATH, post(handler))
}

/// A field that is unknown is refused: whoever misspells it means a change.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, SourceError> {
    serde_json::from_slice(body)
        .map_err(|error| SourceError::Invalid(format!("the request cannot be read: {error}")))
}

pub(super) fn failed(error: impl std::fmt::Display) -> SourceError {
    tracing::error!(%error, "a question");
    SourceError::Unavailable("the plugin failed on this; its log says more".to_owned())
}

impl Service {
    async fn at_work<T, F>(&self, call: impl FnOnce(Arc<StatusView>) -> F) -> Result<T, SourceError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, SourceError>> + Send + 'static,
    {
        let late = |_| SourceError::Unavailable("it takes longer; ask again".to_owned());
        let call = self.turns.take(call(Arc::clone(&self.view)));
        tokio::time::timeout(LONGEST, call).await.map_err(late)?
    }
}

impl Turns {
    /// So many. Call it within that runtime.
    pub fn new(most: usize) -> Self {
        Turns { free: Arc::new(Semaphore::new(most)), main: Handle::current() }
    }

    /// Does this when it may: it goes on, and counts, also when nobody waits for it any more.
    pub async fn take<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, SourceError>> + Send + 'static,
    ) -> Result<T, SourceError> {
        let turn = Arc::clone(&self.free).acquire_owned().await.map_err(failed)?;
        let done = self.main.spawn(async move {
            let _turn = turn;
            call.await
        });
        done.await.map_err(failed)?
    }

    /// The same on a thread that may block.
    pub async fn block<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        self.take(async { tokio::task::spawn_blocking(work).await.map_err(failed)? }).await
    }
}
