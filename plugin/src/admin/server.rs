//! Serving the admin service on a Unix socket that only root may open.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_kubelet::admin::admin_server::{Admin, AdminServer};
use tessera_kubelet::admin::{LiveRequest, LiveResponse, StatusRequest, StatusResponse};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};
use tracing::error;

use super::status::Sources;

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
    path: PathBuf,
    task: JoinHandle<()>,
}

impl Server {
    /// Listens at `path`. Call it within a runtime.
    ///
    /// # Errors
    /// See [`AdminError`].
    pub fn start(path: &Path, sources: Arc<Sources>) -> Result<Self, AdminError> {
        let failed = |error| AdminError::Io { path: path.to_owned(), error };
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(failed)?;
        }
        if UnixStream::connect(path).is_ok() {
            return Err(AdminError::InUse(path.to_owned()));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let incoming = UnixListenerStream::new(listener);
        let server = tonic::transport::Server::builder()
            .serve_with_incoming(AdminServer::new(Service(sources)), incoming);
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                error!(%error, "the admin service ended");
            }
        });
        Ok(Server { path: path.to_owned(), task })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        // A socket file nobody listens at is replaced at the next start anyway.
        let _ = std::fs::remove_file(&self.path);
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

    async fn live(&self, _request: Request<LiveRequest>) -> Result<Response<LiveResponse>, Status> {
        Ok(Response::new(LiveResponse {}))
    }
}
