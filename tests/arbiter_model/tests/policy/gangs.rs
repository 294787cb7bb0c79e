//! Tenants with several GPUs.

use proptest::prelude::*;

use super::nonsense::{self, Event};
use super::*;

fn on(gpus: &[u8], millis: u32) -> Load {
    Load { gpus: gpus.to_vec(), ..Load::backlogged(burst(millis), (100 * US, 500 * US)) }
}

#[test]
fn gangs_that_overlap_in_a_ring_do_not_block_each_other() {
    let figures = play(vec![on(&[0, 1], 500), on(&[1, 2], 500), on(&[2, 0], 500)], 2 * SECOND);
    for tenant in &figures.tenants {
        let part = float(tenant.used_ns) / float(2 * SECOND);
        assert!((part - 1.0 / 3.0).abs() < 0.02, "{part}");
    }
}

#[test]
fn a_gang_and_its_neighbours_get_their_shares() {
    let figures = play(vec![on(&[0, 1], 500), on(&[0], 500), on(&[1], 500)], 2 * SECOND);
    for tenant in &figures.tenants {
        let part = float(tenant.used_ns) / float(2 * SECOND);
        assert!((part - 0.5).abs() < 0.03, "{part}");
    }
}

#[test]
fn a_gang_held_back_by_a_full_gpu_does_not_hold_back_another() {
    let figures = play(
        vec![on(&[0, 1], 250), on(&[0], 250), on(&[0], 250), on(&[0], 250), on(&[1], 250)],
        2 * SECOND,
    );
    let part = |i: usize| float(figures.tenants[i].used_ns) / float(2 * SECOND);
    assert!((part(0) - 0.25).abs() < 0.03, "{}", part(0));
    assert!(part(4) > 0.7, "{}", part(4));
}

#[test]
fn a_gang_that_returns_has_its_gpus_as_soon_as_a_tenant_of_one_gpu() {
    for pause in [200 * US, 400 * US, MS, 2 * MS] {
        let parts = |tenants: &[(&[u8], u32)]| {
            let load = |&(gpus, millis): &(&[u8], u32)| on(gpus, millis);
            let mut loads: Vec<Load> = tenants.iter().map(load).collect();
            loads[0] = loads[0].clone().pausing(4, (pause / 2, pause));
            let figures = play(loads, 5 * SECOND);
            [0, 1].map(|i: usize| figures.tenants[i].used_ns / (5 * MS))
        };
        let beside_one = parts(&[(&[0], 500), (&[0], 500)]);
        let beside_two = parts(&[(&[0], 500), (&[0], 300), (&[0], 200)]);
        for (alone, gang) in [
            (beside_one, parts(&[(&[0, 1], 500), (&[0], 500), (&[1], 500)])),
            (beside_two, parts(&[(&[0, 1], 500), (&[0, 1], 300), (&[1], 200)])),
        ] {
            let near = gang.iter().zip(alone).all(|(part, alone)| part.abs_diff(alone) <= 25);
            assert!(near, "{pause}: {gang:?}, on one GPU {alone:?}");
        }
    }
}

fn any_gpus() -> impl Strategy<Value = Load> {
    (1_u8..16, 50_u32..500).prop_map(|(mask, millis)| {
        let gpus: Vec<u8> = (0..4).filter(|gpu| mask >> gpu & 1 == 1).collect();
        on(&gpus, millis)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn whoever_wants_is_granted_whatever_the_gangs(
        loads in prop::collection::vec(any_gpus(), 2..8), seed: u64,
    ) {
        let figures = simulate(&Scenario { seed, ..scenario(loads.clone(), SECOND) });
        prop_assert_eq!(figures.double_grants, 0);
        let all: u64 = loads.iter().map(|load| u64::from(load.share.millis)).sum();
        for (load, tenant) in loads.iter().zip(&figures.tenants) {
            // A round of everybody, one after the other, twice.
            let round = 2 * 8 * MS * all / u64::from(load.share.millis);
            let bound = round + 4 * 8 * MS * loads.len() as u64;
            prop_assert!(tenant.starved_ns <= bound, "{load:?} {tenant:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn tenants_with_the_same_gpus_are_served_as_on_one_gpu(
        events in prop::collection::vec((nonsense::event(), 1..3 * MS), 1..200),
    ) {
        let on = |gpus: &'static [u8]| (gpus, Policy::new(Settings::default()));
        let mut policies = [on(&[0]), on(&[0, 1]), on(&[0, 1, 2])];
        let mut now = 0;
        for (event, passed) in events {
            let until = now + passed;
            while now < until {
                now = policies[0].1.deadline().map_or(until, |at| at.clamp(now + 1, until));
                let said = policies.each_mut().map(|(gpus, policy)| {
                    match &event {
                        _ if now < until => policy.tick(now),
                        Event::Join(who, _, share) => policy.join(now, TenantId(*who), gpus, *share),
                        event => event.happen(policy, now),
                    }
                    let commands: Vec<_> = policy.commands().collect();
                    (commands, policy.rouses().collect::<Vec<_>>())
                });
                prop_assert_eq!(&said[0], &said[1], "at {}", now);
                prop_assert_eq!(&said[0], &said[2], "at {}", now);
            }
        }
    }
}

/// Thousandths of the time for which the first tenant's gate is open beside one of 750, while all want without end.
/// If it `moves`, it joins with another set of GPUs every 20 ms.
fn open_millis(share: Share, moves: bool) -> u64 {
    const STEP: u64 = 50 * US;
    let mut policy = Policy::new(Settings::default());
    policy.join(0, TenantId(0), &[0], share);
    policy.join(0, TenantId(1), &[0], burst(750));
    let (mut open, mut now, until) = (0, 0, 4 * SECOND);
    while now < until {
        now += STEP;
        if moves && now.is_multiple_of(20 * MS) {
            let gpus: &[u8] = if now.is_multiple_of(40 * MS) { &[0] } else { &[0, 1] };
            policy.join(now, TenantId(0), gpus, share);
        }
        for id in [TenantId(0), TenantId(1)] {
            let state = policy.tenant(now, id).expect("a tenant").state;
            if state == GateState::Closed {
                policy.drained(now, id, None);
                policy.want(now, id);
            } else if id == TenantId(0) {
                open += STEP;
            }
        }
        policy.tick(now);
        policy.commands().for_each(drop);
    }
    open * 1000 / until
}

#[test]
fn a_tenant_that_joins_again_and_again_is_no_newcomer() {
    for share in [burst(250), strict(250), strict(100)] {
        let (stays, moves) = (open_millis(share, false), open_millis(share, true));
        assert!(stays + 10 >= u64::from(share.millis), "{share:?}: {stays}");
        assert!(moves <= stays + 15, "{share:?}: {stays} where it stays, {moves} where it moves");
    }
}
