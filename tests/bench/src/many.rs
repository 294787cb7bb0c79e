//! The plugin's process on a node of 16 GPUs with 64 replicas each and 1,000 live sessions: what
//! grows with the number of allocations, and what must not.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use tessera_fake_kubelet::{Container, Pod};
use tessera_kubelet_api::deviceplugin::Device;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::sleep;

use crate::node::{self, Api, Node, RESOURCE, Setup};
use crate::report::Report;
use crate::stats::Sample;
use crate::world::World;

/// GPUs, and replicas of each.
const GPUS: usize = 16;
const REPLICAS: usize = 64;
/// Pods with a session before and after.
const FEW: usize = 10;
const MANY: usize = 1000;
/// Allocates of free replicas, after some that warm up; those whose device lists are counted; changes of health.
const ALLOCATES: usize = 1000;
const WARM_UP: usize = 50;
const CALLS: usize = 100;
const CHANGES: usize = 5;
/// How long what has just happened is left to settle.
const SETTLE: Duration = Duration::from_secs(3);

/// The machine: GPUs of 80 GB, and what its driver keeps and charges.
const MEMORY: (u64, u64) = (256 << 20, 32 << 20);

fn setup(world: &World) -> anyhow::Result<Setup> {
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
        fsync: false,
        log: "warn",
        api: Api::Plain,
        history: true,
    })
}

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, register or answer, or a session that does not come about.
#[allow(clippy::cast_precision_loss, reason = "a handful")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    node::runtime()?.block_on(async {
        let setup = setup(world)?;
        let mut node = Node::start(&setup).await?;
        let mut sessions = Sessions::new()?;
        grow(&node, &mut sessions, 0..FEW).await?;
        let few = allocate(&node, ALLOCATES).await?;
        grow(&node, &mut sessions, FEW..MANY).await?;
        let many = allocate(&node, ALLOCATES).await?;
        sleep(SETTLE).await;
        report.p99("allocate_p99_ms_1024", "1,000 sessions: Allocate, p99", &many, 2.0);
        let ratio = many.median() / few.median();
        report.figure("allocate_ratio_1024", "· its median to that of 10", "×", ratio, 2.0);
        let before = node.kubelet.lists();
        allocate(&node, CALLS).await?;
        let lists = (node.kubelet.lists() - before) as f64;
        report.figure("lists_by_allocates_1024", "· device lists by Allocates", "", lists, 0.0);
        node.restart(&setup).await?;
        // The last thing: what fell ill stays so, also over restarts.
        let lists = health(&node, &setup).await?;
        report.figure("lists_by_health_1024", "· device lists by a sick GPU", "", lists, 1.0);
        node.end().await;
        Ok(())
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
        sessions.add(Path::new(&pages.host_path)).await?;
    }
    sleep(SETTLE).await;
    Ok(())
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

/// GPUs fall ill, one after the other: by how many messages for each kubelet knows.
async fn health(node: &Node, setup: &Setup) -> anyhow::Result<f64> {
    let before = node.kubelet.lists();
    for gpu in 0..CHANGES {
        let left = (GPUS - gpu - 1) * REPLICAS;
        let status = Command::new(setup.artefacts.path("sim/simgpu-ctl"))
            .args(["xid", &gpu.to_string(), "79"])
            .envs(setup.envs.iter().cloned())
            .output()?
            .status;
        anyhow::ensure!(status.success(), "simgpu-ctl xid");
        let known = node.kubelet.wait_allocatable(RESOURCE, left);
        tokio::time::timeout(Duration::from_secs(10), known).await.context("an XID")?;
        sleep(Duration::from_millis(300)).await;
    }
    #[allow(clippy::cast_precision_loss, reason = "a handful")]
    let each = (node.kubelet.lists() - before) as f64 / CHANGES as f64;
    Ok(each)
}

/// The process whose forks they are; they end with it. See `child/sessions.rs`.
#[derive(Debug)]
struct Sessions {
    _parent: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Sessions {
    /// None yet.
    fn new() -> anyhow::Result<Self> {
        let mut parent = tokio::process::Command::new(std::env::current_exe()?)
            .args(["child", "sessions"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let orders = parent.stdin.take().context("piped")?;
        let answers = BufReader::new(parent.stdout.take().context("piped")?).lines();
        Ok(Self { _parent: parent, orders, answers })
    }

    /// One more, in the pages at `dir`; done when the plugin has welcomed it.
    async fn add(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.orders.write_all(format!("{}\n", dir.display()).as_bytes()).await?;
        let answer = self.answers.next_line().await?;
        answer.context("no session").map(drop)
    }
}
