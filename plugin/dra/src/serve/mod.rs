//! The sockets: kubelet finds the registrar in its plugin registry, learns there where the driver serves, and
//! connects.
//!
//! Two instances may serve side by side during a rolling update; the pod's UID keeps their sockets apart. An
//! instance removes its own sockets, and those of instances that are dead.

mod registrar;
mod routes;
mod sockets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::Agent;
use tessera_cluster::resource::ResourceClient;
use tessera_kubelet_api::pluginregistration::registration_server::RegistrationServer;
use tessera_rpc::incoming::{SILENCE, incoming};
use tessera_system::connections::Limits;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::health::Health;
use crate::prepare::{Preparer, Sweeping};
pub use registrar::Registration;
use routes::Routes;
pub use sockets::SocketError;
use sockets::{Paths, Socket};

/// Streams that one connection may have open; kubelet uses a handful.
const MAX_STREAMS: u32 = 64;
/// Kubelet connects as soon as the driver is registered, and asks when there is a pod; the health stream is one
/// answer, for days.
const LIMITS: Limits = Limits { silence: None, answer: None, idle: None };
/// Kubelet connects to the registrar for each of its two calls.
const REGISTRAR_LIMITS: Limits =
    Limits { silence: SILENCE, answer: Some(Duration::from_secs(30)), idle: None };

/// Where and as what to serve.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name, which is its pool's.
    pub node: String,
    /// Kubelet's plugin registry, `/var/lib/kubelet/plugins_registry` by default.
    pub registry: PathBuf,
    /// The driver's own directory, `/var/lib/kubelet/plugins/gpu.tessera.dev` by default; made if it is missing.
    /// Kubelet must see it at the same path.
    pub dir: PathBuf,
    /// The UID of the pod that the driver runs in: allows two instances side by side.
    pub pod_uid: Option<String>,
    /// When shares of claims that are gone are released.
    pub sweeping: Sweeping,
    /// Intervals.
    pub timing: Timing,
}

/// Intervals of the server.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two messages of the health services without a change; kubelet forgets after 30 s.
    pub heartbeat: Duration,
    /// How often it is seen to that the sockets are still there, and how long to wait after a failure.
    pub look: Duration,
    /// How long open calls may take at the end.
    pub drain: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            heartbeat: Duration::from_secs(10),
            look: Duration::from_secs(5),
            drain: Duration::from_secs(5),
        }
    }
}

/// Kubelet does not take the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet refuses the DRA driver: {0}; see kubelet's log for what it wants")]
pub struct Rejected(pub String);

/// A driver that is being served.
#[derive(Debug)]
pub struct Serving {
    registration: watch::Receiver<Registration>,
    preparer: Preparer,
    task: JoinHandle<Result<(), Rejected>>,
    paths: Paths,
}

impl Serving {
    /// How it stands with kubelet.
    pub fn registration(&self) -> watch::Receiver<Registration> {
        self.registration.clone()
    }

    /// What prepares claims.
    pub fn preparer(&self) -> &Preparer {
        &self.preparer
    }

    /// Where it serves: the registrar, and the driver itself.
    pub fn sockets(&self) -> [&Path; 2] {
        [&self.paths.registrar, &self.paths.dra]
    }

    /// Waits for the end: the shutdown future is done, and the sockets are removed.
    ///
    /// # Errors
    /// [`Rejected`]: kubelet said that it does not take the driver. The process should end, so that this is seen.
    pub async fn finished(self) -> Result<(), Rejected> {
        // The task can only be cancelled by the runtime's own end, and a panic has been reported.
        self.task.await.unwrap_or(Ok(()))
    }
}

/// Serves the driver to kubelet until `shutdown` is done. The DRA socket listens before the registrar does. Call it
/// when all that claims hold is whole again: kubelet may ask at once.
///
/// # Errors
/// [`SocketError`] if the sockets cannot be made; its message says what to do.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn serve(
    settings: Settings,
    agent: Arc<Agent>,
    api: ResourceClient,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<Serving, SocketError> {
    let paths = Paths::new(&settings.registry, &settings.dir, settings.pod_uid.as_deref())?;
    paths.prepare()?;
    let preparer = Preparer::new(Arc::clone(&agent), api, &settings.node, &settings.dir);
    let (standing, registration) = watch::channel(Registration::default());
    let driver =
        Driver { settings, agent, preparer: preparer.clone(), paths: paths.clone(), standing };
    let first = driver.listen()?;
    let task = tokio::spawn(driver.run(first, shutdown));
    Ok(Serving { registration, preparer, task, paths })
}

struct Driver {
    settings: Settings,
    agent: Arc<Agent>,
    preparer: Preparer,
    paths: Paths,
    standing: watch::Sender<Registration>,
}

