//! A pod of the sandbox: a placement, and the process that is its container.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use tessera_fake_kubelet::Kubelet;
use tessera_system::locks::lock;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use super::container::Means;
use super::keeper::MARK;
use super::load::Load;
use super::node::last_lines;
use super::placement::Placement;

/// How long a load may take until it is at work.
const READY: Duration = Duration::from_secs(20);
/// How long a container may take to end when its pod is removed; kubelet gives 30 s.
const GRACE: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(10);

/// What runs in a pod's container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A load, and the bytes that it takes where that is not left to it.
    Load(Load, Option<u64>),
    Command(Vec<String>),
}

/// What the process has said.
#[derive(Clone, Debug, Default)]
struct Heard {
    /// Processes at work.
    ready: u64,
    /// The last line of each kind that has figures.
    progress: Option<Value>,
}

/// How a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its container has a process.
    Running,
    /// Its container's process has ended: exit code, or 128 and the signal.
    Ended(i32),
}

#[derive(Debug)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Its node's index.
    pub node: usize,
    pub resource: String,
    pub placement: Placement,
    pub work: Work,
    /// What its container writes.
    pub log: PathBuf,
    state: State,
    child: Option<Child>,
    heard: Arc<Mutex<Heard>>,
}

/// What a pod's process needs besides its placement.
#[derive(Clone, Copy, Debug)]
pub struct Ways<'a> {
    /// How containers are made.
    pub means: Means,
    /// `tessera-tenant`.
    pub program: &'a Path,
    /// The sandbox's directory.
    pub mark: &'a Path,
    /// Bytes charged for each context.
    pub overhead: u64,
}

impl Pod {
    /// A placed pod whose container has not started.
    pub fn new(
        (namespace, name): (String, String),
        (node, resource): (usize, String),
        placement: Placement,
        work: Work,
        log: PathBuf,
    ) -> Self {
        let (state, heard) = (State::Ended(0), Arc::default());
        Self { namespace, name, node, resource, placement, work, log, state, child: None, heard }
    }

    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Starts the container's process, and waits until its load is at work.
    pub async fn start(&mut self, means: &Ways<'_>) -> anyhow::Result<()> {
        let device = self.placement.quota.uuid(0).to_owned();
        let (program, arguments, ready) = match &self.work {
            Work::Load(load, memory) => {
                let quota = self.placement.memory();
                let arguments = load.arguments(quota, means.overhead, &device, *memory);
                (means.program.to_owned(), arguments, load.processes())
            }
            Work::Command(words) => {
                let (first, rest) = words.split_first().context("no command")?;
                (PathBuf::from(first), rest.to_vec(), 0)
            }
        };
        let mut command =
            means.means.command(&self.placement.surroundings, &program, &arguments)?;
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        let mut copy = tokio::fs::File::from_std(log.try_clone()?);
        command.env(MARK, means.mark);
        // A container has only the device nodes of its own GPUs; a process of this machine sees all.
        command.env("CUDA_VISIBLE_DEVICES", self.placement.uuids().join(","));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = Command::from(command).kill_on_drop(true).spawn()?;
        let out = child.stdout.take().context("a container without output")?;
        self.heard = Arc::default();
        let heard = Arc::clone(&self.heard);
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                hear(&mut lock(&heard), &line);
                let _ = copy.write_all(format!("{line}\n").as_bytes()).await;
                let _ = copy.flush().await;
            }
        });
        self.child = Some(child);
        self.state = State::Running;
        self.await_ready(ready).await
    }

    async fn await_ready(&mut self, wanted: u64) -> anyhow::Result<()> {
        let end = Instant::now() + READY;
        while lock(&self.heard).ready < wanted {
            if let State::Ended(code) = self.look() {
                let said = last_lines(&self.log, 3);
                anyhow::bail!("its container ended with exit code {code}: {said}");
            }
            anyhow::ensure!(Instant::now() < end, "its load was not at work within {READY:?}");
            tokio::time::sleep(STEP).await;
        }
        Ok(())
    }

    /// How it is now.
    pub fn look(&mut self) -> State {
        if let Some(child) = &mut self.child
            && let Ok(Some(status)) = child.try_wait()
        {
            use std::os::unix::process::ExitStatusExt;
            let code = status.code().or(status.signal().map(|signal| 128 + signal));
            self.state = State::Ended(code.unwrap_or(-1));
            self.child = None;
        }
        self.state
    }

    /// What it does, for people, as far as it says so.
    pub fn says(&self) -> String {
        let heard = lock(&self.heard);
        let number = |key: &str| heard.progress.as_ref()?.get(key)?.as_u64();
        match (number("requests"), number("p99_us")) {
            (Some(requests), Some(p99)) => {
                format!("{requests} requests/s, p99 {}.{} ms", p99 / 1000, p99 % 1000 / 100)
            }
            _ => String::new(),
        }
    }

    /// Kills the container, as the kernel does with one out of host memory; the pod stays.
    pub async fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait_for(GRACE).await;
    }

    /// The container ends, and the pod with it.
    pub async fn remove(mut self, kubelet: &Kubelet) {
        self.signal(Signal::SIGTERM);
        self.wait_for(GRACE).await;
        if self.child.is_some() {
            self.kill().await;
        }
        kubelet.remove(&self.namespace, &self.name);
        let scratch = &self.placement.surroundings.scratch;
        if !scratch.as_os_str().is_empty() {
            let _ = fs::remove_dir_all(scratch);
        }
        let _ = fs::remove_file(&self.log);
    }

    /// Waits until the container's process has ended, at most so long.
    pub async fn wait_for(&mut self, limit: Duration) -> State {
        let end = Instant::now() + limit;
        while self.look() == State::Running && Instant::now() < end {
            tokio::time::sleep(STEP).await;
        }
        self.state
    }

    /// The process group of its container, while that runs.
    pub fn group(&self) -> Option<Pid> {
        // While the child was not waited for, its pid and group are its own.
        let pid = self.child.as_ref().and_then(Child::id);
        pid.and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw)
    }

    /// Sends a signal to all processes of its container.
    pub fn signal(&self, signal: Signal) {
        if let Some(group) = self.group() {
            let _ = killpg(group, signal);
        }
    }
}

fn hear(heard: &mut Heard, line: &str) {
    let Ok(value) = serde_json::from_str::<Value>(line) else { return };
    match value.get("event").and_then(Value::as_str) {
        Some("ready" | "full") => heard.ready += 1,
        Some("progress") => heard.progress = Some(value),
        _ => {}
    }
}
