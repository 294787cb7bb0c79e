//! The plugin in the test's own process, as `tessera serve` builds it, beside the fake kubelet.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_api::admin::StatusView;
use tessera_api::view::NodeSource;
use tessera_config::{Config, ConfigFile};
use tessera_daemon::{self as app, App, StartOptions, Timing};
use tessera_fake_kubelet::{Container, Kubelet, Pod};
use tessera_gpu::Discovery;
use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse, PreStartContainerRequest,
};
use tessera_model::allocation_id::AllocationId;
use tessera_view::status::{Allocation, Status};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use super::{FakeGpus, GPU, bounded, gpu, until_async};
use crate::own_paths;

struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<anyhow::Result<()>>,
    sources: Arc<StatusView>,
    api: NodeSource,
}

/// One node. Two GPUs of 40 GiB, four replicas of 8 GiB each, unless the test says otherwise.
pub struct TestNode {
    /// What it writes is below this.
    pub dir: tempfile::TempDir,
    pub kubelet: Kubelet,
    pub gpus: Arc<FakeGpus>,
    /// The configuration but for paths and metrics, which are the node's.
    pub settings: String,
    pub events: tessera_agent::kubernetes::Timing,
    running: Option<Running>,
}

/// What a pod that runs has: replicas, and their pages.
pub struct Held {
    pub ids: Vec<String>,
    pub pages: PathBuf,
}

/// Four replicas of 8 GiB of each GPU.
pub const SETTINGS: &str = "[share]\nreplicas = 4\nmemory = \"8Gi\"\n";

impl TestNode {
    /// With the plugin registered.
    pub async fn start() -> Self {
        Self::start_with(SETTINGS).await
    }

    pub async fn start_with(settings: &str) -> Self {
        let mut node = Self::without_plugin(settings).await;
        node.start_plugin().await;
        node
    }

    /// A node on which no plugin runs yet.
    pub async fn without_plugin(settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await.unwrap();
        std::fs::write(dir.path().join("libtessera.so"), b"\x7fELF, for all it matters").unwrap();
        let gpus = Arc::new(FakeGpus::default());
        *gpus.gpus.lock().unwrap() = vec![gpu(0), gpu(1)];
        Self {
            dir,
            kubelet,
            gpus,
            settings: settings.to_owned(),
            events: Default::default(),
            running: None,
        }
    }

    /// The plugin's configuration.
    pub fn config_text(&self) -> String {
        let dir = self.dir.path();
        let paths = own_paths(
            dir,
            &[
                ("kubelet", self.kubelet.device_plugins_dir()),
                ("pod_resources", self.kubelet.pod_resources_socket()),
                ("shim_source", &dir.join("libtessera.so")),
                ("ledger", &self.ledger()),
            ],
        );
        format!("{}\n{paths}{}", self.settings, unlisted(&self.settings))
    }

    /// What the plugin as a whole says when it cannot start.
    pub fn try_app(&self) -> anyhow::Result<App> {
        let config = Config::parse(&self.config_text())?;
        app::start(config, Arc::clone(&self.gpus) as Arc<dyn Discovery>, self.timing())
    }

    fn timing(&self) -> Timing {
        Timing {
            reconcile: Duration::from_millis(50),
            release_grace: (!self.settings.contains("release_after"))
                .then_some(Duration::from_millis(300)),
            config_debounce: Duration::from_millis(20),
            shim_grace: Duration::from_millis(200),
            discovery: Duration::from_millis(20),
            foreign_plugins: Duration::from_millis(50),
            foreign_plugins_grace: Duration::from_millis(300),
            heartbeat: Duration::from_millis(50),
            kubelet: tessera_kubelet::Timing {
                debounce: Duration::from_millis(1),
                min_backoff: Duration::from_millis(10),
                ..Default::default()
            },
            events: self.events.clone(),
            history_look: Duration::from_millis(100),
            history_store: Duration::from_millis(500),
        }
    }

    /// Starts the plugin and waits for nothing.
    pub fn launch_plugin(&mut self) {
        let app = self.try_app().unwrap();
        self.keep(app);
    }

    /// With a file that it reads again when that changes; where that is bad, with the last good one.
    pub fn launch_plugin_on(&mut self, file: &Path) {
        let file = ConfigFile { asked: Some(file.to_owned()) };
        let given = file.start().unwrap();
        let beginning =
            StartOptions { file: Some(file), given, set_filter: None, node_config: None };
        let gpus = Arc::clone(&self.gpus) as Arc<dyn Discovery>;
        let app = app::start_with(beginning, gpus, self.timing()).unwrap();
        self.keep(app);
    }

    fn keep(&mut self, app: App) {
        let (sources, api) = (Arc::clone(&app.view), app.source().clone());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(app.run_until(async {
            let _ = stopped.await;
        }));
        self.running = Some(Running { stop, task, sources, api });
    }

