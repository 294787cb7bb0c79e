//! `cuda-bindings`, `cuda-core`, `numba-cuda`, `nvidia-ml-py`, `nvitop` and
//! `tinygrad`, unmodified, on the simulated machine: bare, and held to a quota.

use std::time::Duration;

use tessera_harness::{Arbiter, MIB, Pages, Preloaded, SimGpu, artefacts, external, workspace};
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_YIELD};

/// Runs `tests/python/<script>` on a machine of its own, with the quota if there is one.
fn client(script: &str, limit: Option<u64>) {
    let sim = SimGpu::start_default();
    let uuids: Vec<&str> = (0..sim.gpu_count()).map(|i| sim.uuid(i)).collect();
    client_on(&sim, script, &uuids, limit, &[]);
}

/// The same on this machine, whose GPUs are `uuids`.
fn client_on(
    sim: &SimGpu,
    script: &str,
    uuids: &[&str],
    limit: Option<u64>,
    envs: &[(&str, &str)],
) {
    let python = match external::python_of("clients") {
        Ok(python) => python,
        Err(reason) => return external::skip(script, &reason),
    };
    let pages = limit
        .map(|limit| Pages::create(&uuids.iter().map(|uuid| (*uuid, limit)).collect::<Vec<_>>()));
    let program = match &pages {
        None => Preloaded::bare(python),
        Some(pages) => Preloaded::new(python).pages(pages),
    };
    let mut program = program
        .sim(sim)
        // The test leaves nothing in the source tree.
        .arg("-B")
        .arg(workspace().join("tests/python").join(script))
        .env("TEST_UUIDS", uuids.join(","))
        .env("TEST_SIMGPU_CTL", artefacts().simgpu_ctl())
        // Compilers take their time on a busy machine.
        .timeout(Duration::from_secs(180));
    for (name, value) in envs {
        program = program.env(name, value);
    }
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

/// A client under a gate that opens and closes, as beside a busy neighbour.
fn gated_client(script: &str) {
    let python = match external::python_of("clients") {
        Ok(python) => python,
        Err(reason) => return external::skip(script, &reason),
    };
    let sim = SimGpu::start_default();
    let uuids: Vec<&str> = (0..sim.gpu_count()).map(|i| sim.uuid(i)).collect();
    let pages = Pages::create(&uuids.iter().map(|uuid| (*uuid, 700 * MIB)).collect::<Vec<_>>());
    let arbiter = Arbiter::take_on(&pages);
    let program = Preloaded::new(python)
        .pages(&pages)
        .sim(&sim)
        .arg("-B")
        .arg(workspace().join("tests/python").join(script))
        .env("TEST_UUIDS", uuids.join(","))
        .env("TEST_SIMGPU_CTL", artefacts().simgpu_ctl())
        .env("TEST_LIMIT", (700 * MIB).to_string())
        .timeout(Duration::from_secs(180));
    let (over, ended) = std::sync::mpsc::channel::<()>();
    let out = std::thread::scope(|scope| {
        let neighbour = scope.spawn(move || {
            for turn in 0u32.. {
                arbiter.set(if turn % 4 == 3 { GATE_YIELD } else { GATE_OPEN });
                if ended.recv_timeout(Duration::from_millis(4)).is_ok() {
                    return;
                }
                arbiter.set(GATE_CLOSED);
                if ended.recv_timeout(Duration::from_millis(2)).is_ok() {
                    return;
                }
            }
        });
        let out = program.run();
        let _ = over.send(());
        neighbour.join().expect("it only opens and closes");
        out
    });
    assert!(out.success() && out.stdout.ends_with("done\n"), "{out}");
    assert!(out.stderr.lines().all(|line| line.starts_with("tessera: out of memory")), "{out}");
}

#[test]
fn cuda_bindings_runs_beside_a_neighbour_as_it_does_alone() {
    gated_client("cuda_bindings_client.py");
}

#[test]
fn cuda_core_runs_beside_a_neighbour_as_it_does_alone() {
    gated_client("cuda_core_client.py");
}

#[test]
fn numba_cuda_runs_beside_a_neighbour_as_it_does_alone() {
    gated_client("numba_client.py");
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
fn nvitop_runs_on_the_bare_simulated_driver() {
    client("nvitop_client.py", None);
}

#[test]
fn nvitop_sees_the_quota() {
    client("nvitop_client.py", Some(700 * MIB));
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
fn tinygrad_runs_on_the_bare_simulated_driver() {
    client("tinygrad_client.py", None);
}

#[test]
fn tinygrad_is_held_to_its_quota() {
    client("tinygrad_client.py", Some(700 * MIB));
}

#[test]
fn tinygrad_runs_beside_a_neighbour_as_it_does_alone() {
    gated_client("tinygrad_client.py");
}

#[test]
fn numba_is_held_to_its_quota() {
    client("numba_client.py", Some(700 * MIB));
}

/// Two instances, and CUDA set to use the second.
fn mig_client(limit: Option<u64>) {
    let parent = "GPU-7e55e7a0-0000-4000-8000-000000000000";
    let sim = SimGpu::start(&format!(
        "[memory]\ncontext_overhead = \"64MiB\"\n[[gpu]]\nuuid = \"{parent}\"\nmemory = \"8GiB\"\n\
         mig = [\"1g.2gb\", \"2g.4gb\"]\n"
    ));
    let instances =
        ["MIG-7e55e7a0-0101-4000-8000-000000000000", "MIG-7e55e7a0-0201-4000-8000-000000000000"];
    let envs = [("CUDA_VISIBLE_DEVICES", instances[1]), ("TEST_PARENT", parent)];
    client_on(&sim, "mig_client.py", &instances, limit, &envs);
}

#[test]
fn python_clients_see_the_instances_of_a_gpu_in_mig_mode() {
    mig_client(None);
}

#[test]
fn python_clients_see_the_quota_on_an_instance() {
    mig_client(Some(700 * MIB));
}
