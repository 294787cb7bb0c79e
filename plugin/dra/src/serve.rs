//! The sockets: kubelet finds the registrar in its plugin registry, learns there where the driver serves, and
//! connects.
//!
//! Two instances may serve side by side during a rolling update; the pod's UID keeps their sockets apart. An
//! instance removes its own sockets, and those of instances that are dead.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::Agent;
use tessera_cluster::resource::ResourceClient;
use tessera_kubelet::sockets::{MAX_PATH, Server, Socket, remove_stale};
use tessera_kubelet_api::dra::v1::dra_plugin_server::DraPluginServer;
use tessera_kubelet_api::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use tessera_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1;
use tessera_kubelet_api::pluginregistration::registration_server::{
    Registration as Rpcs, RegistrationServer,
};
use tessera_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tessera_model::clock::unix_ms;
use tessera_model::{printable, short_name};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tracing::{error, info, warn};

use crate::health::Health;
use crate::names;
use crate::prepare::{Preparer, Sweeping};

pub use tessera_kubelet::sockets::SocketError;

const TAKEN: &str = "another instance of the DRA driver; end it first, or give each the UID of its pod (POD_UID), so that they \
                     can run side by side";

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
    pub sweeping: Sweeping,
    pub timing: Timing,
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two messages of the health services without a change; kubelet forgets after 30 s.
    pub heartbeat: Duration,
    /// How often it is seen to that the sockets are still there, and how long to wait after a failure.
    pub look: Duration,
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

#[derive(Debug)]
pub struct Serving {
    pub registration: watch::Receiver<Registration>,
    pub preparer: Preparer,
    /// Where it serves: the registrar, and the driver itself.
    pub sockets: [PathBuf; 2],
    task: JoinHandle<()>,
}

impl Serving {
    /// Waits for the end: the shutdown future is done, and the sockets are removed.
    pub async fn finished(self) {
        // The task can only be cancelled by the runtime's own end, and a panic has been reported.
        let _ = self.task.await;
    }
}

/// Serves the driver to kubelet until `shutdown` is done. The DRA socket listens before the registrar does. Call it
/// when all that claims hold is whole again: kubelet may ask at once.
pub fn serve(
    settings: Settings,
    agent: Arc<Agent>,
    api: ResourceClient,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<Serving, SocketError> {
    let paths = Paths::new(&settings.registry, &settings.dir, settings.pod_uid.as_deref());
    paths.prepare()?;
    let preparer = Preparer::new(Arc::clone(&agent), api, &settings.node, &settings.dir);
    let (standing, registration) = watch::channel(Registration::default());
    let sockets = [paths.registrar.clone(), paths.dra.clone()];
    let driver = Driver { settings, agent, preparer: preparer.clone(), paths, standing };
    let first = driver.listen()?;
    let task = tokio::spawn(driver.run(first, shutdown));
    Ok(Serving { registration, preparer, sockets, task })
}

struct Driver {
    settings: Settings,
    agent: Arc<Agent>,
    preparer: Preparer,
    paths: Paths,
    standing: watch::Sender<Registration>,
}

struct Servers {
    registrar: Server,
    dra: Server,
}

impl Driver {
    /// The DRA socket first: as soon as the registrar is there, kubelet may ask.
    fn listen(&self) -> Result<Servers, SocketError> {
        let Settings { node, timing, .. } = &self.settings;
        let socket = Socket::listen(&self.paths.dra, TAKEN)?;
        let dra = Server::start(socket, |stop| {
            let health = Health::new(Arc::clone(&self.agent), node, timing.heartbeat, stop);
            Routes::new(DraPluginServer::new(self.preparer.clone()))
                .add_service(HealthV1::new(health.clone()))
                .add_service(HealthV1alpha1::new(health))
        });
        let socket = Socket::listen(&self.paths.registrar, TAKEN)?;
        let (endpoint, standing) = (self.paths.dra.display().to_string(), self.standing.clone());
        let registrar =
            Server::start(socket, |_| RegistrationServer::new(Registrar { endpoint, standing }));
        Ok(Servers { registrar, dra })
    }

    async fn run(self, first: Servers, shutdown: impl Future<Output = ()> + Send) {
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
            let begins_again = tokio::select! {
                () = &mut shutdown => false,
                () = &mut sweep => false,
                () = self.lost(servers.as_mut()) => true,
            };
            if let Some(servers) = servers.take() {
                servers.end(self.settings.timing.drain).await;
            }
            if !begins_again {
                return;
            }
            match self.listen() {
                Ok(again) => servers = Some(again),
                Err(error) => {
                    warn!("cannot serve DRA again yet: {error}");
                    self.standing.send_modify(|standing| {
                        standing.is_registered = false;
                        standing.last_error = Some(error.to_string());
                    });
                }
            }
        }
    }

    /// Waits until a socket or a server is gone; without servers, until it is time to try again.
    async fn lost(&self, servers: Option<&mut Servers>) {
        let Some(Servers { registrar, dra }) = servers else {
            return tokio::time::sleep(self.settings.timing.look).await;
        };
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
    }
}

impl Servers {
    /// The registrar first: kubelet sends nothing new from then on. Then open calls, then the streams.
    async fn end(self, drain: Duration) {
        self.registrar.end(drain).await;
        self.dra.end(drain).await;
    }
}

