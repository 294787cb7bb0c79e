//! `cudarc`, unmodified, on the simulated machine: bare, and held to a quota.

use tessera_harness::{MIB, Pages, Preloaded, SimGpu};

const CLIENT: &str = env!("CARGO_BIN_EXE_cudarc_client");

#[test]
fn cudarc_runs_on_the_bare_simulated_driver() {
    let sim = SimGpu::start_default();
    let out = Preloaded::bare(CLIENT).sim(&sim).arg("bare").arg(sim.uuid(0)).arg(sim.uuid(1)).run();
    assert!(out.success() && out.stdout == "done\n", "{out}");
}

#[test]
fn cudarc_is_held_to_its_quota() {
    let sim = SimGpu::start_default();
    let limit = 700 * MIB;
    let pages = Pages::create(&[(sim.uuid(0), limit), (sim.uuid(1), limit)]);
    let client = Preloaded::new(CLIENT).sim(&sim).pages(&pages).arg(limit.to_string());
    let out = client.arg(sim.uuid(0)).arg(sim.uuid(1)).run();
    assert!(out.success() && out.stdout == "done\n", "{out}");
    // Refusals are explained; nothing else is said.
    assert!(out.stderr.lines().all(|line| line.starts_with("tessera: out of memory")), "{out}");
}
