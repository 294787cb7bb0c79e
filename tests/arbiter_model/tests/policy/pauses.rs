//! Loops that pause between their steps, as one that decodes tokens does.

use proptest::prelude::*;

use super::*;

const SWITCH: u64 = 50 * US;

/// `work` of GPU time in five operations, then a pause of `pause`, more or less.
fn steps(millis: u32, work: u64, pause: u64) -> Load {
    let load = Load::backlogged(burst(millis), (work / 5, work / 5));
    load.pausing(5, (pause - pause / 10, pause + pause / 10))
}

fn watch(loads: Vec<Load>, until: u64) -> Figures {
    let figures = simulate(&Scenario { switch: SWITCH, ..scenario(loads, until) });
    assert_eq!(figures.double_grants, 0);
    figures
}

/// Each one's part of the time.
fn used(figures: &Figures) -> Vec<f64> {
    let of = |tenant: &TenantFigures| float(tenant.used_ns) / float(figures.elapsed_ns);
    figures.tenants.iter().map(of).collect()
}

#[test]
fn two_loops_that_pause_get_their_shares() {
    for (work, pause) in [(MS, 200 * US), (500 * US, 150 * US), (5 * MS, 500 * US)] {
        let parts =
            used(&watch(vec![steps(800, work, pause), steps(200, work, pause)], 5 * SECOND));
        // What is waited for is nobody else's; of longer pauses the other has its part.
        let first = parts[0] / (parts[0] + parts[1]);
        let is_waited_for = pause <= 300 * US;
        assert!(!is_waited_for || (first - 0.8).abs() < 0.02, "{work} {pause}: {parts:?}");
        // The GPU loses the pauses, not more.
        let busy = float(work) / float(work + pause);
        assert!(parts.iter().sum::<f64>() > busy - 0.02, "{work} {pause}: {parts:?}");
        for (part, share) in parts.iter().zip([0.8, 0.2]) {
            assert!(*part > share * busy - 0.02, "{work} {pause}: {parts:?}");
        }
    }
}

#[test]
fn a_loop_that_pauses_gets_its_share_beside_a_backlog() {
    let backlog = Load::backlogged(burst(200), (200 * US, 200 * US));
    let figures = watch(vec![steps(800, MS, 200 * US), backlog], 5 * SECOND);
    // Its pauses are its own: it pays for them.
    let charged = |i: usize| float(figures.tenants[i].charged_ns) / float(5 * SECOND);
    assert!((charged(0) - 0.8).abs() < 0.015, "{}", charged(0));
    let parts = used(&figures);
    assert!(parts[0] > 0.65 && parts[1] > 0.19, "{parts:?}");
}

#[test]
fn who_pauses_long_is_not_waited_for() {
    // 1 ms of work and 5 ms of pause: the other has all of the pauses but for the hand-overs, which
    // are some 0.4 ms of 6.
    let backlog = Load::backlogged(burst(500), (200 * US, 200 * US));
    let parts = used(&watch(vec![steps(500, MS, 5 * MS), backlog.clone()], 5 * SECOND));
    assert!(parts.iter().sum::<f64>() > 0.92, "{parts:?}");
    // And who works little between short pauses: it would keep the GPU and hardly use it.
    let parts = used(&watch(vec![steps(500, 50 * US, 200 * US), backlog], 5 * SECOND));
    assert!(parts.iter().sum::<f64>() > 0.80, "{parts:?}");
}

