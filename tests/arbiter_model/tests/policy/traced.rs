//! Traces, and the account of idle time, against the policy's own account and the simulated GPU's.

use proptest::prelude::*;
use strum::VariantArray;
use tessera_arbiter::policy::{Cause, Used};
use tessera_arbiter::trace::{Item, Kind, items as cut};
use tessera_arbiter_model::World;

use super::*;

/// Plays these loads while they are traced.
fn traced(loads: Vec<Load>, until: u64) -> (Vec<Item>, Policy, Figures) {
    let mut world = World::new(&scenario(loads, until));
    let standing = world.policy.begin_notes(0, 1 << 20);
    world.run();
    let (lost, events) = world.policy.end_notes(until);
    assert_eq!((lost, standing.len()), (0, 0));
    (cut(&events, 0, until), world.policy.clone(), world.figures())
}

fn sum(items: &[Item], gpu: u8, tenant: u32, of: fn(&Kind) -> bool) -> u64 {
    let its = |item: &&Item| item.gpu == gpu && item.tenant == Some(TenantId(tenant));
    items.iter().filter(its).filter(|item| of(&item.kind)).filter_map(|item| item.ns).sum()
}

fn is_leased(kind: &Kind) -> bool {
    matches!(kind, Kind::Lease(..) | Kind::Drain)
}

/// Intervals of this kind on one GPU, in their order, one after the other.
fn follow(items: &[Item], gpu: u8, of: fn(&Kind) -> bool) -> Result<u64, TestCaseError> {
    let these = items.iter().filter(|item| item.gpu == gpu && of(&item.kind));
    let mut these: Vec<(u64, u64)> =
        these.map(|item| (item.from, item.from + item.ns.unwrap_or(0))).collect();
    these.sort_unstable();
    for pair in these.windows(2) {
        prop_assert!(pair[0].1 <= pair[1].0, "{pair:?} on GPU {gpu}");
    }
    Ok(these.iter().map(|(from, to)| to - from).sum())
}

/// The tenants that have a lease, or drain one, at the end.
fn ended(items: &[Item], until: u64) -> Vec<(u8, Option<TenantId>)> {
    let stands = |item: &&Item| is_leased(&item.kind) && item.from + item.ns.unwrap_or(0) == until;
    let mut all: Vec<_> = items.iter().filter(stands).map(|item| (item.gpu, item.tenant)).collect();
    all.sort_unstable();
    all
}

