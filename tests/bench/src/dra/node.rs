//! `tessera serve` with its DRA driver, beside the stand-ins for kubelet and the API server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::Kubelet;
use tessera_fake_kubelet::dra::{ClaimName, DraKubelet};
use tessera_web::client::Endpoint;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::machine::Process;
use crate::node::{Api, certificate};
use crate::world::World;

/// As in slices and claims.
const DRIVER: &str = "gpu.tessera.dev";
/// The node of the stand-in for the API server.
const NODE: &str = "n1";
const NAMESPACE: &str = "bench";
/// How long the plugin may take for anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A machine, and how the plugin is configured.
#[derive(Clone, Debug)]
pub struct Setup {
    plugin: PathBuf,
    shim: PathBuf,
    ctl: PathBuf,
    envs: Vec<(&'static str, PathBuf)>,
    /// Devices that it publishes.
    devices: usize,
}

impl Setup {
    /// A machine of this name with these GPUs, in the simulator's words, that are sold as so many devices.
    ///
    /// # Errors
    /// The file system's.
    pub fn new(world: &World, name: &str, gpus: &str, devices: usize) -> anyhow::Result<Self> {
        let file = world.path(&format!("{name}.toml"));
        let memory = "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"32MiB\"\n";
        fs::write(&file, format!("{gpus}{memory}"))?;
        let mut envs = vec![("LD_LIBRARY_PATH", world.artefacts.path("sim"))];
        envs.extend([
            ("SIMGPU_CONFIG", file),
            ("SIMGPU_STATE", world.path(&format!("{name}.state"))),
        ]);
        Ok(Setup {
            plugin: world.artefacts.path("tessera"),
            shim: world.artefacts.path("libtessera.so"),
            ctl: world.artefacts.path("sim/simgpu-ctl"),
            envs,
            devices,
        })
    }

    /// Makes something happen to the machine.
    ///
    /// # Errors
    /// `simgpu-ctl` does not do it.
    pub async fn control(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.ctl);
        let done = command.args(args).envs(self.envs.iter().cloned()).output().await?;
        let said = String::from_utf8_lossy(&done.stderr);
        anyhow::ensure!(done.status.success(), "simgpu-ctl {args:?}: {said}");
        Ok(())
    }
}

/// A plugin whose slices are published, and which kubelet has registered.
#[derive(Debug)]
pub struct Node {
    /// Kubelet's DRA manager.
    pub kubelet: DraKubelet,
    /// The API server.
    pub api: ApiServer,
    /// From spawn until kubelet has registered the driver, at the last start.
    pub registered: Duration,
    setup: Setup,
    plugin: Child,
    manager: Kubelet,
    dir: TempDir,
    pages: TempDir,
    claims: u64,
}

