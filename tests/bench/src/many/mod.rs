//! The plugin's process on a node of 16 GPUs with 64 replicas each and 1,000 live sessions: what
//! grows with the number of allocations, and what must not.

mod sessions;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use prost::Message;
use tessera_fake_kubelet::{Container, Pod};
use tessera_kubelet_api::deviceplugin::{
    ContainerPreferredAllocationRequest, Device, ListAndWatchResponse, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use tokio::time::sleep;

use self::sessions::Sessions;
use crate::node::{self, Api, Node, RESOURCE, Setup};
use crate::process::Cpu;
use crate::stats::Sample;
use crate::world::World;

/// GPUs, and replicas of each.
const GPUS: usize = 16;
const REPLICAS: usize = 64;
/// Pods with a session before and after.
const FEW: usize = 10;
const MANY: usize = 1000;
/// Allocates of free replicas, after some that warm up; and with the disk's fsync.
const ALLOCATES: usize = 1000;
const ALLOCATES_FSYNC: usize = 200;
const WARM_UP: usize = 50;
/// Container starts, questions, changes of health.
const CALLS: usize = 100;
const CHANGES: usize = 5;
/// How long nothing happens while the plugin's CPU time is taken: two rounds of housekeeping.
const REST: Duration = Duration::from_secs(20);
/// How long what has just happened is left to settle.
const SETTLE: Duration = Duration::from_secs(3);
/// Rounds of housekeeping that are looked at; a container's start brings one forward.
const ROUNDS: usize = 8;

/// What was measured while so many sessions lived.
#[derive(Clone, Debug)]
pub struct Load {
    /// Allocate, milliseconds, without the disk's fsync.
    pub allocate_ms: Sample,
    /// CPU time of the plugin for each of them, milliseconds.
    pub allocate_cpu_ms: f64,
    /// CPU time while nothing happens, percent of a core: all, and the observing thread's.
    pub idle_percent: (f64, f64),
    /// Resident memory, KiB: in all, and what is the process's own.
    pub rss_kib: (u64, u64),
    /// Open descriptors, and threads.
    pub descriptors: usize,
    pub threads: usize,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// With 10 sessions, and with 1,000.
    pub few: Load,
    pub many: Load,
    /// All the rest is with 1,000. PreStartContainer, milliseconds.
    pub pre_start_ms: Sample,
    /// GetPreferredAllocation of one of 1,024, milliseconds.
    pub preferred_ms: Sample,
    /// Messages on ListAndWatch: their bytes, how many all Allocates brought, how many each change of
    /// a GPU's health did, and milliseconds from the XID to kubelet.
    pub list_bytes: usize,
    pub lists_by_allocates: u64,
    pub lists_by_health: f64,
    pub health_ms: Sample,
    /// A round of housekeeping, milliseconds: PodResources, comparing, and, in the periodic ones,
    /// looking at every page.
    pub reconcile_ms: Sample,
    pub inspect_ms: Sample,
    /// Start to registered, with the records and pages of 1,000, milliseconds.
    pub register_ms: f64,
    /// Allocate, milliseconds, with the disk's fsync.
    pub fsync_ms: Sample,
}

/// The machine: GPUs of 80 GB, and what its driver keeps and charges.
const MEMORY: (u64, u64) = (256 << 20, 32 << 20);

fn setup(world: &World, fsync: bool) -> anyhow::Result<Setup> {
    let mut config = String::new();
    for _ in 0..GPUS {
        config += "[[gpu]]\nmemory = \"80GiB\"\n";
    }
    config += "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"32MiB\"\n";
    let file = world.path("many.toml");
    std::fs::write(&file, config)?;
    Ok(Setup {
        artefacts: world.artefacts.clone(),
        envs: vec![("SIMGPU_CONFIG", file), ("SIMGPU_STATE", world.path("many.state"))],
        gpus: GPUS,
        replicas: REPLICAS,
        memory: MEMORY,
        fsync,
        log: "warn,tessera_daemon=debug",
        api: Api::Plain,
        history: true,
    })
}

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, register or answer, or a session that does not come about.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let plain = setup(world, false)?;
        let mut node = Node::start(&plain).await?;
        let mut sessions = Sessions::new()?;
        grow(&node, &mut sessions, 0..FEW).await?;
        let few = load(&node).await?;
        grow(&node, &mut sessions, FEW..MANY).await?;
        let many = load(&node).await?;

        let (pre_start_ms, preferred_ms) = (pre_start(&node).await?, preferred(&node).await?);
        let before = node.kubelet.lists();
        allocate(&node, CALLS).await?;
        let lists_by_allocates = node.kubelet.lists() - before;
        let devices = node.kubelet.devices(RESOURCE);
        let list_bytes = ListAndWatchResponse { devices }.encoded_len();
        let rounds = rounds(&node).await?;

        node.restart(&plain).await?;
        let register_ms = node.registered.as_secs_f64() * 1e3;
        node.restart(&setup(world, true)?).await?;
        let fsync_ms = allocate(&node, ALLOCATES_FSYNC).await?;
        node.restart(&plain).await?;
        // The last thing: what fell ill stays so, also over restarts.
        let (health_ms, lists_by_health) = health(&node, &plain).await?;
        node.end().await;
        Ok(Figures {
            few,
            many,
            pre_start_ms,
            preferred_ms,
            list_bytes,
            lists_by_allocates,
            lists_by_health,
            health_ms,
            reconcile_ms: rounds.0,
            inspect_ms: rounds.1,
            register_ms,
            fsync_ms,
        })
    })
}

