//! The tenants' shares, and how long they wait.

use proptest::prelude::*;

use super::*;

/// A backlogged tenant with operations of up to 8 ms.
fn backlogged() -> impl Strategy<Value = Load> {
    let ops = prop_oneof![20 * US..MS, MS..8 * MS];
    (20_u32..=600, ops, 1_u64..=4, 2_usize..=16).prop_map(|(millis, op, spread, window)| Load {
        window,
        ..Load::backlogged(burst(millis), (op / spread, op))
    })
}

/// What one lease may be longer than its quantum: the window, the operation that does not fit into
/// it any more, and the ways of commands and messages.
fn overrun(load: &Load) -> u64 {
    load.window_ns + 2 * load.op.1 + 4 * DELAY.1
}

/// The bound of a share: one lease of the longest kind, and what hand-overs take.
fn assert_shares(loads: &[Load], figures: &Figures, elapsed: u64) -> Result<(), TestCaseError> {
    let all: u32 = loads.iter().map(|load| load.share.millis).sum();
    let used: u64 = figures.tenants.iter().map(|tenant| tenant.used_ns).sum();
    let lease = Settings::default().quantum_most + loads.iter().map(overrun).max().unwrap_or(0);
    for (load, tenant) in loads.iter().zip(&figures.tenants) {
        let due = float(used) * f64::from(load.share.millis) / f64::from(all);
        let handed = float(tenant.leases.max(1) * 3 * DELAY.1);
        let off = (float(tenant.used_ns) - due).abs();
        prop_assert!(
            off <= float(lease) + handed,
            "{} thousandths of {all}: {} of {elapsed} ns, due {due}, leases {}",
            load.share.millis,
            tenant.used_ns,
            tenant.leases
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn backlogged_tenants_get_their_shares_within_one_lease(
        loads in prop::collection::vec(backlogged(), 2..7), seed: u64,
    ) {
        let until = 2 * SECOND;
        let figures = simulate(&Scenario { seed, ..scenario(loads.clone(), until) });
        prop_assert_eq!(figures.double_grants, 0);
        assert_shares(&loads, &figures, until)?;

        // Nobody waits for more than its round, and two leases of everybody else.
        let all: u64 = loads.iter().map(|load| u64::from(load.share.millis)).sum();
        let leases: u64 = loads.iter().map(|load| 20 * MS + overrun(load)).sum();
        let longest = loads.iter().map(|load| 20 * MS + overrun(load)).max().unwrap_or(0);
        for (load, tenant) in loads.iter().zip(&figures.tenants) {
            let round = longest * all / u64::from(load.share.millis);
            prop_assert!(tenant.starved_ns <= round + 2 * leases, "{tenant:?}");
        }
        // And the GPU waits for nothing but commands and messages.
        let grants: u64 = figures.tenants.iter().map(|tenant| tenant.leases).sum();
        prop_assert!(figures.idle_wanted_ns[0] <= (grants + 2) * 3 * DELAY.1, "{figures:?}");
    }

    #[test]
    fn no_time_is_granted_twice_whatever_happens(
        loads in prop::collection::vec(anybody(), 2..8),
        changes in prop::collection::vec((0..SECOND, anything()), 0..12),
        seed: u64,
    ) {
        let mut changes = changes;
        changes.retain(|(_, change)| whose(*change) < loads.len());
        changes.sort_by_key(|(at, _)| *at);
        let figures = simulate(&Scenario { changes, seed, ..scenario(loads, SECOND) });
        prop_assert_eq!(figures.double_grants, 0);
    }
}

fn anybody() -> impl Strategy<Value = Load> {
    let gpus = prop_oneof![
        4 => (0_u8..3).prop_map(|gpu| vec![gpu]),
        1 => Just(vec![0, 1]),
        1 => Just(vec![1, 2]),
    ];
    (backlogged(), gpus, any::<bool>(), 0_u32..20, 0..20 * MS, 0..SECOND / 2).prop_map(
        |(load, gpus, capped, batch, think, begin)| Load {
            gpus,
            share: if capped { strict(load.share.millis) } else { load.share },
            batch,
            think: (think / 2, think),
            begin,
            ..load
        },
    )
}

fn anything() -> impl Strategy<Value = Change> {
    (0_usize..8, 1_u32..1000, 0_u8..6).prop_map(|(who, millis, what)| match what {
        0 => Change::Kill(who),
        1 => Change::Stop(who),
        2 => Change::Continue(who),
        3 => Change::Leave(who),
        4 => Change::Share(who, strict(millis)),
        _ => Change::Share(who, burst(millis)),
    })
}

fn whose(change: Change) -> usize {
    match change {
        Change::Share(who, _)
        | Change::Kill(who)
        | Change::Stop(who)
        | Change::Continue(who)
        | Change::Leave(who) => who,
    }
}

#[test]
fn a_tenant_that_is_alone_has_the_whole_gpu_from_its_first_want_on() {
    let figures = play(vec![Load::backlogged(burst(100), (50 * US, 100 * US))], SECOND);
    assert!(figures.tenants[0].used_ns > SECOND - MS, "{figures:?}");
    assert_eq!(figures.tenants[0].leases, 1);
}

#[test]
fn a_heavy_tenant_is_not_made_to_wait_for_every_light_one() {
    let light = (0..40).map(|_| Load::backlogged(burst(10), (50 * US, 100 * US)));
    let heavy = Load::backlogged(burst(400), (50 * US, 100 * US));
    let figures = play(std::iter::once(heavy).chain(light).collect(), 2 * SECOND);
    // It should have half of every stretch of time: not one quantum per round of 41, 240 ms.
    assert!(figures.tenants[0].starved_ns < 80 * MS, "{}", figures.tenants[0].starved_ns);
}

#[test]
fn who_wakes_is_served_soon_and_who_was_away_cannot_hoard() {
    let waker = Load::backlogged(burst(500), (100 * US, 100 * US));
    // 2 ms of work, every 40 ms.
    let waker = waker.pausing(20, (40 * MS, 40 * MS));
    let other = Load::backlogged(burst(500), (100 * US, 100 * US));
    let figures = play(vec![waker, other.clone()], 2 * SECOND);
    // The least hold, the window's drain and the ways; but for the beginning, where SOLO ends.
    let worst = figures.tenants[0].waits.iter().skip(2).max().copied().unwrap_or(0);
    assert!(worst <= MS + overrun(&other), "{worst}");

    // Three seconds away, then backlogged: the other waits for the credit of 20 ms, which the waker
    // catches up in 40, and not for 1.5 s.
    let away = Load::backlogged(burst(500), (100 * US, 100 * US));
    let changes = vec![(SECOND / 2, Change::Stop(0)), (7 * SECOND / 2, Change::Continue(0))];
    let figures = play_with(vec![away, other], changes, 4 * SECOND);
    assert!(figures.tenants[1].starved_ns < 80 * MS, "{}", figures.tenants[1].starved_ns);
}

#[test]
fn another_share_counts_within_one_quantum() {
    let load = |millis| Load::backlogged(burst(millis), (100 * US, 100 * US));
    let changes = vec![(2 * SECOND, Change::Share(0, burst(200)))];
    let figures = play_with(vec![load(800), load(800)], changes, 4 * SECOND);
    let third = &figures.tenants[0].used_by_second;
    let part = float(third[2]) / float(SECOND);
    assert!((part - 0.2).abs() < 0.015, "{third:?}");
}

#[test]
fn a_stopped_holder_does_not_stop_the_others() {
    let load = || Load::backlogged(burst(500), (100 * US, 100 * US));
    let changes = vec![(SECOND / 2, Change::Stop(0)), (SECOND, Change::Continue(0))];
    let figures = play_with(vec![load(), load()], changes, 2 * SECOND);
    assert_eq!(figures.double_grants, 0);
    assert!(figures.tenants[1].starved_ns < 60 * MS, "{}", figures.tenants[1].starved_ns);
    // And it comes back.
    let back = figures.tenants[0].used_by_second[1];
    assert!(back > SECOND / 5, "{back}");
}

#[test]
fn a_dead_holders_lease_ends_at_once() {
    let load = || Load::backlogged(burst(500), (100 * US, 100 * US));
    let changes = vec![(SECOND / 2, Change::Kill(0))];
    let figures = play_with(vec![load(), load()], changes, SECOND);
    assert!(figures.tenants[1].starved_ns < 30 * MS, "{}", figures.tenants[1].starved_ns);
    assert!(figures.idle_wanted_ns[0] < 30 * MS, "{:?}", figures.idle_wanted_ns);
}

#[test]
fn a_hundred_and_twenty_eight_tenants_share_one_gpu() {
    let load = |i: u32| Load::backlogged(burst(1 + i % 16), (50 * US, 500 * US));
    let figures = play((0..128).map(load).collect(), 3 * SECOND);
    assert_eq!(figures.double_grants, 0);
    assert!(figures.share_error_pp(1) < 1.0, "{}", figures.share_error_pp(1));
    assert!(figures.tenants.iter().all(|tenant| tenant.leases > 0));
}

#[test]
fn used_is_what_was_reported_or_measured_and_no_leased_time_is_used_by_itself() {
    let mut policy = Policy::new(Settings::default());
    let (one, other) = (TenantId(1), TenantId(2));
    for id in [one, other] {
        policy.join(0, id, &[0], burst(500));
    }
    policy.want(0, one);
    let now = |policy: &Policy, at: u64| {
        let totals = policy.tenant(at, one).unwrap().totals;
        [totals.leased_ns, totals.measured_ns, totals.used_ns].map(|ns| ns / MS)
    };
    assert_eq!(policy.tenant(0, one).unwrap().state, GateState::Solo);
    assert_eq!(now(&policy, 10 * SECOND), [10_000, 0, 0], "nobody has measured it");
    policy.measured(10 * SECOND, one, None);
    policy.measured(20 * SECOND, one, Some(SECOND));
    assert_eq!(now(&policy, 20 * SECOND), [20_000, 10_000, 1_000]);
    // Nobody uses more than there was.
    policy.measured(21 * SECOND, one, Some(9 * SECOND));
    assert_eq!(now(&policy, 21 * SECOND), [21_000, 11_000, 2_000]);
    // In SOLO it does not know what it used, whatever it says at the end.
    policy.want(22 * SECOND, other);
    policy.tick(22 * SECOND + 10 * MS);
    let used = |ms| Some(Used { ns: ms * MS, processes: 1 });
    policy.drained(22 * SECOND + 10 * MS, one, used(1010));
    assert_eq!(now(&policy, 23 * SECOND)[1..], [11_000, 2_000]);
    // A lease beside others it reports; of what is measured after it, this part is known.
    let at = 22 * SECOND + 100 * MS;
    policy.want(at - 80 * MS, one);
    policy.tick(at);
    policy.drained(at, other, used(80));
    policy.want(at + 5 * MS, other);
    let mut is_closed = |at: &u64| {
        policy.tick(*at);
        policy.tenant(*at, one).unwrap().state == GateState::Closed
    };
    let end = (0..100).map(|n| at + n * 10 * MS).find(|at| is_closed(at)).unwrap();
    policy.drained(end, one, used(12));
    let lease_ms = (end - at) / MS;
    assert_eq!(now(&policy, end)[1..], [11_000 + lease_ms, 2_012]);
    // The second before the other came it was alone, to the end of that lease.
    policy.measured(end, one, Some(112 * MS));
    assert_eq!(now(&policy, end)[1..], [12_010 + lease_ms, 2_112]);
    // Nobody else wanted it for most of this lease, so it did not say when it idled.
    let begin = end + 100 * MS;
    policy.gone(begin, other);
    policy.want(begin, one);
    assert_eq!(policy.tenant(begin, one).unwrap().state, GateState::Open);
    policy.want(begin + 500 * MS, other);
    policy.tick(begin + 600 * MS);
    policy.drained(begin + 600 * MS, one, used(600));
    assert_eq!(now(&policy, begin + 600 * MS)[1..], [12_010 + lease_ms, 2_112]);
    policy.measured(begin + SECOND, one, Some(60 * MS));
    assert_eq!(now(&policy, begin + SECOND)[1..], [12_610 + lease_ms, 2_172]);
}
