//! A node with two simulated GPUs of 8 GiB, kubelet, an API server, and plugins that come and go.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::Kubelet;
pub use tessera_fake_kubelet::dra::AllocatedClaim as Claim;
use tessera_fake_kubelet::dra::{ClaimName, DraError, DraKubelet, PreparedDevice, run_options};
use tessera_harness::plugin::{bounded, until};
use tessera_harness::{
    Conversation, Owned, Preloaded, SimGpu, artefacts, can_contain, compile_c, external, own_paths,
};

/// Two GPUs of which 7,936 MiB are sold: 700 are the driver's, an H200's, and 128 the margin.
const MACHINE: &str = r#"
[memory]
context_overhead = "64MiB"

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000000"
memory = "8764MiB"

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000001"
memory = "8764MiB"
"#;

/// In slices and claims.
const DRIVER: &str = "gpu.tessera.dev";
/// The node's name, and its pool's.
pub const NODE: &str = "n1";
/// What a tenant's context is charged.
pub const CONTEXT: u64 = 64 << 20;
/// Where a container has its shares' pages.
const PAGES: &str = "/usr/local/tessera/pages";

/// A claim of this name and UID without a request.
pub fn claim(name: &str) -> Claim {
    let uid = format!("uid-of-{name}");
    Claim::new(ClaimName { namespace: "team".into(), name: name.into(), uid }, DRIVER, NODE)
}

/// A claim of this name with one request, `gpu`.
pub fn one(name: &str, device: &str, memory: &str, cores: &str) -> Claim {
    claim(name).asking("gpu", device, memory, cores)
}

/// The machine, kubelet and the API server.
pub struct Node {
    pub sim: SimGpu,
    pub kubelet: Kubelet,
    pub dra: DraKubelet,
    pub api: ApiServer,
    pub plugin: Option<Plugin>,
    dir: TempDir,
    plugins: usize,
}

impl Node {
    /// With a plugin that sells all GPUs by DRA.
    pub async fn start() -> Self {
        Self::start_with("[dra]\nenabled = true\n").await
    }

    /// The same, where containers can be made; where not, the test says so.
    pub async fn with_containers() -> Option<Self> {
        if let Err(reason) = can_contain() {
            external::skip(std::thread::current().name().unwrap_or_default(), &reason);
            return None;
        }
        Some(Self::start().await)
    }

    /// With a plugin of these settings, which publishes a device.
    pub async fn start_with(settings: &str) -> Self {
        let (sim, dir) = (SimGpu::start(MACHINE), tempfile::tempdir().unwrap());
        let root = dir.path().join("kubelet");
        let kubelet = Kubelet::start(&root).await.unwrap();
        // A kubelet that lists no pods at all has just started, and is not believed.
        kubelet.run_other("tessera", "plugin");
        let dra = DraKubelet::start(&root, DRIVER).unwrap();
        let api = ApiServer::start(dir.path());
        fs::write(dir.path().join("kubeconfig"), api.kubeconfig()).unwrap();
        let mut node = Self { sim, kubelet, dra, api, plugin: None, dir, plugins: 0 };
        node.configure(settings);
        node.serve().await;
        node
    }

    /// Writes the configuration's file.
    pub fn configure(&self, settings: &str) {
        let paths = own_paths(
            self.dir.path(),
            &[
                ("kubelet", self.kubelet.device_plugins_dir()),
                ("pod_resources", self.kubelet.pod_resources_socket()),
                ("plugins_registry", self.dra.registry()),
                ("shim_source", &artefacts().shim()),
                ("nvml", &artefacts().libnvml()),
            ],
        );
        let text = format!(
            "[gpus]\nreserve = \"828Mi\"\ncontext_overhead = \"64Mi\"\n[share]\nreplicas = 4\n{settings}\n\
             [ledger]\nrelease_after = \"1s\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n[api]\nlisten = \"\"\n{paths}"
        );
        fs::write(self.dir.path().join("config.toml"), text).unwrap();
    }

    /// A command of the program with the node's configuration.
    fn command(&self) -> Command {
        let mut command = Command::new(artefacts().tessera());
        command.arg("--config").arg(self.dir.path().join("config.toml")).envs(self.sim.envs());
        command.stdin(Stdio::null());
        command
    }

    /// Starts a plugin, in a pod of its own, and waits for nothing.
    pub fn launch(&mut self) -> Plugin {
        self.plugins += 1;
        let log = self.dir.path().join(format!("log-{}", self.plugins));
        let mut command = self.command();
        command.arg("serve").stderr(fs::File::create(&log).unwrap());
        command.env("KUBECONFIG", self.dir.path().join("kubeconfig"));
        command.env("NODE_NAME", NODE).env("POD_UID", format!("pod-{}", self.plugins));
        Plugin { process: Owned(command.spawn().unwrap()), log }
    }

    /// Starts the node's plugin, and waits until kubelet has registered it and it has published.
    pub async fn serve(&mut self) {
        let before = self.dra.registrations();
        self.plugin = Some(self.launch());
        bounded(self.dra.wait_until(|kubelet| kubelet.registrations() > before)).await;
        until(|| (!self.devices().is_empty()).then_some(())).await;
    }

