//! Allocate on a node of 16 GPUs with 64 replicas each and 1,000 live sessions.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::sleep;

use crate::node::{self, Node, RESOURCE, Setup};
use crate::report::Report;
use crate::world::World;

/// GPUs, and replicas of each.
const GPUS: usize = 16;
const REPLICAS: usize = 64;
const MANY: usize = 1000;
/// Allocates of free replicas, after some that warm up.
const ALLOCATES: usize = 1000;
const WARM_UP: usize = 50;
/// How long what has just happened is left to settle.
const SETTLE: Duration = Duration::from_secs(3);

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    node::runtime()?.block_on(async {
        let node = Node::start(&Setup::new(world, "many", GPUS, REPLICAS)?).await?;
        let mut sessions = Sessions::new()?;
        for number in 0..MANY {
            let pages = node::run(&node, &format!("pod-{number:04}")).await?;
            sessions.add(&pages).await?;
        }
        sleep(SETTLE).await;
        // Those beyond the pods'; kubelet hands them out in no order that matters.
        let held = node.kubelet.held(RESOURCE);
        let all = node.kubelet.devices(RESOURCE).into_iter().map(|device| device.id);
        let free: Vec<String> = all.filter(|id| !held.contains(id)).collect();
        // Again and again, as when pods come and go.
        let requests = (0..ALLOCATES + WARM_UP).map(|call| vec![free[call % free.len()].clone()]);
        let many = node::allocate(&node, requests, WARM_UP).await?;
        report.p99("allocate_p99_ms_1024", "1,000 sessions: Allocate, p99", &many, 2.0);
        node.end().await;
        Ok(())
    })
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