/// What is served. Kubelet 1.36 asks for health in v1alpha1.
const SERVICES: [&str; 3] = ["v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
const LONGEST: usize = 1000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    pub is_registered: bool,
    /// When it last did so, Unix milliseconds; 0 for never.
    pub registered_unix_ms: i64,
    pub registrations: u64,
    /// Why the driver is not served, or kubelet refuses it.
    pub last_error: Option<String>,
}

#[derive(Debug)]
struct Registrar {
    endpoint: String,
    standing: watch::Sender<Registration>,
}

#[tonic::async_trait]
impl Rpcs for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: names::DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.standing.send_modify(|standing| {
            if plugin_registered {
                standing.is_registered = true;
                standing.registered_unix_ms = unix_ms();
                standing.registrations += 1;
                standing.last_error = None;
            } else {
                let why = if error.is_empty() { "it gives no reason" } else { error.as_str() };
                let why = printable::brief(why, LONGEST);
                standing.is_registered = false;
                standing.last_error = Some(format!("kubelet refuses it: {why}"));
            }
        });
        if plugin_registered {
            info!(driver = names::DRIVER, "kubelet has registered the DRA driver");
        } else {
            error!(driver = names::DRIVER, "kubelet refuses the DRA driver: {error}");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Paths {
    registrar: PathBuf,
    dra: PathBuf,
}

impl Paths {
    /// Of the instance in the pod of this UID; of the only one, where it is not known.
    fn new(registry: &Path, dir: &Path, pod_uid: Option<&str>) -> Self {
        let driver = names::DRIVER;
        let pod_uid = pod_uid.filter(|uid| !uid.is_empty());
        let Some(uid) = pod_uid else {
            return Paths {
                registrar: registry.join(format!("{driver}-reg.sock")),
                dra: dir.join("dra.sock"),
            };
        };
        let plain = uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let named = |make: &dyn Fn(&str) -> PathBuf| {
            let path = make(uid);
            if plain && path.as_os_str().len() <= MAX_PATH {
                path
            } else {
                make(&short_name::with_hash("", 0, uid))
            }
        };
        Paths {
            registrar: named(&|uid| registry.join(format!("{driver}-{uid}-reg.sock"))),
            dra: named(&|uid| dir.join(format!("dra-{uid}.sock"))),
        }
    }

    /// Makes the driver's directory, and removes what dead instances left.
    fn prepare(&self) -> Result<(), SocketError> {
        let (Some(registry), Some(dir)) = (self.registrar.parent(), self.dra.parent()) else {
            return Err(SocketError(format!("{}: no path of a socket", self.registrar.display())));
        };
        if !registry.is_dir() {
            return Err(SocketError(format!(
                "kubelet's plugin registry {} does not exist: is kubelet's root directory another one (--root-dir), or is \
                 the directory not mounted into this container?",
                registry.display()
            )));
        }
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
        made.map_err(|error| {
            SocketError(format!(
                "cannot make the DRA driver's directory {}: {error}",
                dir.display()
            ))
        })?;
        remove_stale(registry, |name| {
            name.starts_with(names::DRIVER) && name.ends_with("-reg.sock")
        });
        remove_stale(dir, |name| name.starts_with("dra") && name.ends_with(".sock"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(registry: &str, dir: &str, uid: Option<&str>) -> [String; 2] {
        let Paths { registrar, dra } = Paths::new(Path::new(registry), Path::new(dir), uid);
        [registrar, dra].map(|path| path.display().to_string())
    }

    #[test]
    fn instances_have_sockets_of_their_own_where_their_pods_are_known() {
        let (registry, dir) = ("/k/plugins_registry", "/k/plugins/gpu.tessera.dev");
        assert_eq!(
            paths(registry, dir, None),
            ["/k/plugins_registry/gpu.tessera.dev-reg.sock", "/k/plugins/gpu.tessera.dev/dra.sock"]
        );
        assert_eq!(paths(registry, dir, Some("")), paths(registry, dir, None));
        let uid = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
        let [registrar, dra] = paths(registry, dir, Some(uid));
        assert_eq!(registrar, format!("/k/plugins_registry/gpu.tessera.dev-{uid}-reg.sock"));
        assert_eq!(dra, format!("/k/plugins/gpu.tessera.dev/dra-{uid}.sock"));
    }

    #[test]
    fn names_that_would_be_too_long_are_hashed() {
        let uid = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
        let registry = format!("/{}", "r".repeat(60));
        let [one, _] = paths(&registry, "/d", Some(uid));
        let [other, _] = paths(&registry, "/d", Some("another-uid-of-the-same-length-as-that"));
        assert!(one.len() <= MAX_PATH && other.len() <= MAX_PATH && one != other, "{one} {other}");
        assert!(one.ends_with("-reg.sock") && one.contains("gpu.tessera.dev-"));
        // No UID is a path.
        let [escaped, _] = paths("/r", "/d", Some("../x"));
        assert!(!escaped.contains(".."), "{escaped}");
    }

    #[test]
    fn a_registry_that_is_missing_says_what_to_look_for() {
        let base = tempfile::tempdir().unwrap();
        let paths = Paths::new(&base.path().join("none"), base.path(), None);
        let error = paths.prepare().unwrap_err().to_string();
        assert!(error.contains("--root-dir"), "{error}");
    }
}