    /// Ends the node's plugin, unless it has ended, starts another, and waits until that knows its GPUs.
    pub async fn restart(&mut self) {
        if let Some(mut plugin) = self.plugin.take() {
            plugin.terminate();
            until(|| plugin.ended()).await;
        }
        let plugin = self.launch();
        let pid = plugin.process.id();
        self.plugin = Some(plugin);
        let knows = || {
            let Output { status, stdout, .. } = self.says(&["status", "-o", "json"]);
            let status: Value =
                status.success().then(|| serde_json::from_slice(&stdout).ok())??;
            (status["plugin"]["pid"] == pid && !status["gpus"].as_array()?.is_empty()).then_some(())
        };
        until(knows).await;
    }

    /// The configuration's file.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        drop(self.plugin.take());
    }

    /// What a command prints, and how it ends.
    pub fn says(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// What a command prints that must succeed.
    pub fn must(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.says(args);
        assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    /// What `status -o json` prints.
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.must(&["status", "-o", "json"])).unwrap()
    }

    /// The name of a GPU's device.
    pub fn device(&self, gpu: usize) -> String {
        self.sim.uuid(gpu).to_lowercase()
    }

    /// The published devices, by name.
    pub fn devices(&self) -> std::collections::BTreeMap<String, Value> {
        let of_slice =
            |slice: &Value| slice["spec"]["devices"].as_array().cloned().unwrap_or_default();
        let devices: Vec<Value> = self
            .api
            .with(|store| store.slices(Some(DRIVER), Some(NODE)).flat_map(of_slice).collect());
        devices.into_iter().map(|d| (d["name"].as_str().unwrap().to_owned(), d)).collect()
    }

    /// The names of the slices.
    pub fn slices(&self) -> Vec<String> {
        let name = |slice: &Value| slice["metadata"]["name"].to_string();
        self.api.with(|store| store.slices(Some(DRIVER), Some(NODE)).map(name).collect())
    }

    /// Puts a claim where the driver reads it, and prepares it for a pod of its name.
    pub async fn prepare(&self, claim: &Claim) -> Result<Container, DraError> {
        self.api.with(|store| store.put_claim(claim.object(&claim.name().name)));
        let name = claim.name();
        let devices =
            bounded(self.dra.prepare(&name.name, std::slice::from_ref(&name))).await?.remove(0);
        Ok(self.container(&devices))
    }

    /// Why a claim is not prepared.
    pub async fn refusal(&self, claim: &Claim) -> String {
        let prepared = self.prepare(claim).await;
        prepared.err().unwrap_or_else(|| panic!("{} was prepared", claim.name().name)).to_string()
    }

    /// The pod of that claim ends.
    pub async fn unprepare(&self, claim: &Claim) {
        bounded(self.dra.unprepare(&claim.name().name)).await.unwrap();
    }

    /// What the container runtime makes of these devices.
    pub fn container(&self, devices: &[PreparedDevice]) -> Container {
        let view = tempfile::tempdir().unwrap();
        let mut shares = Vec::new();
        for mount in run_options(&self.cdi(), devices).unwrap().mounts {
            let (at, host) = (Path::new(&mount.container_path), PathBuf::from(mount.host_path));
            if at.parent() == Some(Path::new(PAGES)) {
                symlink(&host, view.path().join(at.file_name().unwrap())).unwrap();
                shares.push(host);
            }
        }
        Container { view, shares }
    }

    /// A process in a container.
    pub fn tenant(&self, container: &Container) -> Conversation {
        let program = Preloaded::new(compile_c("calls")).sim(&self.sim);
        let mut tenant = Conversation::start(program.in_container(container.view.path()));
        tenant.must("init");
        tenant
    }

    /// Where CDI specs are.
    pub fn cdi(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    /// Shares whose CDI spec is there, and those whose pages are.
    pub fn delivered(&self) -> [usize; 2] {
        let count = |dir: &str, is_one: fn(&str) -> bool| {
            let names = fs::read_dir(self.dir.path().join(dir)).into_iter().flatten().flatten();
            names.filter(|entry| is_one(&entry.file_name().to_string_lossy())).count()
        };
        let specs = count("cdi", |name| name.starts_with("tessera.dev-share"));
        [specs, count("pages", |name| name.len() == 32)]
    }
}

/// What a container has of its claims.
pub struct Container {
    /// Links to its shares' pages, each named as it is in the container.
    view: TempDir,
    /// The pages on the host.
    pub shares: Vec<PathBuf>,
}

impl Container {
    /// One that has what both have.
    pub fn and(self, other: Container) -> Self {
        for host in &other.shares {
            let link = self.view.path().join(host.file_name().unwrap());
            symlink(host, link).unwrap();
        }
        let shares = [self.shares, other.shares].concat();
        Self { view: self.view, shares }
    }
}

/// A plugin's process; it is killed with this value.
pub struct Plugin {
    process: Owned,
    log: PathBuf,
}

impl Plugin {
    /// SIGTERM, without waiting.
    pub fn terminate(&self) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
    }

    /// Its exit status, once it has ended.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.process.try_wait().unwrap()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Where its probes are answered, once it says so; the newest, where it said so twice.
    pub fn address(&self) -> Option<SocketAddr> {
        let log = self.log();
        log.split("address=").last()?.split_whitespace().next()?.parse().ok()
    }
}
