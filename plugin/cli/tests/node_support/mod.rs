//! What the tests of the whole plugin share: a node with GPUs that a test can break, a stand-in
//! kubelet, the plugin as `tessera serve` builds it, and tenants.
#![allow(dead_code, reason = "each test binary uses its own part")]

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, send, socket};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tessera_api::admin::StatusView;
use tessera_config::{Config, ConfigFile};
use tessera_daemon::{self as app, App, Beginning, Timing};
use tessera_fake_kubelet::{Container, Kubelet, Pod};
use tessera_gpu::health::Observation;
use tessera_gpu::{self as device, Discovery, DiscoveryError, GpuProcess};
use tessera_kubelet_api::admin::{Allocation, StatusResponse};
use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse, PreStartContainerRequest,
};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;
use tessera_region::account::Account;
use tessera_region::layout::Kind;
use tessera_region::quota::QuotaReader;
use tessera_region::usage::UsageMap;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

/// The resource of the tests.
pub const GPU: &str = "tessera.dev/gpu";
/// One GiB.
pub const GIB: u64 = 1 << 30;

/// What takes longer hangs, however busy the machine is.
pub const HANGS: Duration = Duration::from_secs(180);

/// Fails the test if `future` hangs.
pub async fn bounded<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(HANGS, future).await.expect("it hangs")
}

/// Looks again and again until `look` finds something.
pub async fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    bounded(async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// GPUs that a test can take away or make sick.
#[derive(Debug, Default)]
pub struct FakeGpus {
    pub gpus: Mutex<Vec<Gpu>>,
    /// What the driver says of processes, by GPU.
    pub processes: Mutex<BTreeMap<String, Vec<GpuProcess>>>,
    /// Its version, if it tells.
    pub driver: Mutex<Option<String>>,
    /// How often it was asked.
    pub looks: AtomicU64,
    /// While it is set, the driver does not say how much memory is in use.
    pub hangs: AtomicBool,
    observations: Mutex<VecDeque<Observation>>,
    news: Condvar,
}

impl FakeGpus {
    pub fn report(&self, observation: Observation) {
        self.observations.lock().unwrap().push_back(observation);
        self.news.notify_all();
    }
}

impl Discovery for FakeGpus {
    fn gpus(&self, wanted: &tessera_config::Gpus) -> Result<Vec<Gpu>, DiscoveryError> {
        let mut gpus = self.gpus.lock().unwrap().clone();
        gpus.retain(|gpu| device::selected(gpu, &wanted.include, &wanted.exclude));
        if gpus.is_empty() { Err(DiscoveryError::None { found: 0 }) } else { Ok(gpus) }
    }

    fn memory_used(&self, _uuid: &str) -> Result<u64, String> {
        while self.hangs.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(0)
    }

    fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, String> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        Ok(self.processes.lock().unwrap().get(uuid).cloned().unwrap_or_default())
    }

    fn facts(&self, _gpus: &[Gpu]) -> device::Facts {
        let driver_version = self.driver.lock().unwrap().clone();
        device::Facts { driver_version, ..Default::default() }
    }

    fn watch(
        &self,
        _gpus: &[Gpu],
        _probe: Duration,
        stop: &(dyn Fn() -> bool + Sync),
        sink: &(dyn Fn(Observation) + Sync),
    ) -> Result<(), String> {
        let mut waiting = self.observations.lock().unwrap();
        while !stop() {
            while let Some(observation) = waiting.pop_front() {
                sink(observation);
            }
            let wait = Duration::from_millis(20);
            waiting = self.news.wait_timeout(waiting, wait).unwrap().0;
        }
        Ok(())
    }
}

pub fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index:08}-0000-0000-0000-000000000000"),
        index,
        minor: index,
        name: "Example".into(),
        pci_bus_id: format!("00000000:{index:02x}:00.0"),
        numa_node: None,
        memory_bytes: 40 * GIB,
        context_bytes: None,
        context_measured_bytes: None,
        mig: None,
    }
}

pub fn replica(gpu_index: u32, n: u32) -> String {
    format!("{}::{n}", gpu(gpu_index).uuid)
}

struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<anyhow::Result<()>>,
    sources: Arc<StatusView>,
}

