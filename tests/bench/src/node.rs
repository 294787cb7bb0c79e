//! The plugin's process (`tessera serve`) under the stand-in for kubelet, on a node of any size, and on one with 64
//! idle pods on eight simulated GPUs.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use tempfile::TempDir;
use tessera_fake_kubelet::{Container, Kubelet, Pod};
use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use tessera_model::allocation_id::AllocationId;
use tessera_web::client;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use crate::machine::Process;
use crate::stats::Sample;
use crate::world::{Artefacts, World};

/// What is sold.
pub const RESOURCE: &str = "tessera.dev/gpu";
/// How long the plugin may take to register.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the plugin is configured.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The files under measurement.
    pub artefacts: Artefacts,
    /// What the simulated NVML needs of the environment.
    pub envs: Vec<(&'static str, PathBuf)>,
    /// GPUs of the machine.
    pub gpus: usize,
    /// Replicas of each.
    pub replicas: usize,
    /// `gpus.reserve` and `gpus.context_overhead`, bytes.
    pub memory: (u64, u64),
    /// `ledger.fsync`.
    pub fsync: bool,
    /// `log.filter`.
    pub log: &'static str,
    /// `api.listen`.
    pub api: Api,
    /// `history.enabled`.
    pub history: bool,
}

/// How the JSON API is served over TCP. Root's socket is served in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// Not.
    Off,
    /// As on a host without Kubernetes.
    Plain,
    /// Over TLS, as in a cluster, with a certificate of a file. Without a cluster nobody's rights are asked for.
    Tls,
}

/// A plugin registered with a stand-in of its own.
#[derive(Debug)]
pub struct Node {
    /// The stand-in.
    pub kubelet: Kubelet,
    /// From spawn to all replicas listed, at the last start.
    pub registered: Duration,
    plugin: Child,
    dir: TempDir,
    pages: TempDir,
}

impl Node {
    /// Starts both, and waits until all replicas are listed.
    ///
    /// # Errors
    /// The plugin does not start or register; its log is in the message.
    pub async fn start(setup: &Setup) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench-node.").tempdir()?;
        // On a node the pages are a tmpfs of their own.
        let pages = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        if setup.api == Api::Tls {
            certificate(dir.path())?;
        }
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await?;
        let (plugin, registered) = serve(setup, &kubelet, dir.path(), pages.path()).await?;
        Ok(Self { kubelet, registered, plugin, dir, pages })
    }

    /// Ends the plugin with SIGKILL and starts it again.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub async fn restart(&mut self, setup: &Setup) -> anyhow::Result<()> {
        self.plugin.kill().await?;
        self.kubelet.wait_allocatable(RESOURCE, 0).await;
        let started = serve(setup, &self.kubelet, self.dir.path(), self.pages.path()).await?;
        (self.plugin, self.registered) = started;
        Ok(())
    }

    /// Where the node's files are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the pages of the allocation of these replicas are.
    pub fn pages(&self, device_ids: &[String]) -> PathBuf {
        let id = AllocationId::of(RESOURCE, device_ids.iter().map(String::as_str));
        self.pages.path().join(id.as_str())
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

    /// A client of the plugin's own service, beside kubelet's.
    ///
    /// # Errors
    /// It is not registered, or does not answer.
    pub async fn client(&self) -> anyhow::Result<DevicePluginClient<Channel>> {
        let socket = self.kubelet.endpoint(RESOURCE).context("the plugin is not registered")?;
        let socket = self.kubelet.device_plugins_dir().join(socket);
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        Ok(DevicePluginClient::new(channel.connect().await?))
    }

    /// The JSON API, over TCP as the setup says, and by root's socket.
    ///
    /// # Errors
    /// The plugin does not say where TCP is served: its log is in the message.
    pub async fn api(&self, api: Api) -> anyhow::Result<[client::Endpoint; 2]> {
        endpoints(self.dir.path(), || self.log(), api).await
    }

    /// Ends both.
    pub async fn end(mut self) {
        let _ = self.plugin.kill().await;
        self.kubelet.stop().await;
    }
}

