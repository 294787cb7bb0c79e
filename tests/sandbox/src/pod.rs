//! A pod: what kubelet admitted it with, what its container does, and the process that is its container.

use std::fs;
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tessera_fake_kubelet::{Container, Kubelet, Pod as Admission};
use tessera_region::quota::QuotaReader;
use tokio::process::{Child, Command};

use super::container::{Means, Surroundings};
use super::dra::Claimed;
use super::judge::Said;
use super::node::last_lines;
use super::scratch::MARK;

/// The name of a pod's only container.
pub const CONTAINER: &str = "main";

/// A pod with one container.
#[derive(Debug)]
pub struct Placement {
    pod: Admission,
    /// The devices that kubelet chose.
    pub device_ids: Vec<String>,
    /// What its container runs in.
    pub surroundings: Surroundings,
    /// Its quota, as the shim reads it.
    pub quota: QuotaReader,
    is_claim: bool,
}

impl Placement {
    /// Admits a pod that asks for `count` of `resource`, and starts its container, as kubelet would. `scratch` is
    /// an empty directory.
    /// Errors: What the plugin answered, or an answer that no container could use; the pod is gone then.
    pub async fn of(
        kubelet: &Kubelet,
        (namespace, name): (&str, &str),
        (resource, count): (&str, usize),
        scratch: PathBuf,
    ) -> anyhow::Result<Self> {
        let container = Container::new(CONTAINER).asking(resource, count);
        let pod = Admission::new(namespace, name).with(container);
        let admitted = kubelet.admit(&pod).await.with_context(|| format!("pod {name}"))?;
        let device_ids = admitted.first().map(|a| a.device_ids.clone()).unwrap_or_default();
        let placed = match kubelet.start_container(&pod, CONTAINER).await {
            Ok(options) => {
                Self::attached(pod, device_ids, Surroundings::of(options, scratch), false)
            }
            Err(error) => Err(error.into()),
        };
        if placed.is_err() {
            kubelet.remove(namespace, name);
        }
        placed
    }

    /// A pod whose container has what a claim was allocated. `scratch` is an empty directory.
    /// Errors: An answer that no container could use; the pod is gone then.
    pub fn of_claim(
        kubelet: &Kubelet,
        (namespace, name): (&str, &str),
        claimed: Claimed,
        scratch: PathBuf,
    ) -> anyhow::Result<Self> {
        let pod = Admission::new(namespace, name).with(Container::new(CONTAINER));
        let Claimed { claim, devices, options } = claimed;
        let device_ids = devices.iter().map(|device| device.device_name.clone()).collect();
        let placed = Self::attached(pod, device_ids, Surroundings::of(options, scratch), true)?;
        kubelet.run_claiming((namespace, name), CONTAINER, &claim, &devices);
        Ok(placed)
    }

    fn attached(
        pod: Admission,
        device_ids: Vec<String>,
        surroundings: Surroundings,
        is_claim: bool,
    ) -> anyhow::Result<Self> {
        let pages = surroundings.pages().context("no pages come with what the plugin answered")?;
        let quota = QuotaReader::attach(pages)
            .map_err(|error| anyhow::anyhow!("the quota page of {}: {error}", pod.name))?;
        Ok(Self { pod, device_ids, surroundings, quota, is_claim })
    }

    /// Starts the container again, as kubelet does after a crash: PreStartContainer, no Allocate.
    pub async fn restart(&mut self, kubelet: &Kubelet, scratch: PathBuf) -> anyhow::Result<()> {
        // What a claim was prepared for stays as it is while the pod is there.
        if !self.is_claim {
            let options = kubelet.start_container(&self.pod, CONTAINER).await?;
            self.surroundings = Surroundings::of(options, scratch);
        }
        Ok(())
    }

    /// Bytes that it may hold of its first GPU.
    pub fn memory(&self) -> u64 {
        self.quota.memory_limit(0)
    }

    pub fn uuids(&self) -> Vec<String> {
        (0..self.quota.gpu_count()).map(|gpu| self.quota.uuid(gpu).to_owned()).collect()
    }
}

/// How long a load may take until it is at work.
const READY: Duration = Duration::from_secs(20);
/// How long a container may take to end when its pod is removed; kubelet gives 30 s.
const GRACE: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(10);
/// Bytes of a log's end in which a load's last figures are.
const LATEST: u64 = 64 << 10;

/// What runs in a pod's container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A load, and the bytes that it takes where that is not left to it.
    Load(Load, Option<u64>),
    Command(Vec<String>),
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
    pub node: usize,
    pub resource: String,
    pub placement: Placement,
    pub work: Work,
    pub log: PathBuf,
    state: State,
    child: Option<Child>,
    /// Where in the log its container's words begin, bytes.
    begun: u64,
}

