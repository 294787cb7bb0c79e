//! A tenant: one pod with one container, and the processes that run in it.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tessera_model::printable;
use tessera_region::layout::{GATE_CLOSED, gate_state};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use tessera_sandbox::container::{Means, Surroundings};
use tessera_sandbox::keeper::MARK;
use tessera_sandbox::placement::Placement;
use tessera_system::locks::lock;

use super::account::Group;
use super::progress::Progress;
use super::stage::Stage;

const NAMESPACE: &str = "demo";

/// What a tenant is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Serves requests; what its neighbours do must not hurt it.
    Serve,
    /// Serves with weights that need both of its replicas.
    ServeLarge,
    /// Asks for more than its quota, by every API, from several processes.
    Exceed,
    /// Holds memory, is killed, and holds it again.
    Die,
    /// Computes the steps of an answer, one after the other; asks for all of a GPU but one replica.
    Answer,
    /// Launches without end from several processes; has the replica that is left.
    Batch,
}

/// Processes of the greedy tenant.
pub(super) const GREEDY_PROCESSES: u64 = 3;
/// Processes of the one that launches without end.
pub(super) const BATCH_PROCESSES: u32 = 3;
/// GPU time of one step of an answer, microseconds.
const STEP_US: u32 = 4000;
/// Requests per second of the serving tenants.
pub(super) const RATE: u64 = 100;
const MIB: u64 = 1 << 20;

impl Part {
    /// The tenant's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "chat",
            Self::ServeLarge => "large",
            Self::Exceed => "greedy",
            Self::Die => "crash",
            Self::Answer => "answer",
            Self::Batch => "batch",
        }
    }

    /// Replicas it asks for, of as many as a GPU has.
    pub fn replicas(self, whole: usize) -> usize {
        match self {
            Self::ServeLarge => 2,
            Self::Answer => whole.saturating_sub(1).max(1),
            _ => 1,
        }
    }

    /// Arguments of `tessera-tenant` under a quota of `quota` bytes, of which each context is
    /// charged `overhead`; `device` is the GPU's UUID.
    pub fn arguments(self, quota: u64, overhead: u64, device: &str) -> Vec<String> {
        let usable = quota.saturating_sub(overhead);
        let whole = |bytes: u64| (bytes / (2 * MIB) * 2 * MIB).to_string();
        let mut arguments = vec!["--device".to_owned(), device.to_owned()];
        let rest: Vec<String> = match self {
            Self::Serve => vec![
                "infer".into(),
                format!("--weights={}", whole(usable / 4)),
                format!("--activations={}", whole((usable / 32).clamp(2 * MIB, 64 * MIB))),
                format!("--rate={RATE}"),
                "--kernel-us=1000".into(),
            ],
            Self::ServeLarge => vec![
                "infer".into(),
                format!("--weights={}", whole(usable / 4 * 3)),
                format!("--activations={}", whole((usable / 32).clamp(2 * MIB, 64 * MIB))),
                format!("--rate={}", RATE / 2),
                "--kernel-us=2000".into(),
            ],
            Self::Exceed => vec![
                "--processes".into(),
                GREEDY_PROCESSES.to_string(),
                "greedy".into(),
                format!("--chunk={}", whole((quota / 64).max(2 * MIB))),
                format!("--min-chunk={}", 2 * MIB),
                "--retry-ms=10".into(),
                "--for=0".into(),
                // Where nothing holds it, it must not take a machine's whole GPU.
                format!("--at-most={}", quota + 256 * MIB),
            ],
            Self::Die => vec!["hold".into(), format!("--bytes={}", self.held(quota, overhead))],
            Self::Answer => vec![
                "load".into(),
                "--closed".into(),
                format!("--kernel-us={}", STEP_US / 8),
                "--kernels=8".into(),
            ],
            Self::Batch => vec![
                "--processes".into(),
                BATCH_PROCESSES.to_string(),
                "load".into(),
                "--kernel-us=500".into(),
            ],
        };
        arguments.extend(rest);
        arguments
    }

    /// Bytes that the tenant to be killed holds.
    pub fn held(self, quota: u64, overhead: u64) -> u64 {
        quota.saturating_sub(overhead) / 5 * 4 / (2 * MIB) * (2 * MIB)
    }
}