/// Both sockets and their servers.
struct Servers {
    registrar: Server,
    dra: Server,
}

struct Server {
    socket: Socket,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Why the servers are to begin again.
enum Turn {
    End,
    Rejected(Rejected),
    Lost,
}

impl Driver {
    /// The DRA socket first: as soon as the registrar is there, kubelet may ask.
    fn listen(&self) -> Result<Servers, SocketError> {
        let (socket, listener) = Socket::listen(&self.paths.dra)?;
        let (stop, stopped) = watch::channel(false);
        let Settings { node, timing, .. } = &self.settings;
        let agent = Arc::clone(&self.agent);
        let health = Health::new(agent, node, timing.heartbeat, stopped.clone());
        let task = tokio::spawn(
            tonic::transport::Server::builder()
                .max_concurrent_streams(MAX_STREAMS)
                .serve_with_incoming_shutdown(
                    Routes::new(self.preparer.clone(), health),
                    incoming(listener, LIMITS),
                    ended(stopped),
                ),
        );
        let dra = Server { socket, stop, task };

        let (socket, listener) = Socket::listen(&self.paths.registrar)?;
        let (stop, stopped) = watch::channel(false);
        let endpoint = self.paths.dra.display().to_string();
        let service = registrar::Service::new(endpoint, self.standing.clone());
        let task = tokio::spawn(
            tonic::transport::Server::builder()
                .max_concurrent_streams(MAX_STREAMS)
                .serve_with_incoming_shutdown(
                    RegistrationServer::new(service),
                    incoming(listener, REGISTRAR_LIMITS),
                    ended(stopped),
                ),
        );
        Ok(Servers { registrar: Server { socket, stop, task }, dra })
    }

    async fn run(
        self,
        first: Servers,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), Rejected> {
        info!(
            registrar = %self.paths.registrar.display(),
            dra = %self.paths.dra.display(),
            "serving DRA; waiting for kubelet to register it"
        );
        let sweep = self.preparer.sweep_orphans(self.settings.sweeping);
        let mut sweep = std::pin::pin!(sweep);
        let mut shutdown = std::pin::pin!(shutdown);
        let mut servers = Some(first);
        loop {
            let turn = tokio::select! {
                () = &mut shutdown => Turn::End,
                turn = self.watch(servers.as_mut()) => turn,
                () = &mut sweep => Turn::End,
            };
            if let Some(servers) = servers.take() {
                servers.end(self.settings.timing.drain).await;
            }
            match turn {
                Turn::End => return Ok(()),
                Turn::Rejected(rejected) => return Err(rejected),
                Turn::Lost => match self.listen() {
                    Ok(again) => servers = Some(again),
                    Err(error) => {
                        warn!("cannot serve DRA again yet: {error}");
                        self.standing.send_modify(|standing| standing.failed(&error.to_string()));
                    }
                },
            }
        }
    }

    /// Waits until kubelet refuses the driver or the servers have to begin again.
    async fn watch(&self, servers: Option<&mut Servers>) -> Turn {
        let mut standing = self.standing.subscribe();
        let rejected = async {
            let waited = standing.wait_for(|standing| standing.rejected.is_some()).await;
            // The sender lives as long as self.
            waited.ok().and_then(|standing| standing.rejected.clone()).unwrap_or_default()
        };
        let lost = async {
            let Some(servers) = servers else {
                return tokio::time::sleep(self.settings.timing.look).await;
            };
            let Servers { registrar, dra } = servers;
            let gone = async {
                while !registrar.socket.is_gone() && !dra.socket.is_gone() {
                    tokio::time::sleep(self.settings.timing.look).await;
                }
                "a socket was removed"
            };
            let what = tokio::select! {
                what = gone => what,
                _ = &mut registrar.task => "the registrar's server ended",
                _ = &mut dra.task => "the server ended",
            };
            warn!("{what}; serving DRA on new sockets");
        };
        tokio::select! {
            why = rejected => Turn::Rejected(Rejected(why)),
            () = lost => Turn::Lost,
        }
    }
}

impl Servers {
    /// The registrar first: kubelet sends nothing new from then on. Then open calls, then the streams.
    async fn end(self, drain: Duration) {
        self.registrar.end(drain).await;
        self.dra.end(drain).await;
    }
}

impl Server {
    async fn end(self, drain: Duration) {
        let Server { socket, stop, mut task } = self;
        drop(socket);
        stop.send_replace(true);
        if task.is_finished() {
            return;
        }
        if tokio::time::timeout(drain, &mut task).await.is_err() {
            warn!("calls of kubelet's did not end in time; leaving them");
            task.abort();
        }
    }
}

async fn ended(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