/// Allocates these replicas, one request after the other, and gives the milliseconds of each but
/// the first `warm_up`.
///
/// # Errors
/// The plugin refuses.
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
///
/// # Errors
/// The kernel's.
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
    let mut plugin = Command::new(setup.artefacts.path("tessera"))
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
    let path = |path: &Path| format!("{:?}", path.display().to_string());
    let (reserve, context) = setup.memory;
    let Setup { replicas, fsync, log, history, .. } = setup;
    let api = match setup.api {
        Api::Off => "listen = \"\"".to_owned(),
        Api::Plain => "listen = \"127.0.0.1:0\"".to_owned(),
        Api::Tls => format!(
            "listen = \"127.0.0.1:0\"\ntls_cert = {}\ntls_key = {}",
            path(&dir.join("tls.crt")),
            path(&dir.join("tls.key"))
        ),
    };
    format!(
        "[gpus]\nreserve = {reserve}\ncontext_overhead = {context}\n\
         [share]\nreplicas = {replicas}\n\
         [container]\ndevice_list_strategy = \"none\"\n\
         [cdi]\ndirectory = {}\n\
         [ledger]\nfsync = {fsync}\n\
         [pages]\ntmpfs = \"off\"\n\
         [metrics]\nlisten = \"127.0.0.1:0\"\n[api]\n{api}\n\
         [history]\nenabled = {history}\n\
         [log]\nfilter = {log:?}\n\
         [paths]\nkubelet = {}\npod_resources = {}\npages = {}\nshim = {}\nshim_source = {}\n\
         container_logs = {}\nledger = {}\nadmin = {}\n",
        path(&dir.join("cdi")),
        path(kubelet.device_plugins_dir()),
        path(kubelet.pod_resources_socket()),
        path(pages),
        path(&dir.join("shim")),
        path(&setup.artefacts.path("libtessera.so")),
        path(&dir.join("logs")),
        path(&dir.join("ledger.redb")),
        path(&dir.join("admin.sock")),
    )
}

/// The JSON API of a plugin whose files are in `dir`, over TCP and by root's socket.
///
/// # Errors
/// Its log does not say where TCP is served.
pub async fn endpoints(
    dir: &Path,
    log: impl Fn() -> String,
    api: Api,
) -> anyhow::Result<[client::Endpoint; 2]> {
    let address = address(log, API).await?;
    let socket = client::Endpoint::Socket(dir.join("admin.sock"));
    Ok(match api {
        Api::Tls => [client::Endpoint::Secure(address, tessera_web::fixtures::unverified()), socket],
        Api::Plain | Api::Off => [client::Endpoint::Plain(address), socket],
    })
}

/// A certificate and its key, `tls.crt` and `tls.key`.
///
/// # Errors
/// The file system's.
pub fn certificate(dir: &Path) -> anyhow::Result<()> {
    let made = tessera_web::self_signed(&["localhost"])?;
    fs::write(dir.join("tls.crt"), made.certificate.pem())?;
    fs::write(dir.join("tls.key"), made.key_pem())?;
    Ok(())
}

/// The log's lines that say where the plugin listens: with the filter `tessera_api::metrics=info`, and with `tessera_web=info`.
pub const METRICS: &str = "serving metrics and probes";
/// See above.
pub const API: &str = "serving the JSON API and the page";

/// The address in the line with this text, as soon as the log has it.
///
/// # Errors
/// It has none: the log is in the message.
pub async fn address(log: impl Fn() -> String, text: &str) -> anyhow::Result<SocketAddr> {
    for _ in 0..100 {
        if let Some(address) = in_text(&log(), text) {
            return Ok(address);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("the plugin's log does not say \u{201c}{text}\u{201d}:\n{}", log())
}

fn in_text(log: &str, text: &str) -> Option<SocketAddr> {
    let line = log.lines().find(|line| line.contains(text))?;
    line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// Pods, one share of a GPU each.
pub const TENANTS: usize = 64;
/// GPUs that they are on.
pub const TENANTS_GPUS: usize = 8;
/// The pods' namespace, and the beginning of their names; a number follows.
pub const NAMESPACE: &str = "bench";
/// See above.
pub const POD: &str = "pod-";

/// The plugin on a machine of its own, of this name, with room for [`TENANTS`].
///
/// # Errors
/// The file system's.
pub fn tenants(world: &World, name: &str, api: Api, history: bool) -> anyhow::Result<Setup> {
    let config = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(TENANTS_GPUS);
    let file = world.path(&format!("{name}.toml"));
    fs::write(&file, config)?;
    let state = world.path(&format!("{name}.state"));
    Ok(Setup {
        artefacts: world.artefacts.clone(),
        envs: vec![("SIMGPU_CONFIG", file), ("SIMGPU_STATE", state)],
        gpus: TENANTS_GPUS,
        replicas: TENANTS / TENANTS_GPUS,
        memory: (256 << 20, 32 << 20),
        fsync: true,
        log: "warn,tessera_web=info",
        api,
        history,
    })
}

/// Starts it, and all pods on it.
///
/// # Errors
/// A plugin that does not start, register or allocate.
pub async fn start_tenants(setup: &Setup) -> anyhow::Result<Node> {
    let node = Node::start(setup).await?;
    for number in 0..TENANTS {
        let container = Container::new("main").asking(RESOURCE, 1);
        node.kubelet.run(&Pod::new(NAMESPACE, &format!("{POD}{number}")).with(container)).await?;
    }
    Ok(node)
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
