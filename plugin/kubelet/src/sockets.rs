//! gRPC services on sockets in kubelet's directories: listening, serving until told, and what dead instances left.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tessera_rpc::incoming::incoming;
use tessera_system::files::{self, Dir, SocketFile};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tracing::{info, warn};

/// Bytes that fit into `sockaddr_un.sun_path` with its NUL (unix(7)). Kubelet has the same limit.
pub const MAX_PATH: usize = 107;
/// Streams that one connection may have open; kubelet uses a handful.
const MAX_STREAMS: u32 = 64;

/// No socket can be made. The text says what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct SocketError(pub String);

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    pub path: PathBuf,
    /// Kubelet may have removed it long ago.
    file: SocketFile,
}

impl Socket {
    /// Listens. Only root may connect. `taken` says what to do where somebody listens there.
    pub fn listen(path: &Path, taken: &str) -> Result<(Self, UnixListener), SocketError> {
        let shown = path.display();
        if path.as_os_str().len() > MAX_PATH {
            return Err(SocketError(format!(
                "the socket path {shown} is longer than {MAX_PATH} bytes: use a shorter directory or name"
            )));
        }
        let listen = || {
            let (file, listener) = SocketFile::listen(path)?;
            listener.set_nonblocking(true)?;
            Ok((Socket { path: path.to_owned(), file }, UnixListener::from_std(listener)?))
        };
        listen().map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => SocketError(format!("somebody serves at {shown}: {taken}")),
            _ => SocketError(format!("cannot listen on {shown}: {error}")),
        })
    }

    pub fn is_gone(&self) -> bool {
        self.file.is_gone()
    }
}

/// Removes sockets of instances that were killed: kubelet would dial them for ever. Gives the names of those that
/// somebody listens at, which stay.
pub fn remove_stale(dir: &Path, is_ours: impl Fn(&str) -> bool) -> Vec<String> {
    let Ok(dir) = Dir::open_trusted(dir) else { return Vec::new() };
    let mut living = Vec::new();
    for name in dir.names().unwrap_or_default() {
        let Some(name) = name.to_str().filter(|name| is_ours(name)) else { continue };
        match files::remove_stale(&dir, OsStr::new(name)) {
            Ok(()) => info!(socket = name, "removed the socket of an instance that is dead"),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => living.push(name.to_owned()),
            // Something else has the name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => warn!(socket = name, %error, "cannot remove an old socket"),
        }
    }
    living
}

#[derive(Debug)]
pub struct Server {
    pub socket: Socket,
    stop: watch::Sender<bool>,
    pub task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Serves what `make` gives, which is told when its streams are to end.
    pub fn start<S>(
        (socket, listener): (Socket, UnixListener),
        make: impl FnOnce(watch::Receiver<bool>) -> S,
    ) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        let (stop, mut stopped) = watch::channel(false);
        let service = make(stopped.clone());
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .serve_with_incoming_shutdown(service, incoming(listener), async move {
                let _ = stopped.wait_for(|stop| *stop).await;
            });
        Server { socket, stop, task: tokio::spawn(serving) }
    }

    /// Removes the socket, lets open calls end within `drain`, then the streams.
    pub async fn end(self, drain: Duration) {
        let Server { socket, stop, mut task } = self;
        drop(socket);
        stop.send_replace(true);
        if !task.is_finished() && tokio::time::timeout(drain, &mut task).await.is_err() {
            warn!("calls of kubelet's did not end in time; leaving them");
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn sockets_of_the_dead_go_and_those_of_the_living_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        drop(std::os::unix::net::UnixListener::bind(at("dead.sock")).unwrap());
        drop(std::os::unix::net::UnixListener::bind(at("csi.sock")).unwrap());
        let (living, _listener) = Socket::listen(&at("living.sock"), "end it").unwrap();
        assert_eq!(std::fs::metadata(&living.path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(at("file.sock"), "{}").unwrap();
        assert_eq!(remove_stale(dir.path(), |name| name != "csi.sock"), ["living.sock"]);
        assert!(!at("dead.sock").exists() && at("csi.sock").exists() && at("file.sock").exists());
        let error = Socket::listen(&living.path, "end it first").unwrap_err().to_string();
        assert!(error.contains("end it first"), "{error}");
        drop(living);
        assert!(!at("living.sock").exists(), "a dropped socket leaves no file");
        let error = Socket::listen(&at(&"a".repeat(120)), "").unwrap_err().to_string();
        assert!(error.contains("107 bytes"), "{error}");
    }
}
