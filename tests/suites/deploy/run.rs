//! `tessera run`: a quota for one command tree, from outside.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use tessera_harness::{Conversation, MIB, Preloaded, SimGpu, artefacts, compile_c};

use crate::text;

/// A base directory of its own, so that what is left behind shows.
struct Bench {
    sim: SimGpu,
    base: TempDir,
}

impl Bench {
    fn new() -> Self {
        let sim = SimGpu::start_default().that_writes();
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
fn the_exit_status_is_the_commands_and_without_v_nothing_is_printed() {
    let bench = Bench::new();
    let out = bench.output(&["-m", "1Gi"], &["true"]);
    assert_eq!((out.status.code(), out.stdout.len(), out.stderr.len()), (Some(0), 0, 0));
    for (script, code) in [("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)] {
        let out = bench.output(&["-m", "1Gi"], &["sh", "-c", script]);
        assert_eq!(out.status.code(), Some(code), "{script}");
    }
    assert_eq!(bench.output(&["-m", "1Gi"], &["/nonexistent"]).status.code(), Some(127));
    assert_eq!(bench.output(&["-m", "1Gi"], &["/etc/passwd"]).status.code(), Some(126));
    assert_eq!(bench.left_behind(), 0);
}

/// What it says at the end of a run: bytes of peak use of the first GPU, and requests refused.
fn said_at_the_end(out: &Output) -> (String, String) {
    let said = text(&out.stderr);
    let peak = said.split("peak use ").nth(1).and_then(|rest| rest.split(" of ").next());
    let refused = said.lines().find_map(|line| {
        line.strip_prefix("tessera: ")?.strip_suffix(" requests refused").map(str::to_owned)
    });
    (peak.unwrap_or_else(|| panic!("{said}")).to_owned(), refused.expect("refusals"))
}

/// However short its life is, whichever process looks at it when or takes its slot over.
#[test]
fn a_programs_peak_and_refusals_are_said_however_short_it_lived() {
    let bench = Bench::new();
    let brief = compile_c("brief").to_str().expect("a UTF-8 path").to_owned();
    let options = ["-m", "1GiB", "-v", "--gpu", "0"];
    for run in 0..40 {
        let out = bench.output(&options, &[&brief]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert_eq!(said_at_the_end(&out), ("192 MiB".into(), "1".into()), "run {run}");
    }
    // One after the other, each in the slot of the one before, and some beside one another.
    let script = "for i in 1 2 3 4 5; do $0 || exit; done; $0 & $0 & wait";
    for run in 0..5 {
        let out = bench.output(&options, &["sh", "-c", script, &brief]);
        let (peak, refused) = said_at_the_end(&out);
        assert_eq!(refused, "7", "run {run}: {}", text(&out.stderr));
        // Of two at once, and of those whose bytes the driver still has.
        let mebibytes = peak.strip_suffix(" MiB").and_then(|number| number.parse::<u64>().ok());
        assert!(mebibytes.is_some_and(|peak| (192..1024).contains(&peak)), "run {run}: {peak}");
    }
}

#[test]
fn only_the_gpus_named_can_be_seen() {
    let bench = Bench::new();
    let visible =
        bench.output(&["-m", "1Gi", "--gpu", "1"], &["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    assert_eq!(text(&visible.stdout).trim(), bench.sim.uuid(1));
    let hold = |gpu: &str, device: &str, envs: &[(&str, &str)]| {
        let command = [&tenant(), "--device", device, "hold", "--bytes=1Mi", "--for=1"];
        let mut run = bench.run(&["-m", "1Gi", "--gpu", gpu], &command);
        let out = run.envs(envs.iter().copied()).output().expect("tessera starts");
        (out.status.code(), text(&out.stderr))
    };
    for (gpu, other) in [("0", "1"), ("1", "0")] {
        // Whatever was said before, its own GPU is the only one, and the first.
        for envs in [&[][..], &[("CUDA_VISIBLE_DEVICES", other)]] {
            assert_eq!(hold(gpu, "0", envs).0, Some(0), "{gpu}, {envs:?}");
            let (code, said) = hold(gpu, "1", envs);
            assert_eq!(code, Some(3), "an error other than out of memory: {said}");
            assert!(said.contains("101"), "no such device: {said}");
        }
    }
}

/// A process that is shown another GPU all the same, as in a privileged pod.
#[test]
fn a_context_on_a_gpu_that_was_not_given_is_refused_as_a_device_that_is_none() {
    let bench = Bench::new();
    let command =
        ["env", "-u", "CUDA_VISIBLE_DEVICES", &tenant(), "--device", "1", "hold", "--bytes=1Mi"];
    let out = bench.output(&["-m", "1Gi", "--gpu", "0"], &command);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert!(said.contains("101"), "{said}");
    let line = said.lines().find(|line| line.starts_with("tessera: invalid device")).expect(&said);
    assert!(line.contains("was not given") && line.contains(bench.sim.uuid(0)), "{line}");
    assert!(!line.contains("bytes"), "{line}");
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
    for options in
        [&["-m", "4 apples"][..], &["-m", "1Gi", "--cores", "0"], &["-m", "1Gi", "--policy", "x"]]
    {
        assert_eq!(bench.output(options, &["true"]).status.code(), Some(64), "{options:?}");
    }
    assert_eq!(bench.left_behind(), 0);
}

/// "auto": by the multiprocessors that NVML reports, 2,048 threads each of an A100.
#[test]
fn the_charge_for_a_context_follows_the_gpu() {
    let sim = SimGpu::start(
        "[memory]\ncontext_overhead = \"auto\"\nmodule_overhead = 0\n\
         [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000002\"\nmemory = \"16GiB\"\n\
         sm_count = 108\ncompute_capability = \"8.0\"\n",
    );
    let run = Preloaded::bare(artefacts().tessera()).sim(&sim);
    let run = ["run", "--memory", "1Gi", "--shim"].iter().fold(run, |run, word| run.arg(word));
    let run = run.arg(artefacts().shim()).arg("--").arg(compile_c("calls"));
    let mut tenant = Conversation::start(run);
    tenant.must("init");
    tenant.must("retain 0");
    assert_eq!(tenant.ask("info").values, [1024 * MIB - 108 * 7 * MIB / 2, 1024 * MIB]);
}

/// Reads lines of the command until one is `wanted`.
fn await_line(out: &mut impl BufRead, wanted: &str) {
    let mut line = String::new();
    while line.trim_end() != wanted {
        line.clear();
        assert_ne!(out.read_line(&mut line).expect("it speaks"), 0, "no {wanted}");
    }
}

#[test]
fn every_signal_that_can_be_reaches_the_command() {
    let bench = Bench::new();
    let names = [
        "HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "STKFLT",
        "XCPU", "WINCH", "CONT",
    ];
    let traps: String = names.iter().map(|name| format!("trap 'echo {name}' {name}; ")).collect();
    let script = format!("{traps} trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done");
    let mut run = bench.run(&["-m", "1Gi"], &["bash", "-c", &script]);
    // Whatever this test itself was started with: shells ignore some for what runs in the background.
    // SAFETY: signal(2) may be called between fork and exec.
    unsafe {
        run.pre_exec(|| {
            (1..32).for_each(|signal| {
                libc::signal(signal, libc::SIG_DFL);
            });
            Ok(())
        });
    }
    let mut child = run.stdout(Stdio::piped()).spawn().expect("tessera starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    await_line(&mut out, "ready");
    for name in names {
        let mut kill = Command::new("kill");
        let kill = kill.args(["-s", name, &child.id().to_string()]).status();
        assert!(kill.expect("kill starts").success(), "{name}");
        await_line(&mut out, name);
    }
    // SAFETY: our own child, not yet waited for.
    unsafe { libc::kill(i32::try_from(child.id()).expect("a pid"), libc::SIGTERM) };
    assert_eq!(child.wait().expect("our child").code(), Some(3));
    assert_eq!(bench.left_behind(), 0);
}

#[test]
fn what_is_ignored_stays_ignored() {
    let bench = Bench::new();
    let run = bench.run(&["-m", "1Gi"], &["grep", "SigIgn", "/proc/self/status"]);
    let mut nohup = Command::new("sh");
    nohup
        .args(["-c", "trap '' HUP ALRM; exec \"$@\"", "sh"])
        .arg(run.get_program())
        .args(run.get_args());
    nohup.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let out = nohup.output().expect("sh starts");
    let mask = text(&out.stdout);
    let mask =
        u64::from_str_radix(mask.trim().rsplit('\t').next().expect("a mask"), 16).expect("hex");
    assert_eq!(mask & (1 | 1 << 13), 1 | 1 << 13, "{mask:x}");
}

/// Makes a directory as it may be found.
fn directory(path: &Path, mode: u32, owner: Option<u32>) {
    use std::os::unix::fs::{PermissionsExt, chown};
    std::fs::create_dir(path).expect("a new directory");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("our own");
    if let Some(owner) = owner {
        chown(path, Some(owner), None).expect("root may");
    }
}

#[test]
fn runs_are_only_where_nobody_else_can_change_them() {
    let bench = Bench::new();
    let (runtime, temporary) = (bench.base.path().join("runtime"), bench.base.path().join("tmp"));
    directory(&temporary, 0o1777, None);
    // SAFETY: asks for a number.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut cases = vec![(0o777, None), (0o722, None)];
    if is_root {
        cases.extend([(0o700, Some(12345)), (0o755, Some(12345))]);
    }
    let where_it_is = &["sh", "-c", "echo $TESSERA_DIR"];
    for (mode, owner) in cases {
        directory(&runtime, mode, owner);
        let mut run = bench.run(&["-m", "1Gi"], where_it_is);
        let out = run.env("XDG_RUNTIME_DIR", &runtime).env("TMPDIR", &temporary).output();
        let out = out.expect("tessera starts");
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert!(Path::new(text(&out.stdout).trim()).starts_with(&temporary), "{mode:o} {owner:?}");
        std::fs::remove_dir(&runtime).expect("nothing is in it");
    }
    // Nor where others may move what is in the temporary directory.
    let open = bench.base.path().join("open");
    directory(&open, 0o777, None);
    let mut run = bench.run(&["-m", "1Gi"], &["true"]);
    let out = run.env("XDG_RUNTIME_DIR", "/nonexistent").env("TMPDIR", &open).output();
    let out = out.expect("tessera starts");
    assert_eq!(out.status.code(), Some(125));
    assert!(text(&out.stderr).contains("set XDG_RUNTIME_DIR"), "{}", text(&out.stderr));
}

#[test]
fn a_run_within_a_run_is_refused_and_beside_it_is_not() {
    let bench = Bench::new();
    let tessera = artefacts().tessera().display().to_string();
    let inner = format!("{tessera} run --sim -m 1Gi -- echo held");
    for script in [&inner, &format!("({inner}) & wait $!")] {
        let out = bench.output(&["-m", "1Gi"], &["sh", "-c", script]);
        assert_eq!(out.status.code(), Some(125), "{script}: {}", text(&out.stderr));
        assert_eq!(text(&out.stdout), "", "{script}");
        assert!(text(&out.stderr).contains("side by side"), "{script}: {}", text(&out.stderr));
    }
    // Side by side, and with what an ended run has left in the environment.
    let mut hold = bench.run(&["-m", "1Gi"], &["sh", "-c", "echo ready; read line"]);
    let mut hold = hold.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut out = BufReader::new(hold.stdout.take().expect("piped"));
    await_line(&mut out, "ready");
    let mut beside = bench.run(&["-m", "1Gi"], &["true"]);
    let beside = beside.env("TESSERA_DIR", "/nonexistent/pages").output().expect("it starts");
    assert_eq!(beside.status.code(), Some(0), "{}", text(&beside.stderr));
    drop(hold.stdin.take());
    hold.wait().expect("our child");
    assert_eq!(bench.left_behind(), 0);
}
