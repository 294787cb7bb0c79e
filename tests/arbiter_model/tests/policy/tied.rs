//! Tenants whose work in flight waits for work that the gate holds back: collectives over GPUs and
//! processes, waits for memory, host functions. They never drain by themselves.

use proptest::prelude::*;

use super::*;

/// Groups of operations that wait for each other. Leases end within a group as often as not.
fn tied(share: Share, group: u32) -> Load {
    Load::backlogged(share, (100 * US, 300 * US)).in_groups(group)
}

#[test]
fn a_tenant_that_cannot_drain_gets_leases_all_the_same() {
    for others in [vec![], vec![Load::backlogged(burst(500), (200 * US, 200 * US))]] {
        for share in [strict(500), burst(500)] {
            let mut loads = vec![tied(share, 3)];
            loads.extend(others.clone());
            let figures = play(loads, 10 * SECOND);
            let tenant = &figures.tenants[0];
            let is_alone = tenant.used_ns > 9 * SECOND;
            assert!(tenant.leases > 3 || is_alone, "{share:?} beside {}: {tenant:?}", others.len());
            assert_eq!(figures.double_grants, 0);
        }
    }
}

#[test]
fn a_gang_that_cannot_drain_gets_leases_all_the_same() {
    let gang = Load { gpus: vec![0, 1], ..tied(burst(500), 2) };
    let alone = Load::backlogged(burst(500), (200 * US, 200 * US));
    let loads = vec![gang, alone.clone(), Load { gpus: vec![1], ..alone }];
    let figures = play(loads, 10 * SECOND);
    let part = |i: usize| float(figures.tenants[i].used_ns) / float(10 * SECOND);
    assert!(figures.tenants[0].leases > 3, "{:?}", figures.tenants[0]);
    assert!(part(1) > 0.45 && part(2) > 0.45, "{} {}", part(1), part(2));
}

/// Virtual time stands still on a GPU where only the late gang competes; that must not keep the gang from
/// the GPU that it shares.
#[test]
fn a_late_gang_is_served_beside_a_gang_that_shares_one_of_its_gpus() {
    let gang = |gpu, millis, op, group| {
        let load = Load::backlogged(burst(millis), (op, op)).in_groups(group);
        Load { gpus: vec![0, gpu], ..load }
    };
    let loads = vec![gang(1, 221, 347_793, 1), gang(2, 258, 200_000, 2)];
    for seed in [39_574_017_958_932, 1, 2, 3] {
        let figures = simulate(&Scenario { seed, ..scenario(loads.clone(), 20 * SECOND) });
        for tenant in &figures.tenants {
            assert!(tenant.starved_ns < 10 * SECOND, "{seed}: {tenant:?}");
        }
    }
}

/// On GPU 2 nobody is served while the third has the others, which is not late and moves their time alone.
#[test]
fn late_gangs_are_served_beside_one_that_is_in_time_on_two_of_their_gpus() {
    let gang = |gpus: &[u8], millis, op, group| {
        let load = Load::backlogged(burst(millis), op).in_groups(group);
        Load { gpus: gpus.to_vec(), ..load }
    };
    let loads = vec![
        gang(&[0, 1, 2], 50, (203_352, 203_352), 2),
        gang(&[0, 1, 2], 299, (466_354, 466_354), 2),
        gang(&[0, 1], 113, (363_216, 726_432), 4),
    ];
    for seed in [1_060_923_805_440_426_199, 1, 2, 3] {
        let figures = simulate(&Scenario { seed, ..scenario(loads.clone(), 20 * SECOND) });
        for tenant in &figures.tenants {
            assert!(tenant.starved_ns < 10 * SECOND, "{seed}: {tenant:?}");
        }
    }
}

fn any_load() -> impl Strategy<Value = Load> {
    let share = (50_u32..1000, any::<bool>())
        .prop_map(|(millis, capped)| if capped { strict(millis) } else { burst(millis) });
    let op = (200 * US..2 * MS, 1_u64..4);
    let batch = prop_oneof![2 => Just(0_u32), 1 => 1_u32..20];
    (1_u8..8, share, op, batch, 1_u32..6).prop_map(|(mask, share, (op, spread), batch, group)| {
        let gpus = (0..3).filter(|gpu| mask >> gpu & 1 == 1).collect();
        // A program that paused in the middle of a group would wait for itself.
        let load = Load { gpus, ..Load::backlogged(share, (op, op * spread)) };
        load.pausing(batch * group, (50 * US, 3 * MS)).in_groups(group)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whoever_wants_is_served_whatever_waits_for_what(
        loads in prop::collection::vec(any_load(), 1..7), seed: u64,
        stops in prop::collection::vec((0_u64..SECOND, 0_usize..7, 0_u64..SECOND), 0..3),
    ) {
        let mut changes: Vec<_> = stops
            .into_iter()
            .filter(|(_, who, _)| *who < loads.len())
            .flat_map(|(at, who, length)| {
                [(at, Change::Stop(who)), (at + length, Change::Continue(who))]
            })
            .collect();
        changes.sort_by_key(|(at, _)| *at);
        let until = 20 * SECOND;
        let figures = simulate(&Scenario { seed, changes, ..scenario(loads.clone(), until) });
        for (load, tenant) in loads.iter().zip(&figures.tenants) {
            // What a second of lateness costs, at the tenant's share, and as much again for a round of
            // the others.
            let all: u64 = loads.iter().map(|load| u64::from(load.share.millis)).sum();
            let bound = 3 * SECOND * (all + 1000) / u64::from(load.share.millis) + 2 * SECOND;
            prop_assert!(tenant.starved_ns <= bound, "{bound}: {load:?} {tenant:?}");
        }
    }
}
