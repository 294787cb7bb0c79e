//! What tests use that nobody here wrote and that must be fetched: NVIDIA's driver library, headers,
//! Python clients, other C libraries and allocators. Without a network a test may go without; on CI it may not.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{target_dir, workspace};

/// Says aloud that a test did not run, past the test harness's capture; on CI that is a failure.
pub fn skip(test: &str, reason: &str) {
    assert!(may_skip(), "{test} can't run, and on CI it must: {reason}");
    let _ = writeln!(std::io::stderr(), "\n*** SKIPPED {test}: {reason}\n");
}

/// What a test needs, if it is there; else the test is skipped.
pub fn or_skip<T>(found: Result<T, String>, test: &str) -> Option<T> {
    found.map_err(|reason| skip(test, &reason)).ok()
}

/// Whether a test may go without what must be fetched: anywhere but on CI.
#[must_use]
pub fn may_skip() -> bool {
    std::env::var_os("CI").is_none_or(|ci| ci.is_empty() || ci == "false")
}

/// Where `tests/setup` has put a thing. The error says that it isn't there.
pub fn fetched(thing: &str) -> Result<PathBuf, String> {
    let setup = Command::new(workspace().join("tests/setup"))
        .arg(thing)
        .env("CARGO_TARGET_DIR", target_dir())
        .output()
        .map_err(|e| format!("tests/setup: {e}"))?;
    let said = String::from_utf8_lossy(&setup.stderr).trim().to_owned();
    match setup.status.code() {
        Some(0) => Ok(PathBuf::from(String::from_utf8_lossy(&setup.stdout).trim())),
        Some(75) => Err(said),
        _ => panic!("tests/setup {thing} failed ({}): {said}", setup.status),
    }
}

/// A directory with NVIDIA's own `libcuda.so.1` and `libnvidia-ml.so.1`, from Debian's non-free archive. The error says
/// why it can't be had.
pub fn real_driver() -> Result<PathBuf, String> {
    fetched("libcuda").map(|root| root.join("usr/lib/x86_64-linux-gnu/nvidia/current"))
}

/// A program: the installed one, else that of the thing of its name. The error says why it can't be had.
pub fn program(name: &str, thing: &str) -> Result<PathBuf, String> {
    on_path(name).map_or_else(|| fetched(thing).map(|root| root.join("usr/bin").join(name)), Ok)
}

/// The Python of an environment that `tests/setup` makes. The error says why it can't be had.
pub fn python_of(thing: &str) -> Result<PathBuf, String> {
    fetched(thing).map(|root| root.join("bin/python"))
}

/// An installed program.
#[must_use]
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Runs one of the checks of a Python script, which prints "done" at its end.
pub fn check(python: &Path, script: &str, name: &str, environment: &[(&str, &OsStr)]) {
    let out = Command::new(python)
        .arg("-B")
        .arg(workspace().join(script))
        .arg(name)
        .envs(environment.iter().copied())
        .output()
        .expect("the environment's Python");
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("done"), "{said}");
}

/// The include directories of the CUDA and NVML headers in that environment.
pub fn headers() -> Result<Vec<PathBuf>, String> {
    let lib = fetched("clients")?.join("lib");
    let mut found = Vec::new();
    for python in std::fs::read_dir(&lib).map_err(|e| format!("{}: {e}", lib.display()))? {
        let nvidia = python.map_err(|e| e.to_string())?.path().join("site-packages/nvidia");
        let Ok(packages) = std::fs::read_dir(nvidia) else { continue };
        for package in packages {
            let include = package.map_err(|e| e.to_string())?.path().join("include");
            if include.is_dir() {
                found.push(include);
            }
        }
    }
    found.sort();
    if found.is_empty() { Err("no headers among the clients".into()) } else { Ok(found) }
}
