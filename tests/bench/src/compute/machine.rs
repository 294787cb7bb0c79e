//! A simulated machine of one scenario, and the judge's seat in it: the simulator's own account.

use std::path::PathBuf;

use anyhow::Context;
use simgpu::Session;
use simgpu::account::Account;
use tempfile::TempDir;

use crate::world::Artefacts;

/// What things cost on the machine; the defaults are the simulator's own.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// The hardware's time slice, microseconds.
    pub slice_us: f64,
    /// GPU time lost at a switch between processes, microseconds.
    pub switch_us: f64,
    /// GPU time of an event.
    pub event_ns: u64,
    /// GPU time of a `cuStreamWriteValue`.
    pub marker_ns: u64,
    /// GPU time added to each kernel.
    pub launch_ns: u64,
}

impl Default for Costs {
    fn default() -> Self {
        let costs = simgpu::Config::default().costs;
        let us = |ns: u64| std::time::Duration::from_nanos(ns).as_secs_f64() * 1e6;
        Self {
            slice_us: us(costs.time_slice_ns),
            switch_us: us(costs.context_switch_ns),
            event_ns: costs.event_ns,
            marker_ns: costs.marker_ns,
            launch_ns: costs.launch_ns,
        }
    }
}

/// One GPU, nobody on it yet.
pub struct Machine {
    /// The files under measurement.
    pub artefacts: Artefacts,
    session: Session,
    dir: TempDir,
}

impl Machine {
    /// A fresh one.
    ///
    /// # Errors
    /// No room in `/dev/shm`.
    pub fn new(artefacts: &Artefacts, costs: Costs) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        let Costs { slice_us, switch_us, event_ns, marker_ns, launch_ns } = costs;
        let config = format!(
            "[[gpu]]\nname = \"Simulated GPU\"\nmemory = \"64GiB\"\n\
             [memory]\ncontext_overhead = \"32MiB\"\nteardown_ms = 0.0\n\
             [costs]\ntime_slice_us = {slice_us:?}\ncontext_switch_us = {switch_us:?}\n\
             event_ns = {event_ns}\nmarker_ns = {marker_ns}\nlaunch_ns = {launch_ns}\n\
             [[kernel]]\nname = \"spin_ns\"\nparameter = 0\n"
        );
        std::fs::write(dir.path().join("simgpu.toml"), &config)?;
        std::fs::create_dir(dir.path().join("run"))?;
        let session = Session::open_at(&dir.path().join("simgpu.state"), Some(&config))
            .context("the simulated GPU does not start")?;
        Ok(Self { artefacts: artefacts.clone(), session, dir })
    }

    /// What a process needs of the environment to be on this machine.
    pub fn envs(&self) -> [(&'static str, PathBuf); 4] {
        [
            ("LD_LIBRARY_PATH", self.artefacts.path("sim")),
            ("SIMGPU_CONFIG", self.dir.path().join("simgpu.toml")),
            ("SIMGPU_STATE", self.dir.path().join("simgpu.state")),
            // Where `tessera run`s of one user meet: those of this scenario and no others.
            ("XDG_RUNTIME_DIR", self.runtime_dir()),
        ]
    }

    /// Where `tessera run` keeps pages.
    pub fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// The simulator's account of the GPU, with the switches numbered `since` and later.
    pub fn account(&self, since: u32) -> Account {
        self.session.account(0, since)
    }
}
