//! Tenants of a scenario: `tessera-tenant load`, with Tessera and without.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;

use tessera_harness::{Background, artefacts, throttled};
use tessera_region::layout::PAGES_DIR_ENV;

use super::machine::Machine;

/// Whether Tessera divides the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The hardware's time slices alone.
    Bare,
    /// Under the plugin's arbiter, hosted by this process.
    Tessera,
}

#[derive(Clone, Debug)]
pub struct Spec {
    /// Its share, percent of the GPU.
    pub cores: f64,
    /// Whether its share is its cap, too.
    pub strict: bool,
    pub load: Vec<String>,
    pub processes: u32,
    /// Of two CPUs that its threads would use, how many its container may.
    pub cpus: f64,
}

impl Spec {
    /// A burstable tenant of one process.
    pub fn new(cores: f64, load: &[&str]) -> Self {
        let load = load.iter().map(|&word| word.to_owned()).collect();
        Self { cores, strict: false, load, processes: 1, cpus: CPUS }
    }

    pub fn strict(self) -> Self {
        Self { strict: true, ..self }
    }

    pub fn limited(self, cpus: f64) -> Self {
        Self { cpus, ..self }
    }
}

/// What two threads use that spin.
const CPUS: f64 = 2.0;

/// How long a tenant may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running tenant; killed with all its processes when dropped.
pub struct Tenant {
    pub spec: Spec,
    /// The process group that all its processes are in.
    pub group: i32,
    /// Ends before the child does.
    throttled: Option<Background>,
    child: Child,
    said: Arc<(Mutex<Vec<Value>>, Condvar)>,
}

impl Tenant {
    /// Starts it, under the shim where it has pages.
    pub fn start(machine: &Machine, spec: &Spec, pages: Option<&Path>) -> anyhow::Result<Self> {
        let mut command = Command::new(artefacts().tenant());
        if let Some(pages) = pages {
            let shim = artefacts().shim();
            command.env("LD_PRELOAD", shim).env(PAGES_DIR_ENV, pages);
        }
        if spec.processes > 1 {
            command.args(["--processes", &spec.processes.to_string()]);
        }
        command.arg("load").args(&spec.load).envs(machine.envs());
        let parent = std::process::id();
        // SAFETY: prctl and getppid are async-signal-safe; the closure touches nothing else.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if std::os::unix::process::parent_id() == parent {
                    Ok(())
                } else {
                    Err(std::io::Error::other("the bench is gone"))
                }
            });
        }
        let mut child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let out = child.stdout.take().context("piped")?;
        let said: Arc<(Mutex<Vec<Value>>, Condvar)> = Arc::default();
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let Ok(value) = serde_json::from_str(&line) else { continue };
                heard.0.lock().unwrap_or_else(PoisonError::into_inner).push(value);
                heard.1.notify_all();
            }
        });
        let group = i32::try_from(child.id())?;
        let throttled = (spec.cpus < CPUS).then(|| throttled(-group, spec.cpus / CPUS));
        Ok(Self { spec: spec.clone(), group, throttled, child, said })
    }

    /// Waits until `count` lines of this event were said, and gives them.
    pub fn hear(&mut self, event: &str, count: usize) -> anyhow::Result<Vec<Value>> {
        let end = Instant::now() + PATIENCE;
        let (said, bell) = &*self.said;
        let mut lines = said.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let heard: Vec<Value> =
                lines.iter().filter(|line| line["event"] == event).cloned().collect();
            if heard.len() >= count {
                return Ok(heard);
            }
            let step = Duration::from_millis(100);
            lines = bell.wait_timeout(lines, step).unwrap_or_else(PoisonError::into_inner).0;
            if heard.len() < count && Instant::now() > end {
                let status = self.child.try_wait()?;
                anyhow::bail!("a tenant did not say {event:?} ({status:?})");
            }
            if let Some(status) = self.child.try_wait()?
                && !status.success()
            {
                anyhow::bail!("a tenant ended: {status}");
            }
        }
    }

    pub fn forget(&self) {
        self.said.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Sends a signal to its first process.
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill has no memory effects; the child was not waited for, so the pid is its.
        unsafe { libc::kill(self.group, signal) };
    }

    /// Stops all its processes where they are.
    pub fn stop(&self) {
        // SAFETY: as in `signal`.
        unsafe { libc::killpg(self.group, libc::SIGSTOP) };
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.throttled = None;
        // SAFETY: as in `signal`; the group is the child's own.
        unsafe { libc::killpg(self.group, libc::SIGKILL) };
        let _ = self.child.wait();
    }
}
