//! Strict shares.

use super::*;

/// Deviation from the cap over 10 s, in percent of it.
fn error(load: Load, others: Vec<Load>) -> f64 {
    let cap = f64::from(load.share.millis) / 1000.0;
    let figures = play(std::iter::once(load).chain(others).collect(), 10 * SECOND);
    assert_eq!(figures.double_grants, 0);
    (float(figures.tenants[0].used_ns) / float(10 * SECOND) / cap - 1.0) * 100.0
}

#[test]
fn a_cap_holds_to_one_percent_alone() {
    for millis in [100, 250, 500, 750] {
        let off = error(Load::backlogged(strict(millis), (100 * US, 200 * US)), vec![]);
        assert!(off.abs() <= 1.0, "{millis}: {off} %");
    }
}

#[test]
fn a_cap_holds_although_every_drain_overruns() {
    for millis in [100, 250, 500, 750] {
        let off = error(Load::backlogged(strict(millis), (8 * MS, 8 * MS)), vec![]);
        assert!(off.abs() <= 1.5, "{millis}: {off} %");
    }
}

#[test]
fn a_cap_is_reached_beside_a_neighbour_and_not_passed() {
    for millis in [100, 250, 500, 750] {
        let other = Load::backlogged(burst(1000 - millis), (100 * US, 500 * US));
        let off = error(Load::backlogged(strict(millis), (100 * US, 200 * US)), vec![other]);
        assert!((-2.0..=1.0).contains(&off), "{millis}: {off} %");
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
