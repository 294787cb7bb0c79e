//! What is advised, and the laws that advice keeps.

mod laws;
mod recommending;

use proptest::prelude::*;
use tessera_config::Advice;
use tessera_view::advice::{Recommendation, Recommendations, Scope, Waste};
use tessera_view::history::TenantPoint;
use tessera_view::tenant::ComputePolicy;

use crate::Observed;
use crate::fixtures::{GIB, HOUR, Hour, Limits, MIDNIGHT, Made, busy};

fn observed(made: &[Made]) -> Vec<Observed<'_>> {
    made.iter().map(|one| Observed { node: &one.node, history: &one.history }).collect()
}

fn recommend(made: &[Made]) -> Recommendations {
    crate::recommend(&observed(made), &Advice::default(), &Scope::default())
}

fn only(made: &[Made]) -> Recommendation {
    let mut all = recommend(made).workloads;
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn waste(made: &[Made], settings: &Advice) -> Waste {
    crate::waste(&observed(made), settings, &Scope::default())
}

#[track_caller]
fn says(list: &[String], part: &str) {
    assert!(list.iter().any(|text| text.contains(part)), "\"{part}\" in {list:#?}");
}

fn lines(advice: &Recommendation) -> Vec<String> {
    advice.changes.iter().map(|change| change.text.clone()).collect()
}

const HALF: Limits =
    Limits { memory_bytes: 40 * GIB, cores_millis: 500, policy: ComputePolicy::Burst };

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn requested_minus_peak_is_waste_and_has_its_price() {
    let made = [Made::new().pod("chat-0", HALF, &[busy(20 << 10, 360.0, 360.0); 10])];
    let settings = Advice { price_millis_per_gpu_hour: 2000, ..Advice::default() };
    let waste = waste(&made, &settings);
    let team = &waste.namespaces[0];
    // Half a GPU for ten hours; a quarter of its memory used.
    assert!(near(team.asked_gpu_hours, 5.0) && near(team.used_gpu_hours, 2.5), "{team:?}");
    assert!(near(team.cost, 5.0), "{team:?}");
    let tenant = &team.tenants[0];
    assert_eq!((tenant.memory_limit_bytes, tenant.memory_peak_bytes), (40 * GIB, 20 * GIB));
    assert_eq!((tenant.cores_millis, tenant.wanted_millis), (500, 200));
    assert_eq!((tenant.idle, tenant.idle_seconds), (false, None));
    assert_eq!(waste.currency, "USD");
    let free = self::waste(&made, &Advice::default());
    assert!(near(free.namespaces[0].cost, 0.0));
}

#[test]
fn a_container_without_gpu_work_is_idle_whatever_it_holds() {
    let mut hours = vec![busy(40 << 10, 1800.0, 0.0); 5];
    hours.extend([Hour { peak_mib: 40 << 10, ..Hour::default() }; 10]);
    let made = [Made::new().pod("notebook", HALF, &hours)];
    let waste = waste(&made, &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(tenant.idle);
    assert_eq!(tenant.idle_seconds, Some(36_000.0));
    // The last ten hours.
    assert!(near(tenant.wasted_gpu_hours, 5.0), "{tenant:?}");
    // A single launch an hour is work.
    for hour in &mut hours {
        hour.launches = 1;
    }
    let made = [Made::new().pod("notebook", HALF, &hours)];
    let waste = self::waste(&made, &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.idle && near(tenant.wasted_gpu_hours, 0.0), "{tenant:?}");
}

#[test]
fn a_pod_that_was_placed_elsewhere_holds_what_it_holds_now() {
    for live in [true, false] {
        let mut made = Made::new().pod("chat-0", HALF, &[busy(20 << 10, 360.0, 360.0); 10]);
        let now = &mut made.history.tenants[0];
        now.live = live;
        let mut before = now.clone();
        (before.gpu_uuid, before.id, before.live) = ("GPU-before".into(), "b".repeat(32), false);
        before.points.truncate(5);
        now.points.drain(..5);
        made.history.tenants.push(before);
        let waste = waste(&[made], &Advice::default());
        let tenant = &waste.namespaces[0].tenants[0];
        assert_eq!((tenant.memory_limit_bytes, tenant.memory_peak_bytes), (40 * GIB, 20 * GIB));
        assert_eq!((tenant.cores_millis, tenant.live), (500, live));
    }
}

#[test]
fn a_short_pause_is_not_idle() {
    let mut hours = vec![busy(40 << 10, 1800.0, 0.0); 5];
    hours.extend([Hour { peak_mib: 40 << 10, ..Hour::default() }; 3]);
    let waste = waste(&[Made::new().pod("notebook", HALF, &hours)], &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.idle && near(tenant.wasted_gpu_hours, 0.0), "{tenant:?}");
    assert_eq!(tenant.idle_seconds, Some(10_800.0));
}

#[test]
fn what_is_gone_is_counted_and_not_idle() {
    let mut made = Made::new();
    made.gone("chat-0", HALF, &[Hour::default(); 10]);
    let waste = waste(&[made], &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.live && !tenant.idle && tenant.idle_seconds.is_none());
    assert!(near(tenant.wasted_gpu_hours, 5.0), "{tenant:?}");
}

#[test]
fn more_than_was_asked_at_one_time_makes_up_for_nothing_at_another() {
    let mut hours = vec![busy(8 << 10, 3600.0, 0.0); 10];
    hours.extend([busy(8 << 10, 360.0, 0.0); 10]);
    let waste = waste(&[Made::new().pod("chat-0", HALF, &hours)], &Advice::default());
    let team = &waste.namespaces[0];
    // Ten hours of all that it asked for, and ten of a tenth of the GPU.
    assert!(near(team.asked_gpu_hours, 10.0) && near(team.used_gpu_hours, 6.0), "{team:?}");
}

/// One pod whose GPU time by ten seconds is `got`, in buckets of `step` seconds.
fn told_in(got: &[u8], step: usize) -> Made {
    let mut made = Made::new().pod("chat-0", HALF, &[Hour::default()]);
    made.history.step_seconds = u32::try_from(step).unwrap();
    let seconds = |tens: &[u8]| tens.iter().map(|got| f64::from(*got) / 10.0).sum();
    let points = got.chunks(step / 10).enumerate().map(|(nth, tens)| TenantPoint {
        at_unix_ms: MIDNIGHT + i64::try_from(nth * step).unwrap() * 1000,
        seconds: 10.0 * tens.len() as f64,
        memory_peak_bytes: 4 * GIB,
        memory_limit_bytes: HALF.memory_bytes,
        cores_millis: HALF.cores_millis,
        got_seconds: seconds(tens),
        used_seconds: seconds(tens),
        measured_seconds: seconds(tens),
        launches: 1,
        ..TenantPoint::default()
    });
    made.history.tenants[0].points = points.collect();
    made
}

fn wasted_since(made: &Made, since_unix_ms: i64) -> Waste {
    let observed = [Observed { node: &made.node, history: &made.history }];
    let settings = Advice { price_millis_per_gpu_hour: 2000, ..Advice::default() };
    crate::waste(&observed, &settings, &Scope { since_unix_ms, ..Scope::default() })
}

/// A pod that is seen from the `from`-th ten seconds on, and works in those that say so; in buckets of `step` seconds.
fn worked_in(worked: &[bool], from: usize, step: usize) -> Made {
    let mut made = told_in(&[], step);
    let end = MIDNIGHT + i64::try_from(worked.len() * 10_000).unwrap();
    (made.history.at_unix_ms, made.node.at_unix_ms) = (end, end);
    let bucket = |nth: &usize| nth / (step / 10);
    let mut points: Vec<TenantPoint> = Vec::new();
    for (nth, worked) in worked.iter().enumerate().skip(from) {
        let at_unix_ms = MIDNIGHT + i64::try_from(bucket(&nth) * step).unwrap() * 1000;
        if points.last().is_none_or(|last| last.at_unix_ms != at_unix_ms) {
            points.push(TenantPoint {
                at_unix_ms,
                memory_peak_bytes: 4 * GIB,
                memory_limit_bytes: HALF.memory_bytes,
                cores_millis: HALF.cores_millis,
                ..TenantPoint::default()
            });
        }
        let last = points.last_mut().unwrap();
        last.seconds += 10.0;
        last.launches += u64::from(*worked);
    }
    made.history.tenants[0].points = points;
    made
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn idle_time_is_never_longer_than_it_was_and_shorter_by_less_than_a_bucket(
        stretches in prop::collection::vec((any::<bool>(), 1usize..900), 1..6), part in 0usize..100,
    ) {
        let worked: Vec<bool> = stretches
            .iter()
            .flat_map(|(worked, length)| std::iter::repeat_n(*worked, *length))
            .collect();
        let from = worked.len() * part / 100;
        let rest = worked[from..].iter().rev().take_while(|worked| !**worked).count();
        let was = 10.0 * rest as f64;
        let mut was_idle = true;
        for step in [10usize, 300, 3600] {
            let made = worked_in(&worked, from, step);
            let waste = wasted_since(&made, 0);
            let tenant = &waste.namespaces[0].tenants[0];
            let idle = tenant.idle_seconds.unwrap_or(0.0);
            prop_assert!(idle <= was, "{step}: {idle} of {was}");
            prop_assert!(was - idle < step as f64, "{step}: {idle} of {was}");
            // Longer buckets never call idle what shorter ones do not.
            prop_assert!(was_idle || !tenant.idle, "{step}: {tenant:?}");
            was_idle = tenant.idle;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn waste_is_the_same_in_buckets_of_any_length(
        bursts in prop::collection::vec((0u8..=100, 1usize..90), 1..40), hours in 1usize..6,
    ) {
        let tens: Vec<u8> = bursts
            .iter()
            .flat_map(|(got, length)| std::iter::repeat_n(*got, *length))
            .cycle()
            .take(hours * 360)
            .collect();
        let mut costs = Vec::new();
        for step in [10, 300, 3600] {
            let waste = wasted_since(&told_in(&tens, step), 0);
            let team = &waste.namespaces[0];
            prop_assert!((team.asked_gpu_hours - 0.5 * hours as f64).abs() < 1e-6, "{team:?}");
            costs.push(team.cost);
        }
        // Each bucket's share is rounded up to a thousandth.
        let most = 0.0011 * 2.0 * hours as f64;
        prop_assert!((costs[0] - costs[2]).abs() < most, "{costs:?}");
        prop_assert!((costs[1] - costs[2]).abs() < most, "{costs:?}");
    }

    #[test]
    fn a_window_has_its_whole_length_wherever_it_begins(since in 0i64..2 * HOUR) {
        for step in [10, 300, 3600] {
            let made = told_in(&[20; 3 * 360], step);
            let waste = wasted_since(&made, MIDNIGHT + since);
            let asked = 0.5 * (3 * HOUR - since) as f64 / HOUR as f64;
            let team = &waste.namespaces[0];
            prop_assert!((team.asked_gpu_hours - asked).abs() < 1e-6, "{asked} {team:?}");
        }
    }
}
