//! Clients that nobody here wrote: `cuda-bindings`, `cuda-core`, `numba-cuda`, `nvidia-ml-py`, `nvitop`,
//! `tinygrad` and `cudarc`, unmodified, on the simulated machine: bare, and held to a quota.

use std::time::Duration;

use tessera_harness::{
    Arbiter, MIB, Output, Pages, Preloaded, SimGpu, artefacts, external, workspace,
};
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_YIELD};

const LIMIT: u64 = 700 * MIB;

/// The quota on each of these GPUs.
fn pages(uuids: &[&str]) -> Pages {
    Pages::create(&uuids.iter().map(|uuid| (*uuid, LIMIT)).collect::<Vec<_>>())
}

/// `tests/python/<script>` on this machine, whose GPUs are `uuids`; nothing where Python is not there.
fn python(sim: &SimGpu, script: &str, uuids: &[&str], pages: Option<&Pages>) -> Option<Preloaded> {
    let python = external::or_skip(external::python_of("clients"), script)?;
    let program = match pages {
        None => Preloaded::bare(python),
        Some(pages) => Preloaded::new(python).pages(pages).env("TEST_LIMIT", LIMIT.to_string()),
    };
    Some(
        program
            .sim(sim)
            // The test leaves nothing in the source tree.
            .arg("-B")
            .arg(workspace().join("tests/python").join(script))
            .env("TEST_UUIDS", uuids.join(","))
            .env("TEST_SIMGPU_CTL", artefacts().simgpu_ctl())
            // Compilers take their time on a busy machine.
            .timeout(Duration::from_secs(180)),
    )
}

/// Refusals are explained; nothing else is said.
fn is_done(out: &Output) {
    assert!(out.success() && out.stdout.ends_with("done\n"), "{out}");
    assert!(out.stderr.lines().all(|line| line.starts_with("tessera: out of memory")), "{out}");
}

fn uuids(sim: &SimGpu) -> Vec<&str> {
    (0..sim.gpu_count()).map(|i| sim.uuid(i)).collect()
}

fn bare(script: &str) {
    let sim = SimGpu::start_default();
    if let Some(program) = python(&sim, script, &uuids(&sim), None) {
        is_done(&program.run());
    }
}

fn held(script: &str) {
    let sim = SimGpu::start_default();
    let pages = pages(&uuids(&sim));
    if let Some(program) = python(&sim, script, &uuids(&sim), Some(&pages)) {
        is_done(&program.run());
        assert_eq!(pages.charged(0), 0, "its end gave everything back");
    }
}

/// Under a gate that opens and closes, as beside a busy neighbour.
fn gated(script: &str) {
    let sim = SimGpu::start_default();
    let pages = pages(&uuids(&sim));
    let Some(program) = python(&sim, script, &uuids(&sim), Some(&pages)) else { return };
    let arbiter = Arbiter::take_on(&pages);
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
    is_done(&out);
}

/// Two instances, and CUDA set to use the second; bare, and held to a quota.
fn on_instances(script: &str) {
    let parent = "GPU-7e55e7a0-0000-4000-8000-000000000000";
    let sim = SimGpu::start(&format!(
        "[memory]\ncontext_overhead = \"64MiB\"\n[[gpu]]\nuuid = \"{parent}\"\nmemory = \"8GiB\"\n\
         mig = [\"1g.2gb\", \"2g.4gb\"]\n"
    ));
    let instances =
        ["MIG-7e55e7a0-0101-4000-8000-000000000000", "MIG-7e55e7a0-0201-4000-8000-000000000000"];
    let pages = pages(&instances);
    for pages in [None, Some(&pages)] {
        let Some(program) = python(&sim, script, &instances, pages) else { return };
        let program = program.env("CUDA_VISIBLE_DEVICES", instances[1]).env("TEST_PARENT", parent);
        is_done(&program.run());
    }
    assert_eq!(pages.charged(0), 0, "its end gave everything back");
}

macro_rules! clients {
    ($($name:ident: $how:ident $script:literal,)*) => { $(
        #[test]
        fn $name() {
            $how($script);
        }
    )* };
}

clients! {
    cuda_bindings_runs_on_the_bare_simulated_driver: bare "cuda_bindings_client.py",
    cuda_bindings_is_held_to_its_quota: held "cuda_bindings_client.py",
    cuda_bindings_runs_beside_a_neighbour_as_it_does_alone: gated "cuda_bindings_client.py",
    cuda_core_runs_on_the_bare_simulated_driver: bare "cuda_core_client.py",
    cuda_core_is_held_to_its_quota: held "cuda_core_client.py",
    cuda_core_runs_beside_a_neighbour_as_it_does_alone: gated "cuda_core_client.py",
    numba_runs_on_the_bare_simulated_driver: bare "numba_client.py",
    numba_is_held_to_its_quota: held "numba_client.py",
    numba_runs_beside_a_neighbour_as_it_does_alone: gated "numba_client.py",
    tinygrad_runs_on_the_bare_simulated_driver: bare "tinygrad_client.py",
    tinygrad_is_held_to_its_quota: held "tinygrad_client.py",
    tinygrad_runs_beside_a_neighbour_as_it_does_alone: gated "tinygrad_client.py",
    nvidia_ml_py_runs_on_the_bare_simulated_driver: bare "nvml_client.py",
    nvidia_ml_py_sees_the_quota: held "nvml_client.py",
    nvitop_runs_on_the_bare_simulated_driver: bare "nvitop_client.py",
    nvitop_sees_the_quota: held "nvitop_client.py",
    python_clients_see_the_instances_of_a_gpu_in_mig_mode: on_instances "mig_client.py",
}

/// `cudarc` is linked, and needs no Python.
#[test]
fn cudarc_runs_bare_and_is_held_to_its_quota() {
    const CLIENT: &str = env!("CARGO_BIN_EXE_cudarc_client");
    let sim = SimGpu::start_default();
    let pages = pages(&uuids(&sim));
    let limit = LIMIT.to_string();
    for (client, limit) in
        [(Preloaded::bare(CLIENT), "bare"), (Preloaded::new(CLIENT).pages(&pages), &limit)]
    {
        is_done(&client.sim(&sim).arg(limit).arg(sim.uuid(0)).arg(sim.uuid(1)).run());
    }
}