fn pod(number: usize) -> Pod {
    let container = Container::new("main").asking(RESOURCE, 1);
    Pod::new("bench", &format!("pod-{number:04}")).with(container)
}

/// Admits and starts these pods, each with a process that has a session.
async fn grow(
    node: &Node,
    sessions: &mut Sessions,
    numbers: std::ops::Range<usize>,
) -> anyhow::Result<()> {
    for number in numbers {
        let admitted = node.kubelet.run(&pod(number)).await?;
        let mounts = admitted.first().map(|admitted| &admitted.response.mounts);
        // The first mount is the pages' directory.
        let pages = mounts.and_then(|mounts| mounts.first()).context("an empty answer")?;
        sessions.add(&PathBuf::from(&pages.host_path)).await?;
    }
    sleep(SETTLE).await;
    Ok(())
}

async fn load(node: &Node) -> anyhow::Result<Load> {
    let process = node.process()?;
    let before = process.cpu()?;
    let start = Instant::now();
    sleep(REST).await;
    let used = process.cpu()?.since(before);
    let percent = |ns: u64| seconds(ns) / start.elapsed().as_secs_f64() * 100.0;
    let idle_percent = (percent(used.all), percent(used.observing));
    let (rss_kib, descriptors, threads) =
        (process.rss_kib()?, process.descriptors()?, process.threads()?);
    let before = process.cpu()?;
    let allocate_ms = allocate(node, ALLOCATES).await?;
    let Cpu { all, .. } = process.cpu()?.since(before);
    #[allow(clippy::cast_precision_loss, reason = "a thousand")]
    let allocate_cpu_ms = seconds(all) * 1e3 / (ALLOCATES + WARM_UP) as f64;
    sleep(SETTLE).await;
    Ok(Load { allocate_ms, allocate_cpu_ms, idle_percent, rss_kib, descriptors, threads })
}

/// Allocates the free replicas again and again, as when pods come and go.
async fn allocate(node: &Node, calls: usize) -> anyhow::Result<Sample> {
    // Those beyond the pods'; kubelet hands them out in no order that matters.
    let free = free(node).await?;
    let requests = (0..calls + WARM_UP).map(|call| vec![free[call % free.len()].clone()]);
    node::allocate(node, requests, WARM_UP).await
}

/// 24 replicas that no pod holds.
async fn free(node: &Node) -> anyhow::Result<Vec<String>> {
    let held = node.kubelet.held(RESOURCE);
    let all = node.kubelet.devices(RESOURCE).into_iter().map(|device: Device| device.id);
    let free: Vec<String> =
        all.filter(|id| !held.contains(id)).take(GPUS * REPLICAS - MANY).collect();
    anyhow::ensure!(!free.is_empty(), "every replica is held");
    Ok(free)
}

