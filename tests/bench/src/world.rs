//! One simulated machine, an allocation's pages, and commands that run with and without the shim.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::Context;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use tessera_harness::artefacts;
use tessera_region::layout::PAGES_DIR_ENV;

use crate::stats::Pair;

/// The simulator's configuration under every figure; it goes into the summary word for word.
/// Launches, events and markers cost no GPU time, so that nothing but calls is measured; the
/// driver gives a dead process's memory back at once, so that recovery is the ledger's alone.
pub const SIMULATION: &str = r#"driver_version = "580.82.07"
[[gpu]]
name = "Simulated GPU"
memory = "16GiB"
[memory]
reserved = "256MiB"
context_overhead = "32MiB"
module_overhead = "2MiB"
granularity = "2MiB"
pool_chunk = "32MiB"
teardown_ms = 0.0
[costs]
launch_ns = 0
event_ns = 0
marker_ns = 0
context_switch_us = 0.0
"#;
/// The only GPU of the simulator's default machine.
pub const GPU: &str = "GPU-5e55e4a0-0000-4000-8000-000000000000";
/// `memory.context_overhead` above, bytes.
pub const CONTEXT: u64 = 32 << 20;
/// `memory.reserved` above, bytes.
pub const RESERVED: u64 = 256 << 20;

/// The simulated machine. This process runs in its environment; see [`World::enter`].
#[derive(Clone, Debug)]
pub struct World {
    dir: PathBuf,
}

/// Names the machine's directory to the process that measures on it.
const WORLD: &str = "TESSERA_BENCH_WORLD";
/// What [`artefacts`] reads.
const ARTEFACTS: &str = "TESSERA_ARTEFACTS";

