//! Serving the admin service on a Unix socket that only root may open.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_kubelet_api::admin::admin_server::{Admin, AdminServer};
use tessera_kubelet_api::admin::{
    CordonRequest, CordonResponse, ExplainRequest, ExplainResponse, LiveRequest, LiveResponse,
    PlanRequest, PlanResponse, QuotaResponse, ReloadRequest, ReloadResponse, ResetQuotaRequest,
    SetQuotaRequest, StatusRequest, StatusResponse,
};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};
use tracing::{error, warn};

use super::explain;
use super::status::StatusView;
use super::steer;
use tessera_rpc::incoming::{Incoming, Limits};
use tessera_system::descriptors::ListenerKind;
use tessera_system::files::SocketFile;
use tessera_system::locks::lock;

/// How often the socket is looked for.
const LOOK: Duration = Duration::from_secs(1);

/// All calls end by themselves; the longest is a reload of the configuration.
const LIMITS: Limits = Limits {
    listener: ListenerKind::Admin,
    silence: Limits::SILENCE,
    answer: Some(Duration::from_secs(60)),
};
/// Calls that may be at work at a time: half of the threads that may block are left to kubelet's.
const CALLS: usize = 4;
/// Streams that one connection may have open.
const MAX_STREAMS: u32 = 64;

/// Why the admin socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Somebody answers there.
    #[error(
        "another Tessera plugin answers at {0}; stop it, or give each its own paths.admin, \
         paths.ledger and paths.pages"
    )]
    InUse(PathBuf),
    /// The socket cannot be made.
    #[error("paths.admin {path}: {error}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// The admin service, listening. Removes its socket when dropped.
#[derive(Debug)]
pub struct Server {
    /// Of the socket that is served now.
    file: Arc<Mutex<Option<SocketFile>>>,
    task: JoinHandle<()>,
}

impl Server {
    /// Listens at `path`. Call it within a runtime.
    pub fn start(path: &Path, view: Arc<StatusView>) -> Result<Self, AdminError> {
        let (file, listener) = bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => AdminError::InUse(path.to_owned()),
            _ => AdminError::Io { path: path.to_owned(), error },
        })?;
        let file = Arc::new(Mutex::new(Some(file)));
        let task = tokio::spawn(serve(path.to_owned(), listener, Arc::clone(&file), view));
        Ok(Server { file, task })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        lock(&self.file).take();
    }
}

fn bind(path: &Path) -> io::Result<(SocketFile, UnixListener)> {
    let (file, listener) = SocketFile::listen(path)?;
    listener.set_nonblocking(true)?;
    Ok((file, UnixListener::from_std(listener)?))
}

/// Serves for ever. A removed socket is made again: no client could reach the old one, and the
/// readiness probe would fail until the next start.
async fn serve(
    path: PathBuf,
    mut listener: UnixListener,
    file: Arc<Mutex<Option<SocketFile>>>,
    view: Arc<StatusView>,
) {
    let turns = Arc::new(Semaphore::new(CALLS));
    loop {
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .serve_with_incoming(
                AdminServer::new(Service { view: Arc::clone(&view), turns: Arc::clone(&turns) }),
                Incoming::new(listener, LIMITS),
            );
        tokio::select! {
            ended = serving => {
                if let Err(error) = ended {
                    error!(%error, "the admin service ended");
                }
                return;
            }
            (again, new) = bound_again(&path) => {
                listener = new;
                lock(&file).replace(again);
            }
        }
        warn!(path = %path.display(), "the admin socket was removed; made a new one");
    }
}

/// Waits until nothing is at `path`, and listens there again.
async fn bound_again(path: &Path) -> (SocketFile, UnixListener) {
    loop {
        tokio::time::sleep(LOOK).await;
        // Whatever else is there is somebody's: another plugin that was given the same path.
        let gone = path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if gone && let Ok(bound) = bind(path) {
            return bound;
        }
    }
}

struct Service {
    view: Arc<StatusView>,
    turns: Arc<Semaphore>,
}

impl Service {
    /// Does this when it may: it goes on, and counts, also when nobody waits for it any more.
    async fn at_work<T, F>(&self, call: impl FnOnce(Arc<StatusView>) -> F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.map_err(|error| Status::unavailable(error.to_string()))?;
        let call = call(Arc::clone(&self.view));
        let done = tokio::spawn(async move {
            let _turn = turn;
            call.await
        });
        done.await.map_err(|error| Status::internal(error.to_string()))?
    }
}

#[tonic::async_trait]
impl Admin for Service {
    async fn status(
        &self,
        _request: Request<StatusRequest>,
    ) -> Result<Response<StatusResponse>, Status> {
        // Reads pages and asks the driver: not on the thread that serves kubelet.
        self.at_work(|view| async move {
            let status = tokio::task::spawn_blocking(move || view.status()).await;
            status.map(Response::new).map_err(|error| Status::internal(error.to_string()))
        })
        .await
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Result<Response<PlanResponse>, Status> {
        self.at_work(|view| async move {
            super::config::plan(&view, request.into_inner()).await.map(Response::new)
        })
        .await
    }

    async fn reload(
        &self,
        request: Request<ReloadRequest>,
    ) -> Result<Response<ReloadResponse>, Status> {
        let actor = super::steer::actor(&request, "config reload".to_owned());
        self.at_work(|view| async move {
            super::config::reload(&view, Some(actor)).await.map(Response::new)
        })
        .await
    }

    async fn live(&self, _request: Request<LiveRequest>) -> Result<Response<LiveResponse>, Status> {
        Ok(Response::new(LiveResponse {}))
    }

    async fn explain(
        &self,
        request: Request<ExplainRequest>,
    ) -> Result<Response<ExplainResponse>, Status> {
        self.at_work(|view| async move {
            let work = move || explain::answer(&view, request.get_ref());
            let result = tokio::task::spawn_blocking(work).await;
            result.map_err(|error| Status::internal(error.to_string()))?.map(Response::new)
        })
        .await
    }

    async fn set_quota(
        &self,
        request: Request<SetQuotaRequest>,
    ) -> Result<Response<QuotaResponse>, Status> {
        self.at_work(|view| async move { steer::set_quota(&view, request).await }).await
    }

    async fn reset_quota(
        &self,
        request: Request<ResetQuotaRequest>,
    ) -> Result<Response<QuotaResponse>, Status> {
        self.at_work(|view| async move { steer::reset_quota(&view, request).await }).await
    }

    async fn cordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        self.at_work(|view| async move { steer::cordon(&view, request, false).await }).await
    }

    async fn uncordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        self.at_work(|view| async move { steer::cordon(&view, request, true).await }).await
    }
}