/// One node. Two GPUs of 40 GiB, four replicas of 8 GiB each, unless the test says otherwise.
pub struct TestNode {
    pub dir: tempfile::TempDir,
    pub kubelet: Kubelet,
    pub gpus: Arc<FakeGpus>,
    pub settings: String,
    /// Where events go.
    pub events: tessera_agent::kubernetes::Timing,
    running: Option<Running>,
}

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

    pub fn config_text(&self) -> String {
        let at = |name: &str| self.dir.path().join(name).display().to_string();
        // Many plugins at once: each with a port of its own, or none.
        let metrics = match self.settings.contains("[metrics]") {
            true => "",
            false => "[metrics]\nlisten = \"\"\n",
        };
        format!(
            "{}\n[paths]\ncontainer_logs = \"{}\"\nkubelet = \"{}\"\npod_resources = \"{}\"\npages = \"{}\"\n\
             shim = \"{}\"\nshim_source = \"{}\"\nledger = \"{}\"\nadmin = \"{}\"\n\
             [pages]\ntmpfs = \"off\"\n{metrics}",
            self.settings,
            at("logs"),
            self.kubelet.device_plugins_dir().display(),
            self.kubelet.pod_resources_socket().display(),
            at("pages"),
            at("shim"),
            at("libtessera.so"),
            at("state/ledger.redb"),
            at("admin.sock"),
        )
    }

    /// What the plugin as a whole says when it cannot start.
    pub fn try_app(&self) -> anyhow::Result<App> {
        self.try_app_with(&self.config_text())
    }

    fn try_app_with(&self, config: &str) -> anyhow::Result<App> {
        self.app_of(Config::parse(config)?)
    }

    fn app_of(&self, config: Config) -> anyhow::Result<App> {
        app::start(config, Arc::clone(&self.gpus) as Arc<dyn Discovery>, self.timing())
    }

    fn timing(&self) -> Timing {
        Timing {
            reconcile: Duration::from_millis(50),
            release_grace: Some(Duration::from_millis(300)),
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
        }
    }

    pub fn launch_plugin(&mut self) {
        self.launch_plugin_with(&self.config_text());
    }

    /// With another configuration than [`TestNode::config_text`].
    pub fn launch_plugin_with(&mut self, config: &str) {
        let app = self.try_app_with(config).unwrap();
        self.keep(app);
    }

    /// With a file that it reads again when that changes; where that is bad, with the last good one.
    pub fn launch_plugin_on(&mut self, file: &Path) {
        let file = ConfigFile { asked: Some(file.to_owned()) };
        let given = file.start().unwrap();
        let beginning = Beginning { file: Some(file), given, set_filter: None };
        let gpus = Arc::clone(&self.gpus) as Arc<dyn Discovery>;
        let app = app::start_with(beginning, gpus, self.timing()).unwrap();
        self.keep(app);
    }

    fn keep(&mut self, app: App) {
        let sources = Arc::clone(app.view());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(app.run_until(async {
            let _ = stopped.await;
        }));
        self.running = Some(Running { stop, task, sources });
    }

    pub async fn start_plugin(&mut self) {
        self.launch_plugin();
        bounded(self.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) > 0)).await;
    }

    pub async fn stop_plugin(&mut self) {
        let Running { stop, task, sources } = self.running.take().unwrap();
        drop(sources);
        let _ = stop.send(());
        bounded(task).await.unwrap().unwrap();
    }

    /// The plugin's end, which the test expects by itself.
    pub async fn plugin_ended(&mut self) -> anyhow::Error {
        bounded(self.running.take().unwrap().task).await.unwrap().unwrap_err()
    }

    /// The node's state itself.
    pub fn agent(&self) -> Arc<tessera_agent::Agent> {
        Arc::clone(self.running.as_ref().unwrap().sources.agent().unwrap())
    }

    /// What the plugin tells of itself.
    pub fn sources(&self) -> &StatusView {
        &self.running.as_ref().unwrap().sources
    }

    pub async fn status(&self) -> StatusResponse {
        let sources = Arc::clone(&self.running.as_ref().unwrap().sources);
        tokio::task::spawn_blocking(move || sources.status()).await.unwrap()
    }

    /// Waits until the status has something to say.
    pub async fn status_until<T>(&self, mut look: impl FnMut(&StatusResponse) -> Option<T>) -> T {
        bounded(async {
            loop {
                if let Some(found) = look(&self.status().await) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    pub async fn allocation(&self, ids: &[String]) -> Option<Allocation> {
        let id = id_of(ids).to_string();
        self.status().await.allocations.into_iter().find(|allocation| allocation.id == id)
    }

    /// The pages of these replicas on the host.
    pub fn pages(&self, ids: &[String]) -> PathBuf {
        self.dir.path().join("pages").join(id_of(ids).as_str())
    }

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

    pub async fn allocate(
        &self,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, tonic::Status> {
        let request = ContainerAllocateRequest { device_ids: ids.to_vec() };
        let request = AllocateRequest { container_requests: vec![request] };
        let answer = self.client().await.allocate(request).await?;
        Ok(answer.into_inner().container_responses.remove(0))
    }

    pub async fn pre_start(&self, ids: &[String]) -> Result<(), tonic::Status> {
        let request = PreStartContainerRequest { device_ids: ids.to_vec() };
        self.client().await.pre_start_container(request).await.map(drop)
    }
}

pub fn id_of(ids: &[String]) -> AllocationId {
    AllocationId::of(GPU, ids.iter().map(String::as_str))
}

pub fn pod(name: &str, replicas: usize) -> Pod {
    Pod::new("default", name).with(Container::new("main").asking(GPU, replicas))
}

/// A process that holds memory of an allocation, as the shim does, without any driver.
pub struct Tenant {
    child: Child,
}

/// Set for the child that is a tenant: the pages and the bytes to hold.
const TENANT_DIR: &str = "TESSERA_TEST_TENANT_DIR";
const TENANT_BYTES: &str = "TESSERA_TEST_TENANT_BYTES";
/// Set where they are a context's constant.
const TENANT_CONTEXT: &str = "TESSERA_TEST_TENANT_CONTEXT";

impl Tenant {
    /// Starts one and waits until it holds `bytes` on the first GPU and has said hello.
    pub fn hold(pages: &Path, bytes: u64) -> Self {
        Self::start(pages, bytes, &[])
    }

    /// As [`Tenant::hold`], one that has made a context and nothing else.
    pub fn with_context(pages: &Path) -> Self {
        let constant = QuotaReader::attach(pages).unwrap().context_overhead(0);
        Self::start(pages, constant, &[(TENANT_CONTEXT, "1")])
    }

    fn start(pages: &Path, bytes: u64, envs: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .envs(envs.iter().copied())
            .args(["--exact", "tenant_process", "--nocapture", "--test-threads=1"])
            .env(TENANT_DIR, pages)
            .env(TENANT_BYTES, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.any(|line| line.unwrap().ends_with("tenant holds"));
        assert!(ready, "the tenant ended early");
        Self { child }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of the test `tenant_process`, which every test binary that uses [`Tenant`] has: nothing
/// in an ordinary run, a tenant in the child.
pub fn tenant_process() {
    let Some(dir) = std::env::var_os(TENANT_DIR).map(PathBuf::from) else { return };
    let bytes: u64 = std::env::var(TENANT_BYTES).unwrap().parse().unwrap();
    let quota = QuotaReader::attach(&dir).unwrap();
    let generation = quota.generation();
    let usage = UsageMap::attach(&dir).unwrap();
    let slot = usage.claim().unwrap();
    let account = Account::new(quota, usage, slot);
    let reservation = account.reserve(0, bytes).expect("within the quota");
    let kind = match std::env::var_os(TENANT_CONTEXT) {
        Some(_) => Kind::Overhead,
        None => Kind::Plain,
    };
    reservation.commit(bytes, kind).unwrap();
    let session = connect(&dir);
    let slot = u32::try_from(account.slot_index()).unwrap();
    let hello =
        tessera_region::session::Message::Hello { slot, pid: std::process::id(), generation };
    send(session.as_raw_fd(), &hello.encode(), MsgFlags::empty()).unwrap();
    println!("tenant holds");
    std::io::stdout().flush().unwrap();
    // Until it is killed, or the test that started it is gone.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// A session socket, connected.
pub fn connect(dir: &Path) -> std::os::fd::OwnedFd {
    let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
    let socket = socket(AddressFamily::Unix, kind, flags, None).unwrap();
    let address = UnixAddr::new(&dir.join("session.sock")).unwrap();
    nix::sys::socket::connect(socket.as_raw_fd(), &address).unwrap();
    socket
}

/// The limit of the first GPU as a tenant reads it.
pub fn limit(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().memory_limit(0)
}

/// The generation as a tenant reads it.
pub fn generation(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().generation()
}
