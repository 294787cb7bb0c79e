//! Collectives of one tenant over two GPUs, and host functions that wait for their own thread: work in
//! flight that waits for what the gate may hold back. Their speed under a lease, to share × bare.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tessera_harness::artefacts;

use super::Report;
use crate::stats::Sample;

/// How long each program is at it, by its own clock.
const LENGTH: Duration = Duration::from_secs(3);
/// And how much longer it may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(20);
/// Every tenant's share of each of its GPUs.
const SHARE: f64 = 0.5;
/// Collectives of one thread, of one that runs ahead, of a thread and of a process for each GPU; a host
/// function that waits for its thread, one that waits for another process, and a wait for a word that the
/// host writes later. See `tests/programs/tied.c`.
const SHAPES: [&str; 7] = ["gpus", "ahead", "threads", "ranks", "host", "processes", "value"];

const MACHINE: &str = "[memory]\ncontext_overhead = \"32MiB\"\nteardown_ms = 0.0\n\
    [[kernel]]\nname = \"spin\"\nparameter = 0\n\
    [[gpu]]\nuuid = \"GPU-5e55e4a0-0000-4000-8000-000000000000\"\nmemory = \"8GiB\"\n\
    [[gpu]]\nuuid = \"GPU-5e55e4a0-0000-4000-8000-000000000001\"\nmemory = \"8GiB\"\n";

#[derive(Clone, Copy, Debug)]
struct Speeds {
    /// Steps a second without Tessera, alone.
    bare: f64,
    /// To share × bare: with a cap, alone.
    capped: f64,
    /// To share × bare: beside a backlog.
    beside: f64,
    /// What the backlog did beside it, to what it does bare and alone.
    backlog: f64,
}

struct Place {
    dir: TempDir,
    program: PathBuf,
}

impl Place {
    fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench.").tempdir_in("/dev/shm")?;
        std::fs::write(dir.path().join("simgpu.toml"), MACHINE)?;
        std::fs::create_dir(dir.path().join("run"))?;
        let program = dir.path().join("tied");
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../programs/tied.c");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.arg("-O1").arg("-o").arg(&program).arg(&source).args(["-ldl", "-lpthread"]);
        anyhow::ensure!(cc.status()?.success(), "{} does not compile", source.display());
        Ok(Self { dir, program })
    }

    fn speeds(&self, shape: &str) -> anyhow::Result<Speeds> {
        let bare = self.start(shape, None)?.rate().context("bare")?;
        let backlog = self.start("none", None)?.rate().context("the backlog, bare")?;
        let capped = self.start(shape, Some("strict"))?.rate().context("with a cap")?;
        let neighbour = self.start("none", Some("burst"))?;
        let beside = self.start(shape, Some("burst"))?.rate().context("beside a backlog")?;
        let neighbour = neighbour.rate().context("the backlog")?;
        Ok(Speeds {
            bare,
            capped: capped / (SHARE * bare),
            beside: beside / (SHARE * bare),
            backlog: neighbour / backlog,
        })
    }

    /// Without Tessera, or under `tessera run` with half of both GPUs.
    fn start(&self, shape: &str, policy: Option<&str>) -> anyhow::Result<Running> {
        let mut command = match policy {
            None => Command::new(&self.program),
            Some(policy) => {
                let mut run = Command::new(artefacts().tessera());
                run.args(["run", "--memory", "1GiB", "--context-overhead", "32MiB", "--cores"])
                    .args([&format!("{}", SHARE * 100.0), "--policy", policy, "--"])
                    .arg(&self.program);
                run
            }
        };
        command.args([shape, &LENGTH.as_millis().to_string()]).envs(self.envs());
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Ok(Running(child.with_context(|| format!("cannot start {command:?}"))?))
    }

    fn envs(&self) -> [(&'static str, PathBuf); 4] {
        let at = |name: &str| Path::join(self.dir.path(), name);
        [
            ("LD_LIBRARY_PATH", artefacts().sim_dir()),
            ("SIMGPU_CONFIG", at("simgpu.toml")),
            ("SIMGPU_STATE", at("simgpu.state")),
            ("XDG_RUNTIME_DIR", at("run")),
        ]
    }
}

/// A program; killed when dropped.
struct Running(Child);

impl Running {
    /// Steps a second.
    fn rate(mut self) -> anyhow::Result<f64> {
        let begin = Instant::now();
        while self.0.try_wait()?.is_none() {
            anyhow::ensure!(begin.elapsed() < LENGTH + PATIENCE, "it hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        let out = std::io::read_to_string(self.0.stdout.take().context("piped")?)?;
        let steps = out.lines().find_map(|line| line.strip_prefix("steps "));
        let steps: f64 = steps.context("it does not say its steps")?.parse()?;
        Ok(steps / LENGTH.as_secs_f64())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn run(report: &mut Report) -> anyhow::Result<()> {
    let place = Place::new()?;
    let (mut capped, mut beside, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    let mut detail = Map::new();
    for shape in SHAPES {
        crate::note(shape);
        let seen = place.speeds(shape).context(shape)?;
        capped.push(seen.capped);
        beside.push(seen.beside);
        lost.push((SHARE - seen.backlog) * 100.0);
        let row = json!({
            "bare_steps_per_second": seen.bare,
            "capped": seen.capped,
            "beside": seen.beside,
            "backlog": seen.backlog,
        });
        detail.insert(shape.into(), row);
    }
    let worst = |values: Vec<f64>| Sample::new(values).quantile(0.0);
    let what = "collectives under a cap, to share × bare";
    report.at_least("collective_efficiency", what, "", worst(capped), 0.9);
    let what = "collectives beside a backlog, to share × bare";
    report.at_least("collective_efficiency_beside", what, "", worst(beside), 0.9);
    let most = lost.into_iter().fold(0.0, f64::max);
    let what = "the backlog beside them: points below its share";
    report.figure("collective_neighbour_loss_pp", what, "pp", most, 2.0);
    report.put("collective_detail", Value::Object(detail));
    Ok(())
}