/// A tenant with what it was given.
pub(super) struct Tenant {
    /// Its part.
    pub part: Part,
    /// Bytes it may hold.
    pub quota: u64,
    /// Its GPU, as an index into the stage's.
    pub gpu: usize,
    /// The replicas kubelet chose.
    pub device_ids: Vec<String>,
    /// What it does, for people.
    pub state: String,
    /// Exit code of the last process that ended by itself.
    pub exit: Option<i32>,
    /// `None` beside Tessera.
    placement: Option<Placement>,
    progress: Arc<Mutex<Progress>>,
    child: Option<Child>,
}

impl Tenant {
    /// Admits the tenant's pod and starts its container, as kubelet would.
    ///
    /// # Errors
    /// What the plugin answered, or an answer that no container could use.
    pub async fn place(stage: &Stage, part: Part) -> anyhow::Result<Self> {
        let name = part.name();
        let asked = part.replicas(stage.replicas_per_gpu);
        let scratch = stage.scratch.dir(&format!("tenant-{name}"))?;
        let asked = (stage.resource.as_str(), asked);
        let placement = Placement::of(stage.kubelet(), (NAMESPACE, name), asked, scratch).await?;
        let gpu = stage
            .gpus
            .iter()
            .position(|gpu| gpu.uuid == placement.quota.uuid(0))
            .context("the quota page names a GPU that NVML does not")?;
        Ok(Self {
            part,
            quota: placement.memory(),
            gpu,
            device_ids: placement.device_ids.clone(),
            state: "starting".into(),
            exit: None,
            placement: Some(placement),
            progress: Arc::default(),
            child: None,
        })
    }

    /// The same program beside Tessera: no pod, no shim, no pages.
    pub fn bare(part: Part, gpu: usize) -> Self {
        Self {
            part,
            quota: 0,
            gpu,
            device_ids: Vec::new(),
            state: "runs without Tessera".into(),
            exit: None,
            placement: None,
            progress: Arc::default(),
            child: None,
        }
    }

    /// Percent of the GPU that its quota page gives it.
    pub fn asked_percent(&self) -> Option<u32> {
        self.placement.as_ref().map(|placement| placement.quota.cores_millis(0) / 10)
    }

    /// Whether its gate is open: it holds the GPU, or has it for itself.
    pub fn holds(&self) -> bool {
        let state = self.placement.as_ref().map(|placement| gate_state(placement.quota.gate(0)));
        state.is_some_and(|state| state != GATE_CLOSED)
    }

    /// Starts the container again, as kubelet does after a crash: PreStartContainer, no Allocate.
    ///
    /// # Errors
    /// What the plugin answered.
    pub async fn restart_container(&mut self, stage: &Stage) -> anyhow::Result<()> {
        let scratch = stage.scratch.dir(&format!("tenant-{}-again", self.part.name()))?;
        let placement = self.placement.as_mut().context("it runs without Tessera")?;
        placement.restart(stage.kubelet(), scratch).await?;
        self.progress = Arc::default();
        Ok(())
    }

