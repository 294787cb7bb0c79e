//! A simulated machine of one scenario, with a GPU that writes its words itself; and the judge's seat in it: the
//! simulator's own account.

use std::path::{Path, PathBuf};

use anyhow::Context;
use simgpu::Session;
use simgpu::account::Account;
use simgpu::channel::GpuThread;
use tempfile::TempDir;
use tessera_harness::artefacts;

/// One GPU, with the simulator's own costs.
const CONFIG: &str = r#"[[gpu]]
name = "Simulated GPU"
memory = "64GiB"
[memory]
context_overhead = "32MiB"
teardown_ms = 0.0
"#;

pub struct Machine {
    session: Session,
    _gpu: GpuThread,
    dir: TempDir,
}

impl Machine {
    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        std::fs::write(dir.path().join("simgpu.toml"), CONFIG)?;
        let open = || {
            Session::open_at(&dir.path().join("simgpu.state"), Some(CONFIG))
                .context("the simulated GPU does not start")
        };
        let (session, _gpu) = (open()?, GpuThread::start(open()?)?);
        Ok(Self { session, _gpu, dir })
    }

    pub fn envs(&self) -> [(&'static str, PathBuf); 3] {
        [
            ("LD_LIBRARY_PATH", artefacts().sim_dir()),
            ("SIMGPU_CONFIG", self.dir.path().join("simgpu.toml")),
            ("SIMGPU_STATE", self.dir.path().join("simgpu.state")),
        ]
    }

    /// Where its files are, and its tenants' pages.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The simulator's account of the GPU, with the switches numbered `since` and later.
    pub fn account(&self, since: u32) -> Account {
        self.session.account(0, since)
    }
}
