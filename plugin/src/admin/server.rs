//! Serving the admin service on a Unix socket that only root may open.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_kubelet::admin::admin_server::{Admin, AdminServer};
use tessera_kubelet::admin::{
    CordonRequest, CordonResponse, ExplainRequest, ExplainResponse, LiveRequest, LiveResponse,
    PlanRequest, PlanResponse, QuotaResponse, ReloadRequest, ReloadResponse, ResetQuotaRequest,
    SetQuotaRequest, StatusRequest, StatusResponse,
};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};
use tracing::{error, warn};

use super::explain;
use super::status::Sources;
use super::steer;
use crate::descriptors::Door;
use crate::files::SocketFile;
use crate::grpc::incoming::{Incoming, Limits};
use crate::locks::lock;

/// How often the socket is looked for.
const LOOK: Duration = Duration::from_secs(1);

/// All calls end by themselves; the longest is a reload of the configuration.
const LIMITS: Limits = Limits { door: Door::Admin, answer: Some(Duration::from_secs(60)) };
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
    ///
    /// # Errors
    /// See [`AdminError`].
    pub fn start(path: &Path, sources: Arc<Sources>) -> Result<Self, AdminError> {
        let (file, listener) = bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => AdminError::InUse(path.to_owned()),
            _ => AdminError::Io { path: path.to_owned(), error },
        })?;
        let file = Arc::new(Mutex::new(Some(file)));
        let task = tokio::spawn(serve(path.to_owned(), listener, Arc::clone(&file), sources));
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

/// Serves for ever. A socket that somebody removed is made anew: nobody could reach the old one, and the
/// readiness probe would fail until the next start.
async fn serve(
    path: PathBuf,
    mut listener: UnixListener,
    file: Arc<Mutex<Option<SocketFile>>>,
    sources: Arc<Sources>,
) {
    loop {
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .serve_with_incoming(
                AdminServer::new(Service(Arc::clone(&sources))),
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

struct Service(Arc<Sources>);

#[tonic::async_trait]
impl Admin for Service {
    async fn status(
        &self,
        _request: Request<StatusRequest>,
    ) -> Result<Response<StatusResponse>, Status> {
        let sources = Arc::clone(&self.0);
        // Reads pages and asks the driver: not on the thread that serves kubelet.
        let status = tokio::task::spawn_blocking(move || sources.status()).await;
        status.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Result<Response<PlanResponse>, Status> {
        super::config::plan(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn reload(
        &self,
        request: Request<ReloadRequest>,
    ) -> Result<Response<ReloadResponse>, Status> {
        let by = super::steer::by(&request, "config reload".to_owned());
        super::config::reload(&self.0, Some(by)).await.map(Response::new)
    }

    async fn live(&self, _request: Request<LiveRequest>) -> Result<Response<LiveResponse>, Status> {
        Ok(Response::new(LiveResponse {}))
    }

    async fn explain(
        &self,
        request: Request<ExplainRequest>,
    ) -> Result<Response<ExplainResponse>, Status> {
        let sources = Arc::clone(&self.0);
        let told =
            tokio::task::spawn_blocking(move || explain::answer(&sources, request.get_ref())).await;
        told.map_err(|error| Status::internal(error.to_string()))?.map(Response::new)
    }

    async fn set_quota(
        &self,
        request: Request<SetQuotaRequest>,
    ) -> Result<Response<QuotaResponse>, Status> {
        steer::set_quota(&self.0, request).await
    }

    async fn reset_quota(
        &self,
        request: Request<ResetQuotaRequest>,
    ) -> Result<Response<QuotaResponse>, Status> {
        steer::reset_quota(&self.0, request).await
    }

    async fn cordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        steer::cordon(&self.0, request, false).await
    }

    async fn uncordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        steer::cordon(&self.0, request, true).await
    }
}