/// After how long a tenant is idle, in each of so many rounds of 2 ms of work beside one that waits, and a
/// pause.
fn patience(rounds: usize, pause: impl Fn(usize) -> u64) -> Vec<u64> {
    let mut policy = Policy::new(Settings::default());
    let (one, other) = (TenantId(1), TenantId(2));
    policy.join(0, one, &[0], burst(500));
    policy.join(0, other, &[0], burst(500));
    let mut now = SECOND;
    let (mut patience, mut said) = (Vec::new(), 0);
    for round in 0..rounds {
        let idle_ns = loop {
            policy.want(now, other);
            policy.want(now, one);
            loop {
                let commands: Vec<_> = policy.commands().collect();
                for command in &commands {
                    match (command.tenant == one, command.state) {
                        (_, GateState::Closed) => policy.drained(now, command.tenant, None),
                        (true, GateState::Yield) => said = command.pace.idle_ns,
                        _ => {}
                    }
                }
                if commands.is_empty() {
                    break;
                }
            }
            match policy.tenant(now, one).map(|view| view.state) {
                Some(GateState::Yield) => break said,
                _ => now = policy.deadline().unwrap_or(now).max(now),
            }
            policy.tick(now);
        };
        patience.push(idle_ns);
        now += 2 * MS;
        let pause = pause(round);
        if pause > idle_ns {
            policy.idle(now + idle_ns, one);
            policy.drained(now + idle_ns + 50 * US, one, None);
        }
        now += pause;
    }
    patience
}

#[test]
fn who_stops_pausing_shortly_is_waited_for_a_few_times_only() {
    let patience = patience(40, |round| if round < 20 { 300 * US } else { 100 * MS });
    assert!(patience[..4].iter().all(|&idle_ns| idle_ns == 100 * US), "{patience:?}");
    assert!(patience[10..20].iter().all(|&idle_ns| idle_ns > 300 * US), "{patience:?}");
    assert!(patience[24..].iter().all(|&idle_ns| idle_ns == 100 * US), "{patience:?}");
}

#[test]
fn whose_pauses_are_all_long_is_idle_sooner_until_one_is_short() {
    let patience = patience(200, |round| if round == 40 { 80 * US } else { 20 * MS });
    assert!(patience[..8].iter().all(|&idle_ns| idle_ns == 100 * US), "{patience:?}");
    assert!(patience[12..40].iter().all(|&idle_ns| idle_ns == 30 * US), "{patience:?}");
    // In the middle of its work, perhaps: it had to wait for its next lease.
    assert!(patience[42..].iter().all(|&idle_ns| idle_ns == 100 * US), "{patience:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn waiting_for_pauses_takes_nobody_elses_time(
        work in 100 * US..6 * MS, pause in 20 * US..4 * MS, millis in 100_u32..900, seed: u64,
    ) {
        // Whatever it does, a backlogged neighbour is charged its share at least, and uses it.
        let backlog = Load::backlogged(burst(1000 - millis), (100 * US, 200 * US));
        let loads = vec![steps(millis, work, pause), backlog];
        let figures = simulate(&Scenario { seed, ..scenario(loads, 2 * SECOND) });
        prop_assert_eq!(figures.double_grants, 0);
        let due = f64::from(1000 - millis) / 1000.0;
        let neighbour = &figures.tenants[1];
        let charged = float(neighbour.charged_ns) / float(figures.elapsed_ns);
        prop_assert!(charged > due - 0.02, "{charged} of {due}: {figures:?}");
        let handed = float(neighbour.leases * 3 * DELAY.1) / float(figures.elapsed_ns);
        let used = float(neighbour.used_ns) / float(figures.elapsed_ns);
        prop_assert!(used > charged - handed - 0.01, "{used} of {charged}: {figures:?}");
    }
}

#[test]
fn a_server_that_naps_finds_little_in_flight_and_a_smaller_one_the_whole_window() {
    let median = |millis| {
        let server = Load::backlogged(burst(millis), (500 * US, 500 * US));
        let server = server.pausing(4, (10 * MS, 40 * MS));
        let backlog = Load::backlogged(burst(1000 - millis), (200 * US, 200 * US));
        let figures = watch(vec![server, backlog], 5 * SECOND);
        let mut waits = figures.tenants[0].waits.clone();
        waits.sort_unstable();
        let busy = float(figures.busy_ns[0]) / float(figures.elapsed_ns);
        assert!(busy > 0.98, "{busy}");
        waits[waits.len() / 2]
    };
    // Two operations, the ways and the change-over.
    assert!(median(800) < 600 * US, "{}", median(800));
    assert!(median(500) < 600 * US, "{}", median(500));
    // One with a fifth waits for a millisecond of the other's.
    assert!(median(200) > 800 * US, "{}", median(200));
}
