//! The plugin's process (`tessera serve`) under the stand-in for kubelet: how soon it is registered,
//! how long Allocate takes, and how large it is after the load.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use tempfile::TempDir;
use tessera_kubelet::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use tessera_plugin::standin::{Container, Kubelet, Pod};
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use crate::stats::Sample;
use crate::world::{CONTEXT, RESERVED, World};

const RESOURCE: &str = "tessera.dev/gpu";
/// Replicas of the only GPU: as many pods as a node runs.
const REPLICAS: usize = 64;
/// Starts of the plugin.
const STARTS: usize = 20;
/// Allocates without and with the disk's fsync, after some that warm up.
const ALLOCATES: usize = 3000;
const ALLOCATES_FSYNC: usize = 400;
const WARM_UP: usize = 100;
/// How long the plugin may take to register.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Start to registered and all replicas listed, milliseconds.
    pub register_ms: Sample,
    /// Allocate, milliseconds, without the disk's fsync.
    pub allocate_ms: Sample,
    /// Allocate, milliseconds, with it.
    pub fsync_ms: Sample,
    /// One write and fsync of 4 KiB on the ledger's file system, milliseconds.
    pub disk_ms: Sample,
    /// Resident memory after the load, KiB: in all, and what is the process's own.
    pub rss_kib: (u64, u64),
}

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, register or answer.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    let plugin = world.artefacts.path("tessera");
    anyhow::ensure!(plugin.exists(), "{} is missing: run `make build`", plugin.display());
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut register = Vec::new();
        for _ in 0..STARTS {
            let node = Node::start(world, false).await?;
            register.push(millis(node.registered));
            node.end().await;
        }
        let node = Node::start(world, false).await?;
        let allocate_ms = node.allocate(ALLOCATES).await?;
        let rss_kib = node.rss_kib()?;
        node.end().await;
        let node = Node::start(world, true).await?;
        let fsync_ms = node.allocate(ALLOCATES_FSYNC).await?;
        let disk_ms = disk(node.dir.path())?;
        node.end().await;
        Ok(Figures { register_ms: Sample::new(register), allocate_ms, fsync_ms, disk_ms, rss_kib })
    })
}

/// A plugin registered with a stand-in of its own.
struct Node {
    kubelet: Kubelet,
    plugin: Child,
    registered: Duration,
    dir: TempDir,
    _pages: TempDir,
}

impl Node {
    async fn start(world: &World, fsync: bool) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench-node.").tempdir()?;
        // On a node the pages are a tmpfs of their own.
        let pages = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await?;
        let file = dir.path().join("config.toml");
        fs::write(&file, config(dir.path(), pages.path(), &kubelet, world, fsync))?;
        let log = fs::File::create(dir.path().join("log"))?;
        let start = Instant::now();
        let plugin = Command::new(world.artefacts.path("tessera"))
            .arg("--config")
            .arg(&file)
            .arg("serve")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let listed = kubelet.wait_allocatable(RESOURCE, REPLICAS);
        if tokio::time::timeout(PATIENCE, listed).await.is_err() {
            let log = fs::read_to_string(dir.path().join("log")).unwrap_or_default();
            anyhow::bail!("the plugin did not register; its log:\n{log}");
        }
        Ok(Self { kubelet, plugin, registered: start.elapsed(), dir, _pages: pages })
    }

    /// Allocates through gRPC as kubelet does when pods come and go: a pod through the stand-in
    /// first, then each replica again and again, pairs among them.
    async fn allocate(&self, calls: usize) -> anyhow::Result<Sample> {
        let pod = Pod::new("bench", "pod").with(Container::new("main").asking(RESOURCE, 1));
        self.kubelet.run(&pod).await?;
        self.kubelet.remove("bench", "pod");
        let ids: Vec<String> = self.kubelet.devices(RESOURCE).into_iter().map(|d| d.id).collect();
        let mut client = self.client().await?;
        let mut values = Vec::with_capacity(calls);
        for call in 0..calls + WARM_UP {
            let first = call % REPLICAS;
            let pair = call % 8 == 7;
            let device_ids = ids[first..(first + 1 + usize::from(pair)).min(REPLICAS)].to_vec();
            let request = AllocateRequest {
                container_requests: vec![ContainerAllocateRequest { device_ids }],
            };
            let start = Instant::now();
            let answer = client.allocate(request).await?.into_inner();
            let elapsed = start.elapsed();
            anyhow::ensure!(answer.container_responses.len() == 1, "an empty answer");
            if call >= WARM_UP {
                values.push(millis(elapsed));
            }
        }
        Ok(Sample::new(values))
    }

    async fn client(&self) -> anyhow::Result<DevicePluginClient<Channel>> {
        let socket = self.kubelet.endpoint(RESOURCE).context("the plugin is not registered")?;
        let socket = self.kubelet.device_plugins_dir().join(socket);
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        Ok(DevicePluginClient::new(channel.connect().await?))
    }

    fn rss_kib(&self) -> anyhow::Result<(u64, u64)> {
        let pid = self.plugin.id().context("the plugin has ended")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let read = || Some((field("VmRSS:")?, field("RssAnon:")?));
        read().context("the kernel does not tell the resident set (proc_pid_status(5))")
    }

    async fn end(mut self) {
        let _ = self.plugin.kill().await;
        self.kubelet.stop().await;
    }
}

fn config(dir: &Path, pages: &Path, kubelet: &Kubelet, world: &World, fsync: bool) -> String {
    let path = |path: &Path| format!("{:?}", path.display().to_string());
    format!(
        "[gpus]\nreserve = {RESERVED}\ncontext_overhead = {CONTEXT}\n\
         [share]\nreplicas = {REPLICAS}\n\
         [container]\ndevice_list_strategy = \"none\"\n\
         [ledger]\nfsync = {fsync}\n\
         [pages]\ntmpfs = \"off\"\n\
         [log]\nfilter = \"warn\"\n\
         [paths]\nkubelet = {}\npod_resources = {}\npages = {}\nshim = {}\nshim_source = {}\n\
         ledger = {}\nadmin = {}\n",
        path(kubelet.device_plugins_dir()),
        path(kubelet.pod_resources_socket()),
        path(pages),
        path(&dir.join("shim")),
        path(&world.artefacts.path("libtessera.so")),
        path(&dir.join("ledger.redb")),
        path(&dir.join("admin.sock")),
    )
}

/// What one fsync costs where the ledger is.
fn disk(dir: &Path) -> anyhow::Result<Sample> {
    let file = fs::File::create(dir.join("fsync"))?;
    let page = [7u8; 4096];
    let mut values = Vec::new();
    for round in 0..100u64 {
        let start = Instant::now();
        file.write_all_at(&page, round * 4096)?;
        file.sync_data()?;
        values.push(millis(start.elapsed()));
    }
    Ok(Sample::new(values))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
