//! How long the steps of a program take beside a neighbour of several processes: somebody waits for each.

use proptest::prelude::*;

use super::*;

const SWITCH: u64 = 50 * US;
/// GPU time of a step, in eight operations.
const STEP: u64 = 4 * MS;

/// A program that does one step after the other, with the share of `millis`.
fn steps(millis: u32) -> Load {
    Load::backlogged(burst(millis), (STEP / 8, STEP / 8)).pausing(8, (10 * US, 20 * US))
}

/// One that launches without end from several processes.
fn batch(millis: u32, processes: u32, op: u64) -> Load {
    Load { processes, ..Load::backlogged(burst(millis), (op, op)) }
}

/// The 99th percentile of a step, and the part of the time in which the GPU works for either.
fn beside(settings: Settings, batch: Load, seed: u64) -> (u64, f64) {
    let loads = vec![steps(1000 - batch.share.millis), batch];
    let scenario = Scenario { settings, switch: SWITCH, seed, ..scenario(loads, 5 * SECOND) };
    let figures = simulate(&scenario);
    let mut took = figures.tenants[0].batches.clone();
    took.sort_unstable();
    let used: u64 = figures.tenants.iter().map(|tenant| tenant.used_ns).sum();
    (took[took.len() * 99 / 100], float(used) / float(figures.elapsed_ns))
}

/// The most that all processes have in flight when their gate closes.
fn in_flight(batch: &Load) -> u64 {
    let (op, window) = (batch.op.1, batch.window_ns);
    u64::from(batch.processes) * (window + op).max(2 * op)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_step_meets_one_lease_of_its_neighbour_which_its_processes_hardly_lengthen(
        millis in 150_u32..400, processes in 1_u32..6, op in 100 * US..2 * MS, seed: u64,
    ) {
        let batch = batch(millis, processes, op);
        let (set, drain) = (Settings::default(), in_flight(&batch));
        let lease = (2 * drain).clamp(set.quantum, set.quantum_most) + drain;
        let (p99, busy) = beside(set, batch, seed);
        prop_assert!(p99 <= STEP + lease + 2 * (SWITCH + 4 * DELAY.1), "{p99} of {lease}");
        prop_assert!(busy > 0.97, "{busy}");
    }
}

#[test]
fn leases_that_follow_the_drain_closely_cost_steps_more_than_they_bring() {
    // Three processes with kernels of 1 ms, as the second part of `tessera demo`.
    let of = |drains| beside(Settings { drains, ..Settings::default() }, batch(250, 3, MS), 1);
    let ((now, busy), (long, busier)) = (of(Settings::default().drains), of(5));
    assert!(now < 16 * MS && long > 24 * MS, "{now} {long}");
    assert!(busier - busy < 0.002, "{busy} {busier}");
}
