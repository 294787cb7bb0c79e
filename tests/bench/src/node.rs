//! The plugin's process (`tessera serve`) under the stand-in for kubelet, on a simulated node of any size, and on one
//! with 64 idle pods on eight GPUs.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use tempfile::TempDir;
use tessera_fake_kubelet::{Container, Kubelet, Pod};
use tessera_harness::{artefacts, own_paths};
use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use tessera_model::allocation_id::AllocationId;
use tessera_web::client;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use crate::machine::Process;
use crate::stats::Sample;
use crate::world::World;

pub const RESOURCE: &str = "tessera.dev/gpu";
/// How long the plugin may take to register.
const PATIENCE: Duration = Duration::from_secs(60);

/// A simulated machine, and how the plugin is configured.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What the simulated NVML needs of the environment, and the plugin besides.
    pub envs: Vec<(&'static str, PathBuf)>,
    pub gpus: usize,
    pub replicas: usize,
    /// `gpus.reserve`, bytes; contexts are charged 32 MiB.
    pub reserve: u64,
    /// `ledger.fsync`.
    pub fsync: bool,
    /// The JSON API over TLS, as in a cluster, with a certificate of a file; without a cluster nobody's rights are asked
    /// for. Else as on a host without Kubernetes. Root's socket is served in any case.
    pub tls: bool,
    /// All GPUs are sold by claims.
    pub dra: bool,
}

impl Setup {
    /// On a machine of its own, of this name, with so many GPUs of 80 GiB.
    pub fn new(world: &World, name: &str, gpus: usize, replicas: usize) -> anyhow::Result<Self> {
        let file = world.path(&format!("{name}.toml"));
        let memory = "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"32MiB\"\n";
        fs::write(&file, "[[gpu]]\nmemory = \"80GiB\"\n".repeat(gpus) + memory)?;
        let state = world.path(&format!("{name}.state"));
        Ok(Setup {
            envs: vec![("SIMGPU_CONFIG", file), ("SIMGPU_STATE", state)],
            gpus,
            replicas,
            reserve: 256 << 20,
            fsync: false,
            tls: false,
            dra: false,
        })
    }
}

/// A plugin registered with a stand-in of its own.
#[derive(Debug)]
pub struct Node {
    pub kubelet: Kubelet,
    /// From spawn to all replicas listed.
    pub registered: Duration,
    plugin: Child,
    dir: TempDir,
    pages: TempDir,
}

impl Node {
    /// Starts both, and waits until all replicas are listed.
    pub async fn start(setup: &Setup) -> anyhow::Result<Self> {
        Self::start_in(tempfile::Builder::new().prefix("tessera-bench-node.").tempdir()?, setup)
            .await
    }

    pub async fn start_in(dir: TempDir, setup: &Setup) -> anyhow::Result<Self> {
        // On a node the pages are a tmpfs of their own.
        let pages = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        if setup.tls {
            certificate(dir.path())?;
        }
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await?;
        let (plugin, registered) = serve(setup, &kubelet, dir.path(), pages.path()).await?;
        Ok(Self { kubelet, registered, plugin, dir, pages })
    }

    /// Where the pages of the allocation of these replicas are.
    pub fn pages(&self, device_ids: &[String]) -> PathBuf {
        let id = AllocationId::of(RESOURCE, device_ids.iter().map(String::as_str));
        self.pages.path().join(id.as_str())
    }

