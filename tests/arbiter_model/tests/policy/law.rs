//! The GPU is not idle while a launch waits for it, hand-overs aside: mixtures of loads, beside the same without an arbiter.

use proptest::prelude::*;

use super::*;

const SWITCH: u64 = 50 * US;
/// A hand-over takes less: two reads of words, each of which may be late by a wake-up. Pauses of less are waited for.
const HAND_OVER: u64 = 300 * US;
/// A host that wakes threads late, the arbiter's as well.
const LATE: LateWakes = LateWakes { one_in: 10, ns: (MS, 8 * MS) };

fn backlog(millis: u32) -> Load {
    Load::backlogged(burst(millis), (100 * US, 200 * US))
}

/// Works for `work` and pauses for `pause`, microseconds.
fn periodic(millis: u32, work: u64, pause: u64) -> Load {
    let op = (100 * US).min(work * US);
    let batch = u32::try_from(work * US / op).unwrap();
    Load::backlogged(burst(millis), (op, op)).pausing(batch, (pause * US, pause * US))
}

/// The same with pauses of half of that to one and a half times it.
fn uneven(millis: u32, work: u64, pause: u64) -> Load {
    Load { think: (pause * US / 2, pause * US * 3 / 2), ..periodic(millis, work, pause) }
}

/// The load under a CPU limit that lets it run for some 2 ms more than `runs` of each 100.
fn limited(load: Load, runs: u64) -> Load {
    load.preempted((runs * MS, (runs + 5) * MS), ((95 - runs) * MS, (100 - runs) * MS))
}

/// Thousandths of the time.
#[derive(Debug)]
struct Judged {
    /// The GPU worked.
    busy: u64,
    /// It worked for each.
    each: Vec<u64>,
    /// It was idle, although a launch waited, for longer than a hand-over.
    idle: u64,
}

fn judged(scenario: &Scenario) -> Judged {
    let figures = simulate(scenario);
    assert_eq!(figures.double_grants, 0);
    let of = |ns: u64| ns * 1000 / figures.elapsed_ns;
    let idle = figures.idle_runs.iter().filter(|&&ns| ns > HAND_OVER).sum();
    let each: Vec<u64> = figures.tenants.iter().map(|tenant| of(tenant.used_ns)).collect();
    Judged { busy: each.iter().sum(), each, idle: of(idle) }
}

/// Busy for so many thousandths of the time at least; on a host that wakes threads late, so many. The numbers are what the
/// policy reaches; beside them what it should. Of two tenants the first gets what it would get without an arbiter, where
/// `is_least` says so.
fn reaches(loads: Vec<Load>, busy: u64, late: u64, is_least: bool) {
    let scenario = Scenario { switch: SWITCH, ..scenario(loads, 20 * SECOND) };
    let bare = judged(&Scenario { bare: true, ..scenario.clone() });
    let held = judged(&scenario);
    assert!(held.busy >= busy, "{held:?}; bare {bare:?}");
    assert!(!is_least || held.each[0] >= bare.each[0], "{held:?}; bare {bare:?}");
    let on_late_host = judged(&Scenario { late_wakes: Some(LATE), ..scenario });
    assert!(on_late_host.busy >= late, "late: {on_late_host:?}; bare {bare:?}");
}

#[test]
fn two_backlogs() {
    reaches(vec![backlog(800), backlog(200)], 985, 870, false);
    reaches(vec![backlog(500), backlog(500)], 975, 870, false);
}

#[test]
fn a_backlog_under_a_cpu_limit_beside_another() {
    reaches(vec![limited(backlog(500), 20), backlog(500)], 970, 800, true);
    reaches(vec![limited(backlog(500), 45), backlog(500)], 970, 820, true);
    reaches(vec![limited(backlog(500), 75), backlog(500)], 965, 845, true);
}

#[test]
fn decoders_and_periodic_work() {
    reaches(vec![periodic(500, 8_000, 1_000); 2], 980, 880, true);
    reaches(vec![periodic(500, 8_000, 4_000); 2], 980, 850, true);
    reaches(vec![periodic(500, 2_000, 2_000); 2], 945, 790, true);
    reaches(vec![periodic(250, 2_000, 2_000); 4], 950, 855, true);
    // Who is owed time has it when it returns, and is not waited for.
    reaches(vec![periodic(800, 8_000, 1_000), backlog(200)], 975, 920, true);
    reaches(vec![periodic(800, 4_000, 1_000), backlog(200)], 965, 920, true);
    reaches(vec![periodic(800, 2_000, 1_000), backlog(200)], 945, 895, true);
    reaches(vec![periodic(800, 2_000, 500), backlog(200)], 945, 900, true);
    reaches(vec![periodic(800, 1_000, 400), backlog(200)], 925, 875, true);
    // Where nobody knows how long the next pause is, both pause at once now and then. One after the other, whole bursts and
    // nothing in between would be busy for 915 of the last.
    reaches(vec![uneven(500, 8_000, 1_000); 2], 980, 880, true);
    reaches(vec![uneven(500, 8_000, 4_000); 2], 980, 850, true);
    reaches(vec![uneven(500, 2_000, 2_000); 2], 835, 750, true);
}

#[test]
fn short_work_beside_a_backlog() {
    // Of each 3 ms the GPU changes over for 0.1. On a late host 830 should be had, and 810 beside work of 1 ms.
    reaches(vec![periodic(500, 200, 2_800), backlog(500)], 940, 800, false);
    reaches(vec![periodic(200, 200, 2_800), backlog(800)], 950, 815, false);
    reaches(vec![periodic(800, 1_000, 1_000), backlog(200)], 930, 590, true);
    reaches(vec![limited(periodic(500, 1_000, 1_000), 45), backlog(500)], 945, 730, false);
}

fn any_load() -> impl Strategy<Value = Load> {
    let kind = prop_oneof![
        Just((0, 0)),
        (200_u64..8_000, 20_u64..4_000),
        (200_u64..4_000, 4_000_u64..40_000),
    ];
    let runs = prop_oneof![3 => Just(0), 2 => 20_u64..80];
    (50_u32..900, 20_u64..2_000, kind, runs, 1_u32..4).prop_map(
        |(millis, op, (work, pause), runs, processes)| {
            let load =
                Load { processes, ..Load::backlogged(burst(millis), (op * US, 2 * op * US)) };
            let batch = u32::try_from(work / op).unwrap().max(u32::from(work > 0));
            let load = load.pausing(batch, (pause * US, 2 * pause * US));
            if runs > 0 { limited(load, runs) } else { load }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn in_no_mixture_is_the_gpu_idle_for_long_while_a_launch_waits(
        loads in proptest::collection::vec(any_load(), 2..6), seed: u64,
    ) {
        let held = judged(&Scenario { switch: SWITCH, seed, ..scenario(loads, 4 * SECOND) });
        // In one of 3,000 it is more than 40.
        prop_assert!(held.idle <= 50, "{held:?}");
    }
}
