//! `cuda-bindings`, `cuda-core`, `numba-cuda` and `nvidia-ml-py`, unmodified, on the simulated machine: bare, and held to a quota.

use std::time::Duration;

use tessera_tests::{MIB, Pages, Preloaded, SimGpu, artefacts, external, workspace};

/// Runs `tests/python/<script>` on a machine of its own, with the quota if there is one.
fn client(script: &str, limit: Option<u64>) {
    let python = match external::python() {
        Ok(python) => python,
        Err(reason) => return external::skip(script, &reason),
    };
    let sim = SimGpu::start_default();
    let uuids: Vec<&str> = (0..sim.gpu_count()).map(|i| sim.uuid(i)).collect();
    let pages = limit
        .map(|limit| Pages::create(&uuids.iter().map(|uuid| (*uuid, limit)).collect::<Vec<_>>()));
    let program = match &pages {
        None => Preloaded::bare(python),
        Some(pages) => Preloaded::new(python).pages(pages),
    };
    let mut program = program
        .sim(&sim)
        // The test leaves nothing in the source tree.
        .arg("-B")
        .arg(workspace().join("tests/python").join(script))
        .env("TEST_UUIDS", uuids.join(","))
        .env("TEST_SIMGPU_CTL", artefacts().simgpu_ctl())
        // Compilers take their time on a busy machine.
        .timeout(Duration::from_secs(180));
    if let Some(limit) = limit {
        program = program.env("TEST_LIMIT", limit.to_string());
    }
    let out = program.run();
    assert!(out.success() && out.stdout.ends_with("done\n"), "{out}");
    // Refusals are explained; nothing else is said.
    assert!(out.stderr.lines().all(|line| line.starts_with("tessera: out of memory")), "{out}");
    if let Some(pages) = &pages {
        assert_eq!(pages.charged(0), 0, "its end gave everything back");
    }
}

#[test]
fn cuda_bindings_runs_on_the_bare_simulated_driver() {
    client("cuda_bindings_client.py", None);
}

#[test]
fn cuda_bindings_is_held_to_its_quota() {
    client("cuda_bindings_client.py", Some(700 * MIB));
}

#[test]
fn nvidia_ml_py_runs_on_the_bare_simulated_driver() {
    client("nvml_client.py", None);
}

#[test]
fn nvidia_ml_py_sees_the_quota() {
    client("nvml_client.py", Some(700 * MIB));
}

#[test]
fn cuda_core_runs_on_the_bare_simulated_driver() {
    client("cuda_core_client.py", None);
}

#[test]
fn cuda_core_is_held_to_its_quota() {
    client("cuda_core_client.py", Some(700 * MIB));
}

#[test]
fn numba_runs_on_the_bare_simulated_driver() {
    client("numba_client.py", None);
}

#[test]
fn numba_is_held_to_its_quota() {
    client("numba_client.py", Some(700 * MIB));
}
