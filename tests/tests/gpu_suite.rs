//! `tests/gpu/run`, the suite for real GPUs, works: its parts without PyTorch pass on the simulated one.

use std::process::{Command, Output};

use tessera_tests::{artefacts, workspace};

fn suite(args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a writable temporary directory");
    Command::new(workspace().join("tests/gpu/run"))
        .arg("--artefacts")
        .arg(artefacts().dir())
        .arg("--out")
        .arg(dir.path().join("report.md"))
        .args(args)
        .output()
        .expect("python3 is on the PATH")
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

#[test]
fn its_checks_hold_on_the_simulated_gpu() {
    let out = suite(&["--simulated"]);
    let said = text(&out);
    assert_eq!(out.status.code(), Some(0), "{said}");
    for check in ["held, every total is the quota", "greedy by vmm is refused at the quota"] {
        assert!(said.contains(&format!("PASS  {check}")), "{check}: {said}");
    }
}

#[test]
fn without_a_gpu_it_says_so_and_what_to_do() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let out = suite(&[]);
    let said = text(&out);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("no NVIDIA GPU here") && said.contains("--simulated"), "{said}");
}