/// What a pod's process needs besides its placement.
#[derive(Clone, Copy, Debug)]
pub struct Ways<'a> {
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
        let (state, child, begun) = (State::Ended(0), None, 0);
        Self { namespace, name, node, resource, placement, work, log, state, child, begun }
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
        self.begun = log.metadata()?.len();
        command.env(MARK, means.mark);
        // A container has only the device nodes of its own GPUs; a process of this machine sees all.
        command.env("CUDA_VISIBLE_DEVICES", self.placement.uuids().join(","));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(Command::from(command).kill_on_drop(true).spawn()?);
        self.state = State::Running;
        self.await_ready(ready).await
    }

    async fn await_ready(&mut self, wanted: u64) -> anyhow::Result<()> {
        let end = Instant::now() + READY;
        while Said::of(&self.log, self.begun).ready < wanted {
            if let State::Ended(code) = self.look() {
                let said = last_lines(&self.log, 3);
                anyhow::bail!("its container ended with exit code {code}: {said}");
            }
            anyhow::ensure!(Instant::now() < end, "its load was not at work within {READY:?}");
            tokio::time::sleep(STEP).await;
        }
        Ok(())
    }

    pub fn look(&mut self) -> State {
        if let Some(child) = &mut self.child
            && let Ok(Some(status)) = child.try_wait()
        {
            self.state = State::Ended(exit_code(status));
            self.child = None;
        }
        self.state
    }

    /// What it does, for people, as far as it says so.
    pub fn says(&self) -> String {
        let end = fs::metadata(&self.log).map_or(0, |log| log.len());
        let said = Said::of(&self.log, end.saturating_sub(LATEST).max(self.begun)).progress;
        match (said["requests"].as_u64(), said["p99_us"].as_u64()) {
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

/// An exit code, or 128 and the signal.
pub fn exit_code(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(-1)
}

const MIB: u64 = 1 << 20;
/// Times the quota's memory that a greedy one would take where nothing held it.
const GREED: u64 = 256 * MIB;
/// Processes of a greedy one, and of one that floods.
const PROCESSES: u64 = 3;
/// GPU time of one kernel of those that need no memory, microseconds.
const KERNEL_US: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Load {
    /// Serves requests, 50 a second, and checks every byte that it reads back
    Serve,
    /// One step after the other without a pause, on weights that fill half of its quota
    Train,
    /// Holds memory and computes nothing
    Idle,
    /// Asks for more than its quota by every API from three processes, again and again
    Greedy,
    /// Steps of 4 ms (8 kernels), each after the last: the tokens of an answer
    Steps,
    /// Launches without end from three processes
    Flood,
}

/// A number of bytes as devices have it: whole chunks of 2 MiB.
fn whole(bytes: u64) -> u64 {
    bytes / (2 * MIB) * (2 * MIB)
}

impl Load {
    /// Processes that say that they are at work.
    pub fn processes(self) -> u64 {
        if matches!(self, Self::Greedy | Self::Flood) { PROCESSES } else { 1 }
    }

    /// Arguments of `tessera-tenant` under a quota of `quota` bytes on the GPU `device`, of which each context is
    /// charged `overhead`. `memory` is what it takes, contexts aside, where that is not left to it.
    pub fn arguments(
        self,
        quota: u64,
        overhead: u64,
        device: &str,
        memory: Option<u64>,
    ) -> Vec<String> {
        let usable = quota.saturating_sub(overhead);
        let activations = whole((usable / 32).clamp(2 * MIB, 64 * MIB));
        let takes = |part: u64| memory.map_or(whole(part), whole);
        let infer = |weights: u64, rate: u32, kernel_us: u32| {
            vec![
                "infer".to_owned(),
                format!("--weights={weights}"),
                format!("--activations={activations}"),
                format!("--rate={rate}"),
                format!("--kernel-us={kernel_us}"),
            ]
        };
        let own = match self {
            Self::Serve => infer(takes(usable / 4), 50, 2000),
            Self::Train => infer(takes(usable / 2), 0, 5000),
            Self::Idle => vec!["hold".into(), format!("--bytes={}", takes(usable / 2))],
            Self::Greedy => vec![
                format!("--processes={PROCESSES}"),
                "greedy".into(),
                format!("--chunk={}", whole((quota / 64).max(2 * MIB))),
                format!("--min-chunk={}", 2 * MIB),
                "--retry-ms=50".into(),
                "--for=0".into(),
                // Where nothing holds it, it must not take a machine's whole GPU.
                format!("--at-most={}", quota + GREED),
            ],
            Self::Steps => vec![
                "load".into(),
                "--closed".into(),
                format!("--kernel-us={KERNEL_US}"),
                "--kernels=8".into(),
            ],
            Self::Flood => vec![
                format!("--processes={PROCESSES}"),
                "load".into(),
                format!("--kernel-us={KERNEL_US}"),
            ],
        };
        [vec![format!("--device={device}")], own].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_fits_its_quota_but_the_greedy_one() {
        let (quota, overhead) = (4 << 30, 128 << 20);
        for load in [Load::Serve, Load::Train, Load::Idle] {
            let arguments = load.arguments(quota, overhead, "GPU-0", None);
            let takes = |name: &str| {
                let found = arguments.iter().find_map(|a| a.strip_prefix(name));
                found.map_or(0, |bytes| bytes.parse::<u64>().unwrap())
            };
            let sum = takes("--weights=") + takes("--activations=") + takes("--bytes=");
            assert!(sum > 0 && sum + overhead < quota, "{load:?}: {sum}");
        }
    }

    #[test]
    fn what_it_takes_can_be_said() {
        let arguments = Load::Idle.arguments(4 << 30, 0, "GPU-0", Some(1 << 30));
        assert!(arguments.contains(&format!("--bytes={}", 1 << 30)), "{arguments:?}");
    }
}
