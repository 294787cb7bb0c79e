//! Tessera's side of a scenario: pages for each tenant, and the plugin's arbiter in this process.

use std::fs::File;
use std::mem::{offset_of, size_of};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tessera_arbiter::{Arbiter, THREAD_NAME, View};
use tessera_config::Leases;
use tessera_region::layout::{SLOTS, Slot, USAGE_FILE, UsagePage};
use tessera_region::quota::{self, GpuQuota, Policy, QuotaSpec};
use tessera_region::usage;

use super::tenant::Spec;

/// The simulated GPU's UUID.
pub const GPU: &str = "GPU-5e55e4a0-0000-4000-8000-000000000000";
/// Memory limit of every tenant, bytes; nothing here needs more.
const MEMORY: u64 = 1 << 30;
/// `memory.context_overhead` of the machine, bytes.
const CONTEXT: u64 = 32 << 20;

/// An arbiter and its tenants' pages.
pub struct Host {
    arbiter: Arbiter,
    dirs: Vec<PathBuf>,
    base: PathBuf,
}

/// What the shims counted, all tenants together: statistics, not evidence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Times that a process rationed itself because the arbiter was silent.
    pub timeouts: u64,
    /// Launches that waited at a closed gate.
    pub waits: u64,
    /// Times that the window was full.
    pub window_waits: u64,
}

impl Host {
    /// An arbiter without tenants.
    ///
    /// # Errors
    /// No thread.
    pub fn start(base: &Path, leases: &Leases) -> anyhow::Result<Self> {
        let arbiter = Arbiter::start(leases).context("no arbiter")?;
        Ok(Self { arbiter, dirs: Vec::new(), base: base.to_owned() })
    }

    /// Makes a tenant's pages and has them arbitrated; where they are.
    ///
    /// # Errors
    /// The file system's, or what the arbiter says.
    pub fn admit(&mut self, spec: &Spec) -> anyhow::Result<PathBuf> {
        let dir = self.base.join(format!("pages-{}", self.dirs.len()));
        std::fs::create_dir(&dir)?;
        make_pages(&dir, spec)?;
        self.arbiter.admit(&dir)?;
        self.dirs.push(dir.clone());
        Ok(dir)
    }

    /// How the arbiter says it stands.
    pub fn view(&self) -> Option<View> {
        self.arbiter.view()
    }

    /// What the shims counted so far.
    ///
    /// # Errors
    /// The file system's.
    pub fn counted(&self) -> anyhow::Result<Counted> {
        let mut sum = Counted::default();
        for dir in &self.dirs {
            let page = File::open(dir.join(USAGE_FILE))?;
            for slot in 0..SLOTS {
                let at = |field: usize| -> anyhow::Result<u64> {
                    let at = offset_of!(UsagePage, slots) + slot * size_of::<Slot>() + field;
                    let mut bytes = [0; 8];
                    page.read_exact_at(&mut bytes, u64::try_from(at)?)?;
                    Ok(u64::from_le_bytes(bytes))
                };
                sum.timeouts += at(offset_of!(Slot, gate_timeouts))?;
                sum.waits += at(offset_of!(Slot, gate_waits))?;
                sum.window_waits += at(offset_of!(Slot, window_waits))?;
            }
        }
        Ok(sum)
    }

    /// CPU time of the arbiter's thread so far, nanoseconds.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn arbiter_cpu_ns(&self) -> anyhow::Result<u64> {
        for task in std::fs::read_dir("/proc/self/task")?.flatten() {
            let read = |name: &str| std::fs::read_to_string(task.path().join(name));
            if read("comm").is_ok_and(|comm| comm.trim() == THREAD_NAME) {
                // The first field: nanoseconds on a CPU.
                let schedstat = read("schedstat")?;
                return Ok(schedstat.split_whitespace().next().unwrap_or("0").parse()?);
            }
        }
        anyhow::bail!("no thread is called {THREAD_NAME}")
    }
}

/// Quota and usage page of one tenant.
///
/// # Errors
/// The file system's.
pub fn make_pages(dir: &Path, spec: &Spec) -> anyhow::Result<()> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100 percent")]
    let cores_millis = (spec.cores * 10.0).round() as u32;
    let quota = QuotaSpec {
        allocation: dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
        generation: 1,
        gpus: vec![GpuQuota {
            uuid: GPU.into(),
            memory_limit_bytes: MEMORY,
            context_overhead_bytes: CONTEXT,
            cores_millis,
            policy: match spec.policy {
                "strict" => Policy::Strict,
                "none" => Policy::None,
                _ => Policy::Burst,
            },
        }],
    };
    quota::create(dir, &quota)?;
    usage::create(dir, quota.generation)?;
    Ok(())
}