fn load() -> impl Strategy<Value = Load> {
    let share = (50_u32..900, any::<bool>())
        .prop_map(|(millis, capped)| if capped { strict(millis) } else { burst(millis) });
    let gpus = prop_oneof![3 => Just(vec![0]), 1 => Just(vec![1]), 1 => Just(vec![0, 1])];
    (share, gpus, 20_u64..2000, 0_u32..30, 0_u64..20_000, 1_u32..4).prop_map(
        |(share, gpus, op, batch, think, processes)| Load {
            gpus,
            processes,
            ..Load::backlogged(share, (op * US, 2 * op * US))
                .pausing(batch, (think * US, 2 * think * US))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn what_a_trace_draws_is_what_the_policy_charged_and_no_two_leases_meet(
        loads in prop::collection::vec(load(), 1..5),
    ) {
        let until = SECOND / 2;
        let gpus: Vec<Vec<u8>> = loads.iter().map(|load| load.gpus.clone()).collect();
        let again = scenario(loads.clone(), until);
        let (items, policy, figures) = traced(loads, until);
        // Late tenants share the time that is charged.
        prop_assume!(figures.tenants.iter().all(|tenant| tenant.overlaps == 0));
        for gpu in 0..2 {
            follow(&items, gpu, is_leased)?;
            let idle = follow(&items, gpu, |kind| matches!(kind, Kind::Idle(_)))?;
            let totals = policy.idle_totals(until, gpu);
            prop_assert_eq!(idle, totals.iter().sum::<u64>());
            for cause in Cause::VARIANTS.iter().copied() {
                let of = |item: &&Item| item.gpu == gpu && item.kind == Kind::Idle(cause);
                let drawn: u64 = items.iter().filter(of).filter_map(|item| item.ns).sum();
                prop_assert_eq!(drawn, totals[cause as usize], "{:?}", cause);
            }
        }
        // Of a ring that is too small, the end is left, and is as it was.
        let mut world = World::new(&again);
        world.policy.begin_notes(0, 64);
        world.run();
        let (lost, events) = world.policy.end_notes(until);
        let first = events.first().map_or(0, |event| event.at);
        // Of each tenant what it has and that it waits, since before.
        let most = 64 + 2 * again.loads.len();
        prop_assert!(events.len() <= most && (lost == 0 || events.len() >= 64));
        let end = cut(&events, first, until);
        for gpu in 0..2 {
            follow(&end, gpu, is_leased)?;
        }
        prop_assert!(end.iter().all(|item| item.from >= first
            && item.from + item.ns.unwrap_or(0) <= until));
        prop_assert!(events.is_empty() || ended(&items, until) == ended(&end, until));
        for (tenant, gpus) in (0_u32..).zip(gpus) {
            let totals = policy.tenant(until, TenantId(tenant)).map(|view| view.totals);
            let totals = totals.unwrap_or_default();
            for gpu in gpus {
                prop_assert_eq!(sum(&items, gpu, tenant, is_leased), totals.leased_ns);
                let waited = sum(&items, gpu, tenant, |kind| *kind == Kind::Wait);
                prop_assert_eq!(waited, totals.waited_ns);
            }
        }
    }
}

#[test]
fn idle_time_that_the_policy_knows_is_most_of_what_the_gpu_had() {
    let op = (200 * US, 200 * US);
    let two = |share| vec![Load::backlogged(share, op), Load::backlogged(burst(500), op)];
    let late = LateWakes { one_in: 10, ns: (MS, 4 * MS) };
    for late_wakes in [None, Some(late)] {
        let mut world =
            World::new(&Scenario { late_wakes, ..scenario(two(burst(500)), 2 * SECOND) });
        world.run();
        let known: u64 = world.policy.idle_totals(2 * SECOND, 0).iter().sum();
        let was = world.figures().idle_wanted_ns[0];
        let part = float(known) / float(was);
        // Words are read too seldom for threads of the holder that oversleep by less than a millisecond.
        let least = if late_wakes.is_some() { 0.4 } else { 0.7 };
        assert!((least..=1.3).contains(&part), "{known} of {was} ns, {late_wakes:?}");
    }
}

/// What one tenant did on GPU 0, with a neighbour that waits from `waits` on.
fn told(share: Share, steps: &[(u64, Option<Used>, bool)]) -> [u64; 6] {
    let mut policy = Policy::new(Settings::default());
    let (one, other) = (TenantId(1), TenantId(2));
    policy.join(0, one, &[0], share);
    policy.join(0, other, &[0], burst(500));
    policy.want(0, one);
    policy.want(MS, other);
    let mut last = 0;
    for &(at, used, is_idle) in steps {
        if is_idle {
            policy.idle(at, one);
        } else {
            policy.tick(at);
        }
        policy.drained(at + US, one, used);
        last = at + US;
    }
    policy.idle_totals(last, 0)
}

#[test]
fn idle_time_has_the_cause_that_the_events_tell() {
    let used = |ns| Some(Used { ns, processes: 1 });
    let of = |totals: [u64; 6], cause: Cause| totals[cause as usize];
    // The quantum ends with 100 us lost.
    let woken = told(strict(900), &[(10 * MS, used(9 * MS + 901 * US), false)]);
    assert_eq!((of(woken, Cause::HandOver), woken.iter().sum()), (100 * US, 100 * US));
    // It did nothing and said nothing, for longer than threads take to wake.
    let starved = told(strict(900), &[(10 * MS, used(0), false)]);
    assert_eq!(of(starved, Cause::HandOver), 4 * MS);
    assert_eq!(of(starved, Cause::NoCpu), 5 * MS + US, "since the other waits");
    // It said that it was idle.
    let idle = told(strict(900), &[(2 * MS, used(MS + 800 * US), true)]);
    assert_eq!((of(idle, Cause::IdleReport), idle.iter().sum()), (201 * US, 201 * US));
    // A lie about used time takes no more than the lease; one that says too much counts for nothing.
    let liar = told(strict(900), &[(2 * MS, used(u64::MAX), true)]);
    assert_eq!(liar, [0; 6]);
}

#[test]
fn a_gpu_that_waits_for_a_bucket_is_idle_for_it_and_one_that_nobody_wants_is_not() {
    let mut policy = Policy::new(Settings::default());
    let one = TenantId(1);
    policy.join(0, one, &[0], strict(100));
    policy.want(0, one);
    let mut now = 0;
    // It uses its cap up, and waits for more.
    while policy.tenant(now, one).is_some_and(|view| view.state != GateState::Closed) {
        now += MS;
        policy.tick(now);
    }
    policy.drained(now, one, Some(Used { ns: now, processes: 1 }));
    assert_eq!(policy.idle_totals(now + 10 * MS, 0), [0; 6], "nobody wants it");
    policy.want(now + 10 * MS, one);
    let totals = policy.idle_totals(now + 15 * MS, 0);
    assert_eq!(totals[Cause::Bucket as usize], 5 * MS);
    assert_eq!(totals.iter().sum::<u64>(), 5 * MS);
}

#[test]
fn a_trace_that_begins_amid_leases_has_what_stands_from_its_beginning() {
    let mut policy = Policy::new(Settings::default());
    let (one, other) = (TenantId(1), TenantId(2));
    for tenant in [one, other] {
        policy.join(0, tenant, &[0], burst(500));
        policy.want(0, tenant);
    }
    policy.tick(10 * MS);
    assert!(policy.tenant(10 * MS, one).is_some_and(|view| view.state == GateState::Closed));
    let standing = policy.begin_notes(11 * MS, 64);
    policy.drained(12 * MS, one, None);
    let (lost, events) = policy.end_notes(15 * MS);
    let all = cut(standing.iter().chain(&events), 11 * MS, 15 * MS);
    let mut drawn: Vec<_> = all
        .iter()
        .map(|item| (item.from / MS, item.ns.map(|ns| ns / MS), item.tenant, item.kind))
        .collect();
    drawn.sort_by_key(|one| one.0);
    let held = Kind::Lease(Some(GateState::Open), None);
    let want = [
        (11, Some(1), Some(one), Kind::Drain),
        (11, Some(1), Some(other), Kind::Wait),
        (12, Some(3), Some(other), held),
    ];
    assert_eq!((lost, drawn), (0, want.to_vec()));
}
