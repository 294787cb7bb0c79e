//! `tessera run`: a quota for one command tree, from outside.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tessera_tests::{SimGpu, artefacts};

/// A base directory of its own, so that what is left behind shows.
struct Bench {
    sim: SimGpu,
    base: TempDir,
}

impl Bench {
    fn new() -> Self {
        let sim = SimGpu::start_default();
        Self { sim, base: tempfile::tempdir().expect("a writable temporary directory") }
    }

    fn run(&self, options: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(artefacts().tessera());
        run.arg("run").arg("--sim").args(options).arg("--").args(command);
        run.envs(self.sim.envs()).env("XDG_RUNTIME_DIR", self.base.path());
        run.stdin(Stdio::null());
        run
    }

    fn output(&self, options: &[&str], command: &[&str]) -> Output {
        self.run(options, command).output().expect("tessera starts")
    }

    fn left_behind(&self) -> usize {
        std::fs::read_dir(self.base.path()).expect("just made").count()
    }
}

fn tenant() -> String {
    artefacts().tenant().to_str().expect("a UTF-8 path").to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_command_tree_is_held_to_its_quota_on_every_gpu() {
    let bench = Bench::new();
    for device in ["0", "1"] {
        let greedy = [
            &tenant(),
            "--device",
            device,
            "--processes",
            "3",
            "greedy",
            "--min-chunk=2Mi",
            "--at-most=2Gi",
            // Peaks are looked for every 20 ms.
            "--for=1",
        ];
        let out = bench.output(&["-m", "1GiB", "-v"], &greedy);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let said = text(&out.stderr);
        let lines: Vec<&str> = said.lines().filter(|l| l.contains("peak use")).collect();
        let used = lines[usize::from(device == "1")];
        assert!(used.ends_with("peak use 1 GiB of 1 GiB"), "{lines:?}");
        let unused = lines[usize::from(device == "0")];
        assert!(unused.ends_with("peak use 0 B of 1 GiB"), "{lines:?}");
    }
    assert_eq!(bench.left_behind(), 0);
}

#[test]
fn without_v_nothing_is_printed() {
    let out = Bench::new().output(&["-m", "1Gi"], &["true"]);
    assert_eq!((out.status.code(), out.stdout.len(), out.stderr.len()), (Some(0), 0, 0));
}

#[test]
fn the_exit_status_is_the_commands() {
    let bench = Bench::new();
    for (script, code) in [("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)] {
        let out = bench.output(&["-m", "1Gi"], &["sh", "-c", script]);
        assert_eq!(out.status.code(), Some(code), "{script}");
    }
    assert_eq!(bench.output(&["-m", "1Gi"], &["/nonexistent"]).status.code(), Some(127));
    assert_eq!(bench.output(&["-m", "1Gi"], &["/etc/passwd"]).status.code(), Some(126));
    assert_eq!(bench.left_behind(), 0);
}

#[test]
fn a_signal_reaches_the_command_and_the_pages_go() {
    let bench = Bench::new();
    let mut run = bench.run(&["-m", "1Gi"], &[&tenant(), "hold", "--bytes=1Mi"]);
    let mut child = run.stdout(Stdio::piped()).spawn().expect("tessera starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("the tenant speaks");
    assert!(line.contains("ready"), "{line}");
    assert_eq!(bench.left_behind(), 1);
    let pid = i32::try_from(child.id()).expect("a pid");
    // SAFETY: our own child, not yet waited for.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    // It ends in order at SIGTERM, and says so; any other end would have another code.
    line.clear();
    out.read_line(&mut line).expect("the tenant speaks");
    assert!(line.contains("done"), "{line}");
    assert_eq!(child.wait().expect("our child").code(), Some(0));
    assert_eq!(bench.left_behind(), 0);
}

#[test]
fn only_the_gpus_named_can_be_used() {
    let bench = Bench::new();
    let hold = |device: &str| {
        let command = [&tenant(), "--device", device, "hold", "--bytes=1Mi", "--for=1"];
        bench.output(&["-m", "1Gi", "--gpu", bench.sim.uuid(1)], &command).status.code()
    };
    assert_eq!(hold("0"), Some(2), "out of memory");
    assert_eq!(hold("1"), Some(0));
}

#[test]
fn what_is_wrong_is_said_and_what_to_do() {
    let bench = Bench::new();
    for (options, says) in [
        (&["-m", "100Mi"][..], "--context-overhead"),
        (&["-m", "100Gi"], "8 GiB"),
        (&["-m", "1Gi", "--gpu", "9"], "no such GPU; there is 0"),
        (&["-m", "1Gi", "--shim", "/nonexistent.so"], "/nonexistent.so"),
    ] {
        let out = bench.output(options, &["true"]);
        assert_eq!(out.status.code(), Some(125), "{options:?}");
        assert!(text(&out.stderr).contains(says), "{options:?}: {}", text(&out.stderr));
    }
    let out = bench.output(&["-m", "4 apples"], &["true"]);
    assert_eq!(out.status.code(), Some(64));
    assert_eq!(bench.left_behind(), 0);
}

#[test]
fn what_a_killed_run_left_is_swept_by_a_later_one() {
    let bench = Bench::new();
    let mut run = bench.run(&["-m", "1Gi"], &["sh", "-c", "echo; exec sleep 1000"]);
    // The command outlives a killed run; it must not outlive this test.
    let mut child = run.stdout(Stdio::piped()).spawn().expect("tessera starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    out.read_line(&mut String::new()).expect("the command runs");
    let sleeping = children_of(child.id());
    child.kill().expect("our child");
    child.wait().expect("our child");
    let left = std::fs::read_dir(bench.base.path()).expect("just made").flatten().next();
    let left = left.expect("what the killed run left").path();
    for pid in sleeping {
        // SAFETY: a grandchild that sleeps for a thousand seconds: the pid is still its own.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    bench.output(&["-m", "1Gi"], &["true"]);
    assert!(left.exists(), "too young to be judged");
    age(&left, Duration::from_secs(120));
    bench.output(&["-m", "1Gi"], &["true"]);
    assert!(!left.exists());
}

fn children_of(pid: u32) -> Vec<i32> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(path).unwrap_or_default();
        let pids: Vec<i32> = children.split_whitespace().filter_map(|p| p.parse().ok()).collect();
        if !pids.is_empty() {
            return pids;
        }
        assert!(Instant::now() < deadline, "no children of {pid}");
        std::thread::yield_now();
    }
}

fn age(dir: &Path, by: Duration) {
    let then = std::time::SystemTime::now() - by;
    let dir = std::fs::File::open(dir).expect("a directory");
    dir.set_modified(then).expect("our own directory");
}
