//! A simulated machine with GPUs of its own for one test.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::{Owned, artefacts};

/// A configuration of the simulator and its state, removed with this value.
#[derive(Debug)]
pub struct SimGpu {
    /// Ends before its state goes.
    gpu: Option<Owned>,
    dir: TempDir,
    uuids: Vec<String>,
}

/// See [`SimGpu::worked`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Worked {
    /// GPU time without that of markers.
    pub ns: u64,
    pub kernels: u64,
    pub marks: u64,
}

impl SimGpu {
    /// A machine as `config_toml` describes it (the keys are those of `simgpu`'s configuration).
    pub fn start(config_toml: &str) -> Self {
        let dir = tempfile::tempdir().expect("a writable temporary directory");
        std::fs::write(dir.path().join("sim.toml"), config_toml).expect("just made");
        Self { dir, uuids: uuids_in(config_toml), gpu: None }
    }

    /// Two GPUs of 8 GiB whose contexts cost 64 MiB: small enough to fill in a test.
    pub fn start_default() -> Self {
        Self::start(DEFAULT)
    }

    /// With somebody who is the GPU where that writes words of memory (`cuStreamWriteValue64`): without, such words need a
    /// CPU of the process that they are for, and the device says that it has none.
    pub fn that_writes(mut self) -> Self {
        let mut gpu = Command::new(artefacts().simgpu_ctl());
        gpu.arg("serve").envs(self.envs()).stdin(Stdio::null()).stdout(Stdio::piped());
        // SAFETY: prctl is async-signal-safe.
        unsafe {
            gpu.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut gpu = gpu.spawn().expect("simgpu-ctl is an artefact");
        let mut said = String::new();
        let _ = BufReader::new(gpu.stdout.take().expect("piped")).read_line(&mut said);
        assert_eq!(said, "serving\n");
        self.gpu = Some(Owned(gpu));
        self
    }

    /// The configuration's `index`-th GPU's UUID.
    pub fn uuid(&self, index: usize) -> &str {
        &self.uuids[index]
    }

    /// How many GPUs the configuration describes.
    pub fn gpu_count(&self) -> usize {
        self.uuids.len()
    }

    /// What `SIMGPU_CONFIG` is set to.
    pub fn config(&self) -> PathBuf {
        self.dir.path().join("sim.toml")
    }

    /// What `SIMGPU_STATE` is set to.
    pub fn state(&self) -> PathBuf {
        self.dir.path().join("sim.state")
    }

    /// Nanoseconds that the GPU has worked for a process, markers aside, and kernels that it has run,
    /// by the simulator's own account.
    pub fn worked(&self, gpu: usize, pid: u32) -> Worked {
        Worked::of(Command::new(artefacts().simgpu_ctl()).envs(self.envs()), gpu, pid)
    }

    /// A directory for what else the test needs, removed with the machine.
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// The environment in which a process finds the simulated libraries and this machine.
    pub fn envs(&self) -> Vec<(String, String)> {
        let text = |path: PathBuf| path.to_str().expect("temporary paths are UTF-8").to_owned();
        vec![
            ("LD_LIBRARY_PATH".to_owned(), text(artefacts().sim_dir())),
            ("SIMGPU_CONFIG".to_owned(), text(self.config())),
            ("SIMGPU_STATE".to_owned(), text(self.state())),
        ]
    }
}

impl Worked {
    /// By the account of the machine that this `simgpu-ctl` finds.
    pub(crate) fn of(ctl: &mut Command, gpu: usize, pid: u32) -> Worked {
        let out = ctl.arg("account").output().expect("simgpu-ctl is an artefact");
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let line = text.lines().nth(gpu).expect("a line for each GPU");
        let account: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let mut contexts = account["contexts"].as_array().into_iter().flatten();
        let Some(own) = contexts.find(|one| one["pid"] == pid) else { return Worked::default() };
        let field = |name: &str| own[name].as_u64().expect("a field of each");
        Worked {
            ns: field("busy_ns") - field("mark_ns"),
            kernels: field("kernels"),
            marks: field("marks"),
        }
    }
}

/// The values of the `uuid = "…"` lines, in order.
fn uuids_in(config_toml: &str) -> Vec<String> {
    config_toml
        .lines()
        .filter_map(|line| line.trim().strip_prefix("uuid")?.trim_start().strip_prefix('='))
        .map(|value| value.trim().trim_matches('"').to_owned())
        .collect()
}

const DEFAULT: &str = r#"
[memory]
context_overhead = "64MiB"
module_overhead = "2MiB"

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000000"
memory = "8GiB"

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000001"
memory = "8GiB"
"#;
