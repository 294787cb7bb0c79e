//! `tests/gpu/run`, the suite for real GPUs, works: its parts without PyTorch run on the simulated one. What it
//! measures there depends on how busy this machine is; that it measures does not.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tessera_harness::{artefacts, workspace};

use crate::{said, until};

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(workspace().join("tests/gpu/run"));
    command.arg("--artefacts").arg(artefacts().dir).arg("--out").arg(dir.join("report.md"));
    command.args(args);
    command
}

fn suite(args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a writable temporary directory");
    command(dir.path(), args).output().expect("python3 is on the PATH")
}

#[test]
fn its_checks_hold_on_the_simulated_gpu() {
    let out = suite(&["--simulated"]);
    let said = said(&out);
    assert_eq!(out.status.code(), Some(0), "{said}");
    for check in ["held, every total is the quota", "greedy by vmm is refused at the quota"] {
        assert!(said.contains(&format!("PASS  {check}")), "{check}: {said}");
    }
}

/// Of those that do not hang on how busy this machine is.
#[test]
fn what_is_known_of_hardware_is_confirmed_and_by_the_old_beliefs_refuted() {
    for (beliefs, verdict) in [("new", "PASS"), ("old", "FAIL")] {
        let said = said(&suite(&["findings", "--simulated", "--beliefs", beliefs]));
        for belief in [
            "reserved",
            "handles",
            "pinning",
            "managed",
            "imports",
            "lock",
            "creations",
            "host",
            "queue",
            "queues",
            "kernels",
            "chained",
        ] {
            assert!(said.contains(&format!("\n{verdict}  {belief}: ")), "{belief}: {said}");
        }
        assert!(!said.contains("the probe ends in order"), "{said}");
    }
}

#[test]
fn without_a_gpu_it_says_so_and_what_to_do() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let out = suite(&[]);
    let said = said(&out);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("no NVIDIA GPU here") && said.contains("--simulated"), "{said}");
}

#[test]
fn its_own_logic_holds() {
    let out = Command::new("python3")
        .arg("-B")
        .arg(workspace().join("tests/gpu/selftest.py"))
        .output()
        .expect("python3 is on the PATH");
    assert!(out.status.success(), "{}", said(&out));
}

/// The lines of the phase `share`, the first of which describes the machine.
fn results(dir: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(dir.join("report.jsonl")).unwrap_or_default();
    lines.lines().map(|line| serde_json::from_str(line).expect("whole lines of JSON")).collect()
}

fn of<'a>(results: &'a [Value], part: &str) -> Vec<&'a Value> {
    results.iter().filter(|line| line["part"] == part).collect()
}

fn case<'a>(results: &'a [Value], part: &str, name: &str) -> &'a Value {
    let found = of(results, part).into_iter().find(|line| line["case"] == name);
    found.unwrap_or_else(|| panic!("no {name:?} in {part}: {results:#?}"))
}

/// A figure, or all of a list of them, above 0.
fn positive(line: &Value, key: &str) -> bool {
    let above = |value: &Value| value.as_f64().is_some_and(|v| v > 0.0 && v.is_finite());
    match &line[key] {
        Value::Array(values) => !values.is_empty() && values.iter().all(above),
        value => above(value),
    }
}

