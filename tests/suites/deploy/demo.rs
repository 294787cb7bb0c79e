//! `tessera demo`: that it passes where quotas hold, and fails where they do not.

use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use tessera_harness::artefacts;

fn demo(program: &std::path::Path, tmp: &TempDir) -> Output {
    Command::new(program)
        .args(["demo", "--seconds", "6"])
        .env("TMPDIR", tmp.path())
        .stdin(Stdio::null())
        .output()
        .expect("tessera starts")
}

fn temporary() -> TempDir {
    tempfile::tempdir().expect("a writable temporary directory")
}

#[test]
fn quotas_hold_and_nothing_is_left_behind() {
    let tmp = temporary();
    let out = demo(&artefacts().tessera(), &tmp);
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
    assert!(said.ends_with("OK: no quota was exceeded\n"), "{said}");
    // What can be looked at on a node is shown.
    assert!(said.contains("$ tessera sandbox explain greedy\ndefault/greedy"), "{said}");
    for tenant in ["chat", "greedy", "crash", "large"] {
        assert!(said.lines().any(|line| line.trim_start().starts_with(tenant)), "{tenant}: {said}");
    }
    // The same load three ways; that Tessera's share helps is part of the exit status.
    for way in ["answer alone", "with Tessera", "without Tessera"] {
        assert!(said.lines().any(|line| line.trim_start().starts_with(way)), "{way}: {said}");
    }
    assert_eq!(std::fs::read_dir(tmp.path()).expect("just made").count(), 0);
}

#[test]
fn a_shim_that_does_nothing_fails_it() {
    let tmp = temporary();
    // An installation whose shim is a library without a single hook.
    let install = temporary();
    let artefacts = artefacts();
    let program = install.path().join("tessera");
    // Copied, because the program looks beside itself, wherever links lead from.
    std::fs::copy(artefacts.tessera(), &program).expect("a copy");
    symlink(artefacts.sim_dir(), install.path().join("sim")).expect("a link");
    symlink(artefacts.tenant(), install.path().join("tessera-tenant")).expect("a link");
    let built = Command::new("cc")
        .args(["-shared", "-x", "c", "/dev/null", "-o"])
        .arg(install.path().join("libtessera.so"))
        .status()
        .expect("a C compiler");
    assert!(built.success());
    let out = demo(&program, &tmp);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    // The greedy one gets more than its quota (6), or a neighbour finds no memory (2).
    let expected = ["greedy: its container ended with exit code 6", "ended with exit code 2"];
    assert!(expected.iter().any(|reason| said.contains(reason)), "{said}");
    assert_eq!(std::fs::read_dir(tmp.path()).expect("just made").count(), 0);
}
