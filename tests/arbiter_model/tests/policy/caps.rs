//! Strict shares.

use super::*;

/// What a GPU takes to change over.
const SWITCH: u64 = 50 * US;

/// Deviations of the first few from their caps over 10 s, in percent of them.
fn errors<const N: usize>(loads: Vec<Load>) -> [f64; N] {
    let caps: Vec<f64> = loads.iter().map(|load| f64::from(load.share.millis) / 1000.0).collect();
    let figures = simulate(&Scenario { switch: SWITCH, ..scenario(loads, 10 * SECOND) });
    assert_eq!(figures.double_grants, 0);
    let part = |i: usize| float(figures.tenants[i].used_ns) / float(10 * SECOND);
    std::array::from_fn(|i| (part(i) / caps[i] - 1.0) * 100.0)
}

/// Of the first alone.
fn error(load: Load, others: Vec<Load>) -> f64 {
    let [off] = errors(std::iter::once(load).chain(others).collect());
    off
}

#[test]
fn a_cap_holds_to_one_percent_alone_although_every_drain_overruns() {
    for op in [(100 * US, 200 * US), (8 * MS, 8 * MS)] {
        for millis in [100, 250, 500, 750] {
            let off = error(Load::backlogged(strict(millis), op), vec![]);
            assert!(off.abs() <= 1.0, "{millis} {op:?}: {off} %");
        }
    }
}

#[test]
fn a_cap_is_reached_although_threads_wake_late() {
    // On a busy host: what a lease loses to that differs from one to the next.
    for (millis, slowest) in [(100, 300), (250, 500), (750, 500)] {
        let load = Load::backlogged(strict(millis), (100 * US, 200 * US));
        let delay = (20 * US, slowest * US);
        let figures = simulate(&Scenario { delay, ..scenario(vec![load], 20 * SECOND) });
        let got = float(figures.tenants[0].used_ns) / float(20 * SECOND);
        let off = (got / f64::from(millis) * 1000.0 - 1.0) * 100.0;
        assert!(off.abs() <= 1.0, "{millis}: {off} %");
    }
}

#[test]
fn caps_hold_although_each_waits_for_the_others() {
    // None may lose what it earns while the longest leases of the others last.
    for op in [200 * US, 8 * MS] {
        let loads = [100, 250, 500].map(|millis| Load::backlogged(strict(millis), (op, op)));
        let off: [f64; 3] = errors(loads.to_vec());
        assert!(off.iter().all(|off| off.abs() <= 1.0), "{op}: {off:?} %");
    }
}

#[test]
fn who_says_that_it_used_nothing_gains_a_sixteenth_at_most() {
    let got = |load: &Load, slack| {
        let settings = Settings { slack, ..Settings::default() };
        let figures = simulate(&Scenario { settings, ..scenario(vec![load.clone()], 30 * SECOND) });
        float(figures.tenants[0].used_ns)
    };
    for millis in [100, 250, 500] {
        let load = Load::backlogged(strict(millis), (100 * US, 200 * US));
        // Also in short leases, and in many processes.
        let many = Load { processes: 16, ..load.clone() };
        for load in [load.clone(), many, load.pausing(5, (150 * US, 250 * US))] {
            let liar = Load { lies: true, ..load };
            let more = got(&liar, Settings::default().slack) / got(&liar, 0);
            assert!(more > 1.001 && more < 16.0 / 15.0 + 0.01, "{millis}: {more}");
        }
    }
}

#[test]
fn a_cap_is_reached_beside_a_neighbour_and_not_passed() {
    for millis in [100, 250, 500, 750] {
        let other = Load::backlogged(burst(1000 - millis), (100 * US, 500 * US));
        let off = error(Load::backlogged(strict(millis), (100 * US, 200 * US)), vec![other]);
        assert!((-3.0..=1.0).contains(&off), "{millis}: {off} %");
    }
}

#[test]
fn what_a_strict_tenant_may_not_have_is_the_others() {
    let capped = Load::backlogged(strict(100), (100 * US, 200 * US));
    let other = Load::backlogged(burst(100), (100 * US, 200 * US));
    let figures = play(vec![capped, other], 4 * SECOND);
    let part = float(figures.tenants[1].used_ns) / float(4 * SECOND);
    assert!(part > 0.88, "{part}");
}