#[test]
fn time_is_measured_on_the_simulated_gpu() {
    let dir = tempfile::tempdir().expect("a writable temporary directory");
    let out = command(dir.path(), &["share", "--simulated"]).output().expect("python3 is there");
    let (said, results) = (said(&out), results(dir.path()));
    for part in ["footprint", "marks", "leases", "decode", "exchange", "lone"] {
        assert!(said.contains(&format!("PASS  {part} is measured")), "{part}: {said}");
    }
    assert_eq!(out.status.code(), Some(0), "{said}");

    // Nothing of the simulator's can be taken for a GPU's.
    assert!(results[1..].iter().all(|line| line["gpu"] == "simulated"), "{results:#?}");
    let report = fs::read_to_string(dir.path().join("report.md")).expect("a report");
    let tables = report.matches("\n## ").count() - ["Surprises", "share"].len();
    assert_eq!(report.matches("Figures of the simulator").count(), tables, "{report}");

    let mib = |name: &str| case(&results, "footprint", name)["mib"].as_f64();
    assert_eq!(mib("context: by NVML for the process"), Some(64.0));
    assert_eq!(mib("pool: empty, grows for 1 B"), Some(32.0));
    assert_eq!(mib("cuMemAlloc of 2097153 B takes"), Some(4.0));
    for name in ["stack: limit raised to 8192 B", "heap: limit raised to 1024 MiB"] {
        assert!(positive(case(&results, "footprint", name), "expected_mib"));
    }

    for name in ["launch_host_ns", "event_record_host_ns", "write_value_host_ns", "kernel_us"] {
        assert!(positive(case(&results, "marks", name), "p50"), "{name}");
    }
    for name in ["seen_by_word_us", "seen_by_event_query_us"] {
        let seen = case(&results, "marks", name);
        assert!(positive(seen, "p50") && seen["p50"].as_f64() <= seen["p99"].as_f64(), "{seen}");
    }
    assert!(case(&results, "marks", "event_gpu_ns")["p50"].is_f64());

    for (name, tenants) in [
        ("alone, bare", 1),
        ("alone, leases", 1),
        ("50/50", 2),
        ("two, the driver's time-slicing", 2),
        ("80/20", 2),
        ("strict 25, alone", 1),
        ("50/30/20", 3),
        ("strict 25 and strict 50", 2),
        ("50/50, graphs of 8 ms", 2),
        ("strict 25, graphs of 8 ms", 1),
    ] {
        let line = case(&results, "leases", name);
        for key in ["units_per_s", "got_pct", "longest_wait_ms", "gpu_time_pct"] {
            let many = line[key].as_array().map(Vec::len);
            assert!(many == Some(tenants) && positive(line, key), "{name}, {key}: {line}");
        }
        let parts: f64 =
            line["gpu_time_pct"].as_array().into_iter().flatten().filter_map(Value::as_f64).sum();
        assert!((parts - 100.0).abs() < 0.01, "{line}");
        assert_eq!(line["handovers"].is_u64(), tenants > 1, "{line}");
        let is_capped = name.starts_with("strict");
        assert_eq!(line["off_the_cap_pct_of_it"].is_array(), is_capped, "{line}");
        let is_divided = tenants > 1 && !is_capped && !name.contains("slicing");
        assert_eq!(line["share_error_pp"].is_f64(), is_divided, "{line}");
    }

    for sharing in
        ["dedicated", "two, the driver's time-slicing", "two, leases 50/50", "alone, leases"]
    {
        for (mode, requests) in [("graphs", 1), ("eager", 8), ("graphs", 32)] {
            let line = case(&results, "decode", &format!("{sharing}, {mode}, {requests}"));
            for key in ["tokens_per_s", "p50_ms", "throughput_pct", "p50_pct", "p99_pct"] {
                assert!(positive(line, key), "{key}: {line}");
            }
            assert!(line["p50_ms"].as_f64() <= line["p99_ms"].as_f64(), "{line}");
        }
    }
    for (name, reason) in [("PyTorch", "simulator"), ("two, MPS", "no MPS")] {
        let line = case(&results, "decode", name);
        assert!(line["not_measured"].as_str().is_some_and(|r| r.contains(reason)), "{line}");
    }

    assert!(positive(case(&results, "exchange", "bare, by streams"), "steps_per_s"));
    for name in ["one tenant", "a tenant each, 50/50", "one tenant, 50 beside a backlog of 50"] {
        // What hangs is a result of its own.
        let line = case(&results, "exchange", &format!("{name}, by streams"));
        assert!(line["steps_per_s"].is_f64() || line["not_measured"].is_string(), "{line}");
    }

    let launch = case(&results, "lone", "launch");
    assert!(positive(launch, "bare_ns") && positive(launch, "held_ns"), "{launch}");
}

/// Whether a process's environment names the directory.
fn lives_in(dir: &Path) -> bool {
    let needle = dir.as_os_str().as_encoded_bytes();
    let processes = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let mut environments = processes.filter_map(|p| fs::read(p.path().join("environ")).ok());
    environments.any(|text| text.windows(needle.len()).any(|part| part == needle))
}

#[test]
fn a_run_that_is_interrupted_keeps_what_it_measured_and_leaves_nobody() {
    let dir = tempfile::tempdir().expect("a writable temporary directory");
    let scratch = dir.path().join("scratch");
    fs::create_dir(&scratch).expect("the directory is writable");
    let mut run: Child = command(dir.path(), &["share", "--simulated", "--parts", "leases"])
        .env("TMPDIR", &scratch)
        .stdout(Stdio::null())
        .spawn()
        .expect("python3 is on the PATH");
    // In the middle of the cases, with tenants that measure.
    until("no result", || (!of(&results(dir.path()), "leases").is_empty()).then_some(()));
    // SAFETY: a child of this process, not waited for yet: the pid is its own.
    unsafe { libc::kill(run.id().cast_signed(), libc::SIGTERM) };
    let status = run.wait().expect("a child of this process");
    assert_eq!(status.code(), Some(130));
    until("somebody is left", || (!lives_in(&scratch)).then_some(()));
    assert_eq!(fs::read_dir(&scratch).expect("it is there").count(), 0, "files are left");
    let report = fs::read_to_string(dir.path().join("report.md")).expect("a report");
    assert!(report.contains("it was interrupted"), "{report}");
    assert!(report.contains("| alone, bare |"), "{report}");
}
