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

/// Whether a test may go without what must be fetched: anywhere but on CI.
#[must_use]
pub fn may_skip() -> bool {
    std::env::var_os("CI").is_none_or(|ci| ci.is_empty() || ci == "false")
}

/// A directory with NVIDIA's own `libcuda.so.1` and `libnvidia-ml.so.1` from Debian's non-free
/// archive, fetched once. The error says why it can't be had.
pub fn real_driver() -> Result<PathBuf, String> {
    let dir = target_dir().join("real-libcuda");
    fetch("fetch-libcuda.sh", &[dir.as_os_str()])?;
    Ok(dir.join("lib"))
}

/// A directory into which these packages of a Debian suite are unpacked, fetched once and not
/// installed. The error says why it can't be had.
pub fn packages(suite: &str, packages: &[&str]) -> Result<PathBuf, String> {
    let dir = target_dir().join("debian").join(format!("{suite}-{}", packages.join("-")));
    let mut arguments = vec![dir.as_os_str(), OsStr::new(suite), OsStr::new("main")];
    arguments.extend(packages.iter().map(OsStr::new));
    fetch("fetch-packages.sh", &arguments)?;
    Ok(dir)
}

/// A program: the installed one, else that of these Debian packages, which are unpacked and not installed. The
/// error says why it can't be had.
pub fn program(name: &str, suite: &str, names: &[&str]) -> Result<PathBuf, String> {
    let unpacked = || packages(suite, names).map(|dir| dir.join("usr/bin").join(name));
    on_path(name).map_or_else(unpacked, Ok)
}

/// An installed program.
#[must_use]
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The Python with what the checks of `deploy/` need: Helm's engine, hadolint, an evaluator of CEL. Fetched
/// once. The error says why it can't be had.
pub fn deploy_tools() -> Result<PathBuf, String> {
    let dir = target_dir().join("deploy-tools");
    fetch("deploy/setup.sh", &[dir.as_os_str()])?;
    Ok(dir.join("bin/python"))
}

/// The Python with what the page's tests need, fetched once, and the path of the installed Chromium. The error says why
/// they can't be had.
pub fn page_tools() -> Result<(PathBuf, String), String> {
    let dir = target_dir().join("page-tools");
    let chromium = fetch("suites/page/setup.sh", &[dir.as_os_str()])?;
    Ok((dir.join("bin/python"), chromium))
}

/// Runs one of the checks of a Python script, which prints "done" at its end.
///
/// # Panics
/// The check fails; the text has what it printed.
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

/// Runs a script of this directory that exits with 75 (EX_TEMPFAIL) where something can't be had; what it
/// prints.
fn fetch(script: &str, arguments: &[&OsStr]) -> Result<String, String> {
    let name = format!("tests/{script}");
    let fetch = Command::new(workspace().join(&name))
        .args(arguments)
        .output()
        .map_err(|e| format!("{name}: {e}"))?;
    let said = String::from_utf8_lossy(&fetch.stderr).trim().to_owned();
    match fetch.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&fetch.stdout).trim().to_owned()),
        Some(75) => Err(said),
        _ => panic!("{name} failed ({}): {said}", fetch.status),
    }
}

/// The Python of the environment that `tests/python/setup.sh` makes.
pub fn python() -> Result<PathBuf, String> {
    let python = workspace().join(".venv/bin/python");
    if python.exists() && workspace().join(".venv/.requirements").exists() {
        Ok(python)
    } else {
        Err("no .venv: run tests/python/setup.sh (make test does)".to_owned())
    }
}

/// The include directories of the CUDA and NVML headers in that environment.
pub fn headers() -> Result<Vec<PathBuf>, String> {
    python()?;
    let lib = workspace().join(".venv/lib");
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
    if found.is_empty() {
        Err("no headers in .venv: run tests/python/setup.sh".into())
    } else {
        Ok(found)
    }
}