impl Node {
    /// Starts all three.
    ///
    /// # Errors
    /// The plugin does not start, publish or register; its log is in the message.
    pub async fn start(setup: &Setup) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench-dra.").tempdir()?;
        // On a node the pages are a tmpfs of their own.
        let pages = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        let manager = Kubelet::start(&dir.path().join("kubelet")).await?;
        let kubelet = DraKubelet::start(&dir.path().join("kubelet"), DRIVER)?;
        let api = ApiServer::start(dir.path());
        fs::write(dir.path().join("kubeconfig"), api.kubeconfig())?;
        certificate(dir.path())?;
        fs::write(
            dir.path().join("config.toml"),
            config(setup, &manager, dir.path(), pages.path()),
        )?;
        let plugin = spawn(setup, dir.path())?;
        let mut node = Node {
            kubelet,
            api,
            registered: Duration::ZERO,
            setup: setup.clone(),
            plugin,
            manager,
            dir,
            pages,
            claims: 0,
        };
        node.ready(Instant::now(), 1).await?;
        Ok(node)
    }

    /// Ends the plugin with SIGKILL, does something, and starts it again.
    ///
    /// # Errors
    /// As [`Node::start`], and of `between`.
    pub async fn restart(
        &mut self,
        between: impl FnOnce(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.plugin.kill().await?;
        let registrations = self.kubelet.registrations() + 1;
        between(self)?;
        let began = Instant::now();
        self.plugin = spawn(&self.setup, self.dir.path())?;
        self.ready(began, registrations).await
    }

    async fn ready(&mut self, began: Instant, registrations: u64) -> anyhow::Result<()> {
        let kubelet = self.kubelet.clone();
        let registered = kubelet.wait_until(|kubelet| kubelet.registrations() >= registrations);
        let outcome = tokio::select! {
            () = registered => None,
            ended = self.plugin.wait() => Some(format!("it ended: {:?}", ended?.code())),
            () = sleep(PATIENCE) => Some("in time".to_owned()),
        };
        if let Some(outcome) = outcome {
            anyhow::bail!("the driver is not registered ({outcome}); its log:\n{}", self.log());
        }
        self.registered = began.elapsed();
        self.published(|devices| devices.len() == self.setup.devices).await
    }

    /// Waits until the published devices are as they should be; what the plugin logged where they never are.
    ///
    /// # Errors
    /// They never are.
    pub async fn published(&self, is_so: impl Fn(&[Value]) -> bool) -> anyhow::Result<()> {
        let waiting = async {
            while !is_so(&self.devices()) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = timeout(PATIENCE, waiting).await;
        waited.with_context(|| format!("not published in time; the log:\n{}", self.log()))
    }

    /// Devices of all slices.
    pub fn devices(&self) -> Vec<Value> {
        let of_slice =
            |slice: &Value| slice["spec"]["devices"].as_array().cloned().unwrap_or_default();
        self.api.with(|store| store.slices(Some(DRIVER), Some(NODE)).flat_map(of_slice).collect())
    }

    /// A new claim of 256 MiB and 1 % of the `gpu`-th device, allocated.
    ///
    /// # Errors
    /// There is no such device.
    pub fn claim(&mut self, gpu: usize) -> anyhow::Result<ClaimName> {
        let devices = self.devices();
        let device = devices.get(gpu).context("no such device")?["name"].clone();
        self.claims += 1;
        let (name, uid) = (format!("claim-{}", self.claims), format!("uid-{}", self.claims));
        let capacity = json!({ "memory": "256Mi", "cores": "1" });
        let object = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "uid": uid, "namespace": NAMESPACE, "name": name },
            "spec": { "devices": { "requests": [{
                "name": "gpu",
                "exactly": { "deviceClassName": DRIVER, "count": 1, "capacity": { "requests": capacity } },
            }] } },
            "status": {
                "reservedFor": [{ "resource": "pods", "name": name, "uid": format!("pod-{uid}") }],
                "allocation": { "devices": { "results": [{
                    "request": "gpu", "driver": DRIVER, "pool": NODE, "device": device,
                    "shareID": format!("share-{uid}"), "consumedCapacity": capacity,
                }] } },
            },
        });
        self.api.with(|store| store.put_claim(object));
        Ok(ClaimName { namespace: NAMESPACE.to_owned(), name, uid })
    }

    /// Prepares claims in one call; how long it took.
    ///
    /// # Errors
    /// One was refused.
    pub async fn prepare(&self, claims: &[ClaimName]) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let answer = self.kubelet.call_prepare(claims).await?;
        let took = began.elapsed();
        anyhow::ensure!(answer.len() == claims.len(), "claims without an answer");
        for (uid, devices) in answer {
            devices.map_err(|error| anyhow::anyhow!("{uid}: {error}"))?;
        }
        Ok(took)
    }

    /// Unprepares claims in one call, and removes them.
    ///
    /// # Errors
    /// One was refused.
    pub async fn unprepare(&self, claims: &[ClaimName]) -> anyhow::Result<()> {
        let answer = self.kubelet.call_unprepare(claims).await?;
        let refused: Vec<_> = answer.values().filter(|error| !error.is_empty()).collect();
        anyhow::ensure!(refused.is_empty(), "not unprepared: {refused:?}");
        self.api.with(|store| {
            for claim in claims {
                store.remove_claim(&claim.namespace, &claim.name);
            }
        });
        Ok(())
    }

    /// The JSON API, over TLS and by root's socket.
    ///
    /// # Errors
    /// The plugin does not say where it is.
    pub async fn endpoints(&self) -> anyhow::Result<[Endpoint; 2]> {
        crate::node::endpoints(self.dir.path(), || self.log(), Api::Tls).await
    }

    /// Where CDI specs and pages are.
    pub fn delivered(&self) -> [PathBuf; 2] {
        [self.dir.path().join("cdi"), self.pages.path().to_owned()]
    }

    /// What the plugin has logged since it started last.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The plugin's process.
    ///
    /// # Errors
    /// It has ended.
    pub fn process(&self) -> anyhow::Result<Process> {
        Ok(Process(self.plugin.id().context("the plugin has ended")?))
    }

    /// Ends the plugin.
    pub async fn end(mut self) {
        let _ = self.plugin.kill().await;
        self.manager.stop().await;
    }
}

fn spawn(setup: &Setup, dir: &Path) -> anyhow::Result<Child> {
    let plugin = Command::new(&setup.plugin)
        .arg("--config")
        .arg(dir.join("config.toml"))
        .arg("serve")
        .envs(setup.envs.iter().cloned())
        .env("KUBECONFIG", dir.join("kubeconfig"))
        .env("NODE_NAME", NODE)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(dir.join("log"))?)
        .kill_on_drop(true)
        .spawn()?;
    Ok(plugin)
}

fn config(setup: &Setup, kubelet: &Kubelet, dir: &Path, pages: &Path) -> String {
    let path = |path: &Path| format!("{:?}", path.display().to_string());
    let at = |name: &str| path(&dir.join(name));
    format!(
        "[gpus]\nreserve = \"256Mi\"\ncontext_overhead = \"32Mi\"\n\
         [share]\nreplicas = 8\n\
         [dra]\nenabled = true\n\
         [cdi]\ndirectory = {}\n\
         [ledger]\nfsync = false\n\
         [pages]\ntmpfs = \"off\"\n\
         [metrics]\nlisten = \"127.0.0.1:0\"\n\
         [api]\nlisten = \"127.0.0.1:0\"\ntls_cert = {}\ntls_key = {}\n\
         [log]\nfilter = \"warn,tessera_api::metrics=info,tessera_web=info\"\n\
         [paths]\nkubelet = {}\npod_resources = {}\nplugins_registry = {}\ndra = {}\npages = {}\n\
         shim = {}\nshim_source = {}\ncontainer_logs = {}\nledger = {}\nadmin = {}\n",
        at("cdi"),
        at("tls.crt"),
        at("tls.key"),
        path(kubelet.device_plugins_dir()),
        path(kubelet.pod_resources_socket()),
        at("kubelet/plugins_registry"),
        at("dra"),
        path(pages),
        at("shim"),
        path(&setup.shim),
        at("logs"),
        at("ledger.redb"),
        at("admin.sock"),
    )
}