impl World {
    /// Makes a machine and runs this program again on it, because NVML finds the simulated GPU by
    /// the environment; `None` in the process that started it, which then has its exit code.
    pub fn enter() -> anyhow::Result<Result<Self, ExitStatus>> {
        if let Some(dir) = std::env::var_os(WORLD) {
            return Ok(Ok(Self { dir: dir.into() }));
        }
        let dir = tempfile::Builder::new().prefix("tessera-bench.").tempdir()?;
        std::fs::write(dir.path().join("simgpu.toml"), SIMULATION)?;
        let program = std::env::current_exe()?;
        // What is measured lies beside this program, where nothing else is said.
        let beside = program.parent().unwrap_or(Path::new(".")).to_owned();
        let artefacts = std::env::var_os(ARTEFACTS).map_or(beside, PathBuf::from);
        let mut again = Command::new(program);
        again.args(std::env::args_os().skip(1)).env(WORLD, dir.path());
        again.env("LD_LIBRARY_PATH", artefacts.join("sim")).env(ARTEFACTS, artefacts);
        again.env("SIMGPU_CONFIG", dir.path().join("simgpu.toml"));
        again.env("SIMGPU_STATE", dir.path().join("simgpu.state"));
        Ok(Err(again.status().context("cannot run this program again")?))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where children that are refused, and say so, say it.
    pub fn log(&self) -> anyhow::Result<File> {
        Ok(OpenOptions::new().create(true).append(true).open(self.path("log"))?)
    }

    /// What children said last that was no refusal.
    pub fn complaints(&self) -> String {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|l| !l.contains("out of memory")).collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    pub fn envs(&self) -> [(&'static str, PathBuf); 3] {
        [
            ("LD_LIBRARY_PATH", artefacts().sim_dir()),
            ("SIMGPU_CONFIG", self.path("simgpu.toml")),
            ("SIMGPU_STATE", self.path("simgpu.state")),
        ]
    }

    /// This program, as a child that does `task` on the simulated driver, without the shim.
    pub fn bare(&self, task: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("child").args(task).envs(self.envs());
        Ok(command)
    }

    /// The same with the shim, under `pages`.
    pub fn hooked(&self, task: &[&str], pages: &Pages) -> anyhow::Result<Command> {
        let mut command = self.bare(task)?;
        command.env("LD_PRELOAD", artefacts().shim()).env(PAGES_DIR_ENV, &pages.path);
        Ok(command)
    }

    /// An allocation with `limit` bytes of the only GPU.
    pub fn pages(&self, limit: u64) -> Pages {
        let pages = tessera_harness::Pages::with_overhead(&[(GPU, limit)], CONTEXT);
        // The simulated driver gives a dead process's memory back at once.
        pages.quota.set_departure(std::time::Duration::from_micros(1));
        Pages { path: pages.dir.to_owned(), _kept: Kept::Own(pages) }
    }

    /// The same, of a `tessera run` that looks at the driver as long as the pages are kept.
    pub fn run_pages(&self, limit: u64) -> anyhow::Result<Pages> {
        let mut run = Command::new(artefacts().tessera());
        run.args(["run", "--sim", "--policy", "none", "-m", &limit.to_string()]);
        run.args(["--context-overhead", &CONTEXT.to_string(), "--"]);
        run.args(["sh", "-c", "echo \"$TESSERA_DIR\"; exec cat"]).envs(self.envs());
        let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(run.stdout.take().context("piped")?).read_line(&mut line)?;
        anyhow::ensure!(line.starts_with('/'), "`tessera run` did not start");
        Ok(Pages { path: line.trim().into(), _kept: Kept::Run(run) })
    }
}

/// Figures of so many rounds, each of which `one` gives without the shim and with it.
pub fn alternate<const N: usize>(
    rounds: usize,
    mut one: impl FnMut(bool) -> anyhow::Result<[f64; N]>,
) -> anyhow::Result<[Pair; N]> {
    let mut values: [[Vec<f64>; 2]; N] = std::array::from_fn(|_| [Vec::new(), Vec::new()]);
    for round in 0..rounds {
        // The first of the two changes, so that neither always finds the machine warmer.
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_shim in order {
            for (figure, value) in values.iter_mut().zip(one(with_shim)?) {
                figure[usize::from(with_shim)].push(value);
            }
        }
    }
    Ok(values.map(|[bare, hooked]| Pair::new(bare, hooked)))
}

pub fn printed<const N: usize>(mut command: Command) -> anyhow::Result<[f64; N]> {
    let output = command.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let printed = || anyhow::anyhow!("{command:?} printed {text:?}");
    <[f64; N]>::try_from(numbers).map_err(|_| printed())
}

/// An allocation's pages, removed with this value.
#[derive(Debug)]
pub struct Pages {
    path: PathBuf,
    _kept: Kept,
}

#[derive(Debug)]
enum Kept {
    Own(#[allow(dead_code, reason = "held")] tessera_harness::Pages),
    Run(Child),
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Kept::Run(run) = self {
            // The end of its input ends the command, and with it the run and its pages.
            drop(run.stdin.take());
            let _ = run.wait();
        }
    }
}

/// The simulator's own account of memory, by NVML, outside any shim.
#[derive(Debug)]
pub struct Account {
    nvml: Nvml,
}

impl Account {
    pub fn open() -> anyhow::Result<Self> {
        let library = artefacts().libnvml();
        Ok(Self { nvml: Nvml::builder().lib_path(library.as_os_str()).init()? })
    }

    /// Bytes in use by tenants: one counter, hence exact at one instant.
    pub fn used(&self) -> anyhow::Result<u64> {
        Ok(self.nvml.device_by_index(0)?.memory_info()?.used.saturating_sub(RESERVED))
    }

    /// Bytes of every process, contexts included.
    pub fn processes(&self) -> anyhow::Result<Vec<(u32, u64)>> {
        let processes = self.nvml.device_by_index(0)?.running_compute_processes()?;
        Ok(processes
            .into_iter()
            .map(|process| match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => (process.pid, bytes),
                UsedGpuMemory::Unavailable => (process.pid, 0),
            })
            .collect())
    }
}
