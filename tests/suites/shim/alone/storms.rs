//! Processes that die with all that is shown free, and successors that ask for it at once, under
//! `tessera run`: by the driver's account never more than the quota is held, and nothing that is shown
//! free is refused, however long the driver takes to give a dead process's memory back.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use tessera_harness::alone;

use tessera_harness::{MIB, SimGpu, artefacts, compile_c};

/// The quota of each run, its contexts in it.
const QUOTA: u64 = 1024 * MIB;

struct Storm {
    sim: SimGpu,
    mayfly: PathBuf,
    watch: Child,
}

/// What came of the requests of some programs.
#[derive(Debug, PartialEq, Eq)]
struct Requests {
    granted: usize,
    refused: usize,
    failed: usize,
}

impl Storm {
    fn start(teardown_ms: u64, gpu_mib: u64) -> Self {
        let sim = SimGpu::start(&format!(
            "[memory]\nreserved = \"0\"\ncontext_overhead = \"32MiB\"\nteardown_ms = {teardown_ms}.0\n\
             [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"\nmemory = \"{gpu_mib}MiB\"\n"
        ));
        let mayfly = compile_c("mayfly");
        let mut watch = Command::new(&mayfly);
        watch.arg("watch").envs(sim.envs()).env("LD_LIBRARY_PATH", artefacts().sim_dir());
        let watch = watch.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        Self { sim, mayfly, watch }
    }

    /// A run of its own quota, which reports to the file `report`.
    fn run(&self, report: &str, role: &str, args: &[&str]) -> Child {
        let mut run = Command::new(artefacts().tessera());
        run.args(["run", "--sim", "-m", "1GiB", "--context-overhead", "32MiB", "--"]);
        run.arg(&self.mayfly).arg(role).arg(self.sim.scratch().join(report)).args(args);
        run.envs(self.sim.envs()).env("XDG_RUNTIME_DIR", self.sim.scratch());
        run.stdin(Stdio::null()).spawn().expect("tessera starts")
    }

    fn requests(&self, report: &str) -> Requests {
        let text = std::fs::read_to_string(self.sim.scratch().join(report)).unwrap_or_default();
        let count = |what| text.matches(what).count();
        Requests { granted: count('G'), refused: count('R'), failed: count('X') }
    }

    /// The most that the driver had in use.
    fn most(self) -> u64 {
        let mut watch = self.watch;
        drop(watch.stdin.take());
        let out = watch.wait_with_output().expect("our child");
        let text = String::from_utf8(out.stdout).expect("ASCII");
        text.trim().strip_prefix("most=").and_then(|n| n.parse().ok()).expect("a number")
    }
}

/// One after the other, each killed or executing the next.
fn successors(teardown_ms: u64, rounds: usize) {
    for (mode, hold_ms) in [("k", "0"), ("k", "15"), ("e", "0"), ("e", "15"), ("r", "15")] {
        let storm = Storm::start(teardown_ms, 16 * 1024);
        let count = rounds.to_string();
        let mut run = match mode {
            "e" => storm.run(mode, "live", &["e", hold_ms, &count]),
            _ => storm.run(mode, "loop", &[mode, &count, hold_ms]),
        };
        run.wait().expect("our child");
        let all = Requests { granted: rounds, refused: 0, failed: 0 };
        assert_eq!(storm.requests(mode), all, "{mode}, {teardown_ms} ms");
        let most = storm.most();
        assert!(most <= QUOTA, "{mode}, {teardown_ms} ms: the driver held {} MiB", most / MIB);
    }
}

#[test]
fn successors_wait_for_a_driver_that_takes_ten_milliseconds() {
    let _alone = alone();
    successors(10, 8);
}

#[test]
fn successors_wait_for_a_driver_that_takes_half_a_second() {
    let _alone = alone();
    successors(500, 3);
}

#[test]
fn a_crash_loop_takes_nothing_from_its_neighbours() {
    let _alone = alone();
    // Four quotas are all that the GPU has.
    let storm = Storm::start(500, 4 * QUOTA / MIB);
    let mut runs: Vec<Child> = (0..3).map(|_| storm.run("stay", "stay", &["4000"])).collect();
    runs.push(storm.run("crash", "loop", &["k", "6", "5"]));
    for run in &mut runs {
        run.wait().expect("our child");
    }
    let (stay, crash) = (storm.requests("stay"), storm.requests("crash"));
    assert_eq!(crash, Requests { granted: 6, refused: 0, failed: 0 });
    assert!(stay.granted > 100 && stay.refused == 0 && stay.failed == 0, "{stay:?}");
    assert!(storm.most() <= 4 * QUOTA);
}