/// Containers of the pods start again.
async fn pre_start(node: &Node) -> anyhow::Result<Sample> {
    let mut client = node.client().await?;
    let mut values = Vec::new();
    for id in node.kubelet.held(RESOURCE).into_iter().take(CALLS) {
        let request = PreStartContainerRequest { device_ids: vec![id] };
        let start = Instant::now();
        client.pre_start_container(request).await?;
        values.push(millis(start.elapsed()));
    }
    Ok(Sample::new(values))
}

/// One of all replicas: more than are ever free, as where pods have just gone.
async fn preferred(node: &Node) -> anyhow::Result<Sample> {
    let mut client = node.client().await?;
    let all: Vec<String> = node.kubelet.devices(RESOURCE).into_iter().map(|d| d.id).collect();
    let mut values = Vec::new();
    for _ in 0..CALLS {
        let container = ContainerPreferredAllocationRequest {
            available_device_ids: all.clone(),
            must_include_device_ids: Vec::new(),
            allocation_size: 1,
        };
        let request = PreferredAllocationRequest { container_requests: vec![container] };
        let start = Instant::now();
        client.get_preferred_allocation(request).await?;
        values.push(millis(start.elapsed()));
    }
    Ok(Sample::new(values))
}

/// GPUs fall ill, one after the other: how soon kubelet knows, and by how many messages for each.
async fn health(node: &Node, setup: &Setup) -> anyhow::Result<(Sample, f64)> {
    let before = node.kubelet.lists();
    let mut values = Vec::new();
    for gpu in 0..CHANGES {
        let left = (GPUS - gpu - 1) * REPLICAS;
        let start = Instant::now();
        let status = Command::new(setup.artefacts.path("sim/simgpu-ctl"))
            .args(["xid", &gpu.to_string(), "79"])
            .envs(setup.envs.iter().cloned())
            .output()?
            .status;
        anyhow::ensure!(status.success(), "simgpu-ctl xid");
        let known = node.kubelet.wait_allocatable(RESOURCE, left);
        tokio::time::timeout(Duration::from_secs(10), known).await.context("an XID")?;
        values.push(millis(start.elapsed()));
        sleep(Duration::from_millis(300)).await;
    }
    #[allow(clippy::cast_precision_loss, reason = "a handful")]
    let each = (node.kubelet.lists() - before) as f64 / CHANGES as f64;
    Ok((Sample::new(values), each))
}

/// Rounds of housekeeping as the plugin's log tells them, brought forward by containers that start, and
/// one that comes by itself.
async fn rounds(node: &Node) -> anyhow::Result<(Sample, Sample)> {
    let mut client = node.client().await?;
    for id in node.kubelet.held(RESOURCE).into_iter().take(ROUNDS) {
        let device_ids = vec![id];
        client.pre_start_container(PreStartContainerRequest { device_ids }).await?;
        sleep(Duration::from_millis(600)).await;
    }
    sleep(Duration::from_secs(12)).await;
    let log = node.log();
    let field = |line: &str, name: &str| -> Option<f64> {
        let (_, rest) = line.split_once(&format!(" {name}="))?;
        let us: f64 = rest.split_whitespace().next()?.parse().ok()?;
        Some(us / 1e3)
    };
    let (mut reconcile, mut inspect) = (Vec::new(), Vec::new());
    for line in log.lines().filter(|line| line.contains("a housekeeping round")) {
        let ask = field(line, "pod_resources_us").context("the plugin's log")?;
        let compare = field(line, "compare_us").context("the plugin's log")?;
        reconcile.push(ask + compare);
        inspect.extend(field(line, "inspect_us"));
    }
    let newest = reconcile.len().saturating_sub(ROUNDS);
    anyhow::ensure!(!inspect.is_empty(), "no round of housekeeping in the plugin's log");
    Ok((Sample::new(reconcile.split_off(newest)), Sample::new(vec![inspect[inspect.len() - 1]])))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[allow(clippy::cast_precision_loss, reason = "seconds of CPU time")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
