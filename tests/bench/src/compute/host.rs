//! Tessera's side of a scenario: pages for each tenant, and the plugin's arbiter in this process.

use std::fs::File;
use std::mem::{offset_of, size_of};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tessera_arbiter::{Arbiter, THREAD_NAME};
use tessera_config::Leases;
use tessera_harness::Pages;
use tessera_region::layout::{SLOTS, Slot, USAGE_FILE, UsagePage};
use tessera_region::quota::{GpuQuota, Policy};

use super::tenant::Spec;
use crate::world::GPU;

/// Memory limit of every tenant, bytes; nothing here needs more.
const MEMORY: u64 = 1 << 30;
/// `memory.context_overhead` of the machine, bytes.
const CONTEXT: u64 = 32 << 20;

pub struct Host {
    arbiter: Arbiter,
    dirs: Vec<PathBuf>,
    base: PathBuf,
}

impl Host {
    pub fn start(base: &Path) -> anyhow::Result<Self> {
        let arbiter = Arbiter::start(&Leases::default()).context("no arbiter")?;
        Ok(Self { arbiter, dirs: Vec::new(), base: base.to_owned() })
    }

    /// Makes a tenant's pages and has them arbitrated; where they are.
    pub fn admit(&mut self, spec: &Spec) -> anyhow::Result<PathBuf> {
        let dir = self.base.join(format!("pages-{}", self.dirs.len()));
        std::fs::create_dir(&dir)?;
        make_pages(&dir, spec);
        self.arbiter.admit(&dir)?;
        self.dirs.push(dir.clone());
        Ok(dir)
    }

    /// Times that a tenant's process rationed itself because the arbiter was silent, as the shims counted.
    pub fn timeouts(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for dir in &self.dirs {
            let page = File::open(dir.join(USAGE_FILE))?;
            for slot in 0..SLOTS {
                let at = offset_of!(UsagePage, slots)
                    + slot * size_of::<Slot>()
                    + offset_of!(Slot, gate_timeouts);
                let mut bytes = [0; 8];
                page.read_exact_at(&mut bytes, u64::try_from(at)?)?;
                sum += u64::from_le_bytes(bytes);
            }
        }
        Ok(sum)
    }

    /// CPU time of the arbiter's thread so far, nanoseconds.
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

pub fn make_pages(dir: &Path, spec: &Spec) -> Pages {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100 percent")]
    let cores_millis = (spec.cores * 10.0).round() as u32;
    let gpu = GpuQuota {
        uuid: GPU.into(),
        memory_limit_bytes: MEMORY,
        context_overhead_bytes: CONTEXT,
        cores_millis,
        policy: if spec.strict { Policy::Strict } else { Policy::Burst },
    };
    Pages::of(dir, &dir.file_name().unwrap_or_default().to_string_lossy(), vec![gpu])
}