    /// What the plugin has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn process(&self) -> anyhow::Result<Process> {
        Ok(Process(self.plugin.id().context("the plugin has ended")?))
    }

    /// A client of the plugin's own service, beside kubelet's.
    pub async fn client(&self) -> anyhow::Result<DevicePluginClient<Channel>> {
        let socket = self.kubelet.endpoint(RESOURCE).context("the plugin is not registered")?;
        let socket = self.kubelet.device_plugins_dir().join(socket);
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        Ok(DevicePluginClient::new(channel.connect().await?))
    }

    /// The JSON API over TLS, and by root's socket.
    pub async fn api(&self) -> anyhow::Result<[client::Endpoint; 2]> {
        let address = self.address(API).await?;
        let socket = client::Endpoint::Socket(self.dir.path().join("admin.sock"));
        Ok([client::Endpoint::Secure(address, tessera_web::fixtures::unverified()), socket])
    }

    /// Where the plugin says that its metrics are.
    pub async fn metrics(&self) -> anyhow::Result<SocketAddr> {
        self.address(METRICS).await
    }

    /// The address in the line of the log with this text, as soon as there is one.
    async fn address(&self, text: &str) -> anyhow::Result<SocketAddr> {
        for _ in 0..100 {
            if let Some(address) = in_text(&self.log(), text) {
                return Ok(address);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("the plugin's log does not say \u{201c}{text}\u{201d}:\n{}", self.log())
    }

    pub async fn end(mut self) {
        let _ = self.plugin.kill().await;
        self.kubelet.stop().await;
    }
}

/// Allocates these replicas, one request after the other, and gives the milliseconds of each but
/// the first `warm_up`.
pub async fn allocate(
    node: &Node,
    requests: impl Iterator<Item = Vec<String>>,
    warm_up: usize,
) -> anyhow::Result<Sample> {
    let mut client = node.client().await?;
    let mut values = Vec::new();
    for device_ids in requests {
        let request =
            AllocateRequest { container_requests: vec![ContainerAllocateRequest { device_ids }] };
        let start = Instant::now();
        let answer = client.allocate(request).await?.into_inner();
        values.push(start.elapsed().as_secs_f64() * 1e3);
        anyhow::ensure!(answer.container_responses.len() == 1, "an empty answer");
    }
    Ok(Sample::new(values.split_off(warm_up)))
}

/// For the bench's side of a node.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

async fn serve(
    setup: &Setup,
    kubelet: &Kubelet,
    dir: &Path,
    pages: &Path,
) -> anyhow::Result<(Child, Duration)> {
    let file = dir.join("config.toml");
    fs::write(&file, config(setup, kubelet, dir, pages))?;
    let log = fs::File::create(dir.join("log"))?;
    let start = Instant::now();
    let mut plugin = Command::new(artefacts().tessera())
        .arg("--config")
        .arg(&file)
        .arg("serve")
        .envs(setup.envs.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()?;
    let listed = kubelet.wait_allocatable(RESOURCE, setup.gpus * setup.replicas);
    let outcome = tokio::select! {
        () = listed => return Ok((plugin, start.elapsed())),
        ended = plugin.wait() => format!("it ended: {:?}", ended?.into_raw()),
        () = tokio::time::sleep(PATIENCE) => "in time".to_owned(),
    };
    let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
    anyhow::bail!("the plugin did not register ({outcome}); its log:\n{log}");
}

fn config(setup: &Setup, kubelet: &Kubelet, dir: &Path, pages: &Path) -> String {
    let Setup { replicas, reserve, fsync, dra, .. } = setup;
    let at = |name: &str| format!("{:?}", dir.join(name).display().to_string());
    let tls = match setup.tls {
        false => String::new(),
        true => format!("tls_cert = {}\ntls_key = {}\n", at("tls.crt"), at("tls.key")),
    };
    let shim = artefacts().shim();
    let paths = own_paths(
        dir,
        &[
            ("kubelet", kubelet.device_plugins_dir()),
            ("pod_resources", kubelet.pod_resources_socket()),
            ("pages", pages),
            ("shim_source", &shim),
        ],
    );
    format!(
        "[gpus]\nreserve = {reserve}\ncontext_overhead = \"32Mi\"\n\
         [share]\nreplicas = {replicas}\n\
         [dra]\nenabled = {dra}\n\
         [container]\ndevice_list_strategy = \"none\"\n\
         [ledger]\nfsync = {fsync}\n\
         [metrics]\nlisten = \"127.0.0.1:0\"\n[api]\nlisten = \"127.0.0.1:0\"\n{tls}\
         [log]\nfilter = \"warn,tessera_web=info\"\n{paths}"
    )
}

/// A certificate and its key, `tls.crt` and `tls.key`.
fn certificate(dir: &Path) -> anyhow::Result<()> {
    let made = tessera_web::self_signed(&["localhost"])?;
    fs::write(dir.join("tls.crt"), made.certificate.pem())?;
    fs::write(dir.join("tls.key"), made.key_pem())?;
    Ok(())
}

/// The log's lines that say where the plugin listens.
const METRICS: &str = "serving metrics and probes";
/// See above.
const API: &str = "serving the JSON API and the page";

fn in_text(log: &str, text: &str) -> Option<SocketAddr> {
    let line = log.lines().find(|line| line.contains(text))?;
    line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// Pods, one share of a GPU each.
pub const TENANTS: usize = 64;
/// GPUs that they are on.
const TENANTS_GPUS: usize = 8;
/// The pods' namespace, and the beginning of their names; a number follows.
pub const NAMESPACE: &str = "bench";
/// See above.
pub const POD: &str = "pod-";

/// The plugin on a machine of its own, of this name, with [`TENANTS`] pods.
pub async fn with_tenants(world: &World, name: &str) -> anyhow::Result<Node> {
    let setup = Setup::new(world, name, TENANTS_GPUS, TENANTS / TENANTS_GPUS)?;
    let node = Node::start(&Setup { fsync: true, tls: true, ..setup }).await?;
    for number in 0..TENANTS {
        run(&node, &format!("{POD}{number}")).await?;
    }
    Ok(node)
}

/// Runs a pod with one replica; where its pages are.
pub async fn run(node: &Node, name: &str) -> anyhow::Result<PathBuf> {
    let pod = Pod::new(NAMESPACE, name).with(Container::new("main").asking(RESOURCE, 1));
    let admitted = node.kubelet.run(&pod).await?;
    let ids = admitted.first().map(|admitted| admitted.device_ids.clone()).unwrap_or_default();
    Ok(node.pages(&ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_listener_has_its_own_line() {
        let log = "INFO tessera_web: serving the JSON API and the page address=127.0.0.1:1 tls=true\n\
                   INFO tessera_api: serving metrics and probes address=127.0.0.1:2\n";
        let port = |text| in_text(log, text).map(|address| address.port());
        assert_eq!((port(API), port(METRICS), port("another")), (Some(1), Some(2), None));
    }
}