    /// Starts the process. Its process group, by which the account knows it, is returned.
    ///
    /// # Errors
    /// No such program, or no namespace.
    pub fn start(&mut self, means: Means, program: &Path, stage: &Stage) -> anyhow::Result<Group> {
        let uuid = &stage.gpus[self.gpu].uuid;
        let arguments = self.part.arguments(self.quota, stage.context_overhead, uuid);
        let bare = Surroundings::default();
        let surroundings = self.placement.as_ref().map_or(&bare, |one| &one.surroundings);
        let mut command = means.command(surroundings, program, &arguments)?;
        command.env(MARK, stage.scratch.path());
        let log = self.log(stage)?;
        let log = OpenOptions::new().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut command = Command::from(command);
        let mut child = command.kill_on_drop(true).spawn().context("cannot start a tenant")?;
        let out = child.stdout.take().context("a tenant without output")?;
        let progress = Arc::clone(&self.progress);
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                lock(&progress).take(&line);
            }
        });
        let pid =
            child.id().and_then(|pid| i32::try_from(pid).ok()).context("a tenant without pid")?;
        self.child = Some(child);
        Ok(pid)
    }

    /// What it said so far.
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// Sends a signal to its first process.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, signal);
        }
    }

    /// Kills everything in it, as the kernel does with a container out of host memory.
    pub async fn kill(&mut self) {
        if let Some(pid) = self.pid() {
            let _ = killpg(pid, Signal::SIGKILL);
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.wait().await;
        }
    }

    /// Whether its process has ended by itself; then [`Self::exit`] says how.
    pub fn has_ended(&mut self) -> bool {
        let Some(child) = &mut self.child else { return true };
        match child.try_wait() {
            Ok(Some(status)) => {
                self.exit = Some(status.code().unwrap_or(-1));
                self.child = None;
                true
            }
            _ => false,
        }
    }

    /// Waits for its end, at most `limit`; then it is killed.
    pub async fn finish(&mut self, limit: Duration) {
        let Some(mut child) = self.child.take() else { return };
        match tokio::time::timeout(limit, child.wait()).await {
            Ok(Ok(status)) => self.exit = Some(status.code().unwrap_or(-1)),
            _ => {
                self.exit = Some(-1);
                self.child = Some(child);
                self.kill().await;
            }
        }
    }

    /// Why it ended, as its standard error says.
    pub fn said(&self, stage: &Stage) -> String {
        let text = self.log(stage).and_then(|log| Ok(std::fs::read_to_string(log)?));
        printable::line(&last_words(&text.unwrap_or_default(), self.exit)).into_owned()
    }

    fn log(&self, stage: &Stage) -> anyhow::Result<PathBuf> {
        Ok(stage.scratch.dir("log")?.join(format!("{}.log", self.part.name())))
    }

    /// Its pod goes, and its replicas are free.
    pub fn remove(&self, stage: &Stage) {
        stage.kubelet().remove(NAMESPACE, self.part.name());
    }

    fn pid(&self) -> Option<Pid> {
        // While the child was not waited for, its pid and group are its own.
        let pid = self.child.as_ref()?.id()?;
        Some(Pid::from_raw(i32::try_from(pid).ok()?))
    }
}

/// `EX_USAGE` of sysexits.h: it does not know its arguments.
const USAGE: i32 = 64;

/// Of a program that does not know its arguments, the last line is the end of its usage.
fn last_words(log: &str, exit: Option<i32>) -> String {
    let own = log.lines().rev().find(|line| line.starts_with("tessera-tenant: "));
    let said = own.or_else(|| log.lines().last()).unwrap_or("it said nothing");
    match exit {
        Some(USAGE) => format!(
            "{said}; the tessera-tenant beside this tessera is of another build: `make debug` makes both"
        ),
        _ => said.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_of_another_build_is_known_by_its_message_and_not_by_its_usage() {
        let log =
            "tessera-tenant: unknown argument --closed\n\nusage …\n128+n: died of\nsignal n.\n";
        let said = last_words(log, Some(USAGE));
        assert!(said.starts_with("tessera-tenant: unknown argument --closed; "), "{said}");
        assert!(said.contains("another build"), "{said}");
        assert_eq!(last_words("shim: one\nshim: two\n", Some(3)), "shim: two");
        assert_eq!(last_words("", None), "it said nothing");
    }

    #[test]
    fn every_part_fits_its_quota_but_the_greedy_one() {
        let (quota, overhead) = (4 << 30, 512 << 20);
        assert!(Part::Die.held(quota, overhead) + overhead < quota);
        let weights = |part: Part, quota| {
            let arguments = part.arguments(quota, overhead, "GPU-0");
            let weights = arguments.iter().find_map(|a| a.strip_prefix("--weights="));
            weights.unwrap().parse::<u64>().unwrap()
        };
        assert!(weights(Part::Serve, quota) + overhead + (128 << 20) < quota);
        let large = weights(Part::ServeLarge, 2 * quota);
        assert!(large > quota, "both replicas are needed");
        assert!(large + overhead + (128 << 20) < 2 * quota);
    }
}