    /// Starts the plugin and waits until kubelet knows its replicas.
    pub async fn start_plugin(&mut self) {
        self.launch_plugin();
        bounded(self.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) > 0)).await;
    }

    /// Asks the plugin to end, and waits until it has.
    pub async fn stop_plugin(&mut self) {
        let Running { stop, task, sources, api } = self.running.take().unwrap();
        drop((sources, api));
        let _ = stop.send(());
        bounded(task).await.unwrap().unwrap();
    }

    /// The node's state itself.
    pub fn agent(&self) -> Arc<tessera_agent::Agent> {
        Arc::clone(self.running.as_ref().unwrap().sources.agent.get().unwrap())
    }

    /// What the plugin says about itself.
    pub fn sources(&self) -> &StatusView {
        &self.running.as_ref().unwrap().sources
    }

    /// What the JSON API shows, in full.
    pub fn source(&self) -> NodeSource {
        self.running.as_ref().unwrap().api.clone()
    }

    /// What `tessera status` gets.
    pub async fn status(&self) -> Status {
        let sources = Arc::clone(&self.running.as_ref().unwrap().sources);
        tokio::task::spawn_blocking(move || sources.status()).await.unwrap()
    }

    /// Waits until the status has something to say.
    pub async fn status_until<T>(&self, mut look: impl FnMut(&Status) -> Option<T>) -> T {
        until_async(async || look(&self.status().await)).await
    }

    /// Runs a pod of one container with so many replicas.
    pub async fn start_pod(&self, name: &str, replicas: usize) -> Held {
        let admitted = bounded(self.kubelet.run(&pod(name, replicas))).await.unwrap().remove(0);
        Held { pages: self.pages(&admitted.device_ids), ids: admitted.device_ids }
    }

    /// Waits until a warning says this; gives it.
    pub async fn warned(&self, says: &str) -> String {
        self.status_until(|status| status.warnings.iter().find(|w| w.contains(says)).cloned()).await
    }

    /// Waits until there is no warning.
    pub async fn unwarned(&self) {
        self.status_until(|status| status.warnings.is_empty().then_some(())).await;
    }

    /// Waits until kubelet has said whose each allocation is.
    pub async fn all_named(&self) {
        self.status_until(|s| s.allocations.iter().all(|a| a.holder.is_some()).then_some(())).await;
    }

    /// The allocation of these replicas, once this holds of it.
    pub async fn allocation_until(
        &self,
        ids: &[String],
        holds: impl Fn(&Allocation) -> bool,
    ) -> Allocation {
        let id = id_of(ids).to_string();
        let found = |status: &Status| {
            status.allocations.iter().find(|one| one.id == id && holds(one)).cloned()
        };
        self.status_until(found).await
    }

    /// The allocation of these replicas, as the status has it.
    pub async fn allocation(&self, ids: &[String]) -> Option<Allocation> {
        let id = id_of(ids).to_string();
        self.status().await.allocations.into_iter().find(|allocation| allocation.id == id)
    }

    /// The pages of these replicas on the host.
    pub fn pages(&self, ids: &[String]) -> PathBuf {
        self.dir.path().join("pages").join(id_of(ids).as_str())
    }

    /// The ledger's file.
    pub fn ledger(&self) -> PathBuf {
        self.dir.path().join("state/ledger.redb")
    }

    /// A client of the plugin itself, for requests that no kubelet sends.
    pub async fn client(&self) -> DevicePluginClient<Channel> {
        self.client_of(GPU).await
    }

    /// As [`TestNode::client`], for any resource.
    pub async fn client_of(&self, resource: &str) -> DevicePluginClient<Channel> {
        let endpoint = self.kubelet.endpoint(resource).unwrap();
        let socket = self.kubelet.device_plugins_dir().join(endpoint);
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        DevicePluginClient::new(endpoint.connect().await.unwrap())
    }

    /// Allocates these replicas to one container, as a kubelet would.
    pub async fn allocate(
        &self,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, tonic::Status> {
        let request = ContainerAllocateRequest { device_ids: ids.to_vec() };
        let request = AllocateRequest { container_requests: vec![request] };
        let answer = self.client().await.allocate(request).await?;
        Ok(answer.into_inner().container_responses.remove(0))
    }

    /// Announces the start of the container of these replicas.
    pub async fn pre_start(&self, ids: &[String]) -> Result<(), tonic::Status> {
        let request = PreStartContainerRequest { device_ids: ids.to_vec() };
        self.client().await.pre_start_container(request).await.map(drop)
    }
}

/// Settings of a node whose tests ask for allocations that no pod holds, beside pods: they stay, however long a busy
/// machine takes.
pub const HELD: &str = "[ledger]\nrelease_after = \"1h\"\n";

pub fn id_of(ids: &[String]) -> AllocationId {
    AllocationId::of(GPU, ids.iter().map(String::as_str))
}

/// A pod of one container that asks for so many replicas.
pub fn pod(name: &str, replicas: usize) -> Pod {
    Pod::new("default", name).with(Container::new("main").asking(GPU, replicas))
}

/// What these settings leave out of where a plugin listens: there are many at once, each with ports of its own, or none.
pub(super) fn unlisted(settings: &str) -> String {
    let sections = ["metrics", "api"].into_iter();
    let absent = sections.filter(|section| !settings.contains(&format!("[{section}]")));
    absent.map(|section| format!("[{section}]\nlisten = \"\"\n")).collect()
}
