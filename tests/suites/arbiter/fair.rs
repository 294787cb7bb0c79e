//! Good tenants get what they asked for.

use tessera_region::layout::{GATE_CLOSED, GATE_SOLO, gate_state};
use tessera_region::quota::Policy;

use std::time::Duration;

use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter, first_gets};
use tessera_harness::{settles, until};

#[test]
fn a_tenant_is_closed_until_it_wants_and_alone_it_is_solo() {
    let arbiter = arbiter();
    let tenant = Tenant::new("alone", 250).at(&arbiter);
    assert_eq!(tenant.state(), GATE_CLOSED);
    let reader = tenant.reader();
    assert!(reader.window(0) > 0 && reader.window_us(0) > 0);
    let peer = Peer::bound(&tenant, &arbiter);
    assert_eq!(tenant.state(), GATE_CLOSED);
    peer.want();
    until("it is solo", || tenant.state() == GATE_SOLO);
    let share = tenant.share(&arbiter);
    assert_eq!((share.processes, share.totals.leases), (1, 1));
    let view = arbiter.view().unwrap();
    assert_eq!(view.gpus[0].holder.as_deref(), Some("alone"));
    assert!(view.turns.sum_ns > 0);
}

#[test]
fn a_lone_tenant_used_as_much_as_was_measured_and_not_what_it_leased() {
    let arbiter = arbiter();
    let tenant = Tenant::new("alone", 250).at(&arbiter);
    let peer = Peer::bound(&tenant, &arbiter);
    peer.want();
    until("it is solo", || tenant.state() == GATE_SOLO);
    arbiter.measured("alone", None);
    until("much is leased", || tenant.share(&arbiter).totals.leased_ns > 400_000_000);
    let share = tenant.share(&arbiter);
    assert!(share.got_10s_millis > 500 && share.totals.used_ns == 0, "{share:?}");
    assert_eq!(share.used_10s_millis, None, "nobody knows");
    arbiter.measured("alone", Some(share.totals.leased_ns / 10));
    until("that is known", || tenant.share(&arbiter).used_10s_millis.is_some());
    let share = tenant.share(&arbiter);
    assert!(share.used_10s_millis.unwrap() <= 100, "{share:?}");
    assert!(share.totals.measured_ns > 0 && share.totals.measured_ns <= share.totals.leased_ns);
}

#[test]
fn two_that_want_all_get_their_shares() {
    let arbiter = arbiter();
    let (large, small) =
        (Tenant::new("large", 750).at(&arbiter), Tenant::new("small", 250).at(&arbiter));
    let _workers = [Worker::new(&large), Worker::new(&small)];
    until("both run", || [&large, &small].iter().all(|t| t.share(&arbiter).totals.leases > 3));
    first_gets(700..=800, &arbiter, &[&large, &small]);
    // The waiting tenant is not let in beside the other, where this machine lets both drain in time.
    let overlaps = || [&large, &small].map(|t| t.share(&arbiter).totals.overlaps);
    settles("overlaps in a second", &(0..=0), || {
        let before = overlaps();
        std::thread::sleep(Duration::from_secs(1));
        overlaps().iter().sum::<u64>() - before.iter().sum::<u64>()
    });
}

#[test]
fn all_gates_of_a_gang_change_together_and_not_while_one_gpu_is_taken() {
    let arbiter = arbiter();
    let gang = Tenant::with("gang", &["GPU-0", "GPU-1"], 500, Policy::Burst).at(&arbiter);
    let single = Tenant::with("single", &["GPU-1"], 500, Policy::Burst).at(&arbiter);
    let _workers = [Worker::new(&gang), Worker::new(&single)];
    until("both run", || [&gang, &single].iter().all(|t| t.share(&arbiter).totals.leases > 3));
    for _ in 0..500 {
        let words = [gang.page.gate(0), gang.page.gate(1), gang.page.gate(0)];
        if words[0] == words[2] {
            // The first is written first; a moment later all say the same.
            until("gates agree", || gang.page.gate(0) == gang.page.gate(1));
        }
        let before = gang.page.gate(0);
        if gang.is_open() && single.is_open() {
            // Read one after the other: they may have changed in between.
            until("one of them closes", || gang.page.gate(0) != before || !single.is_open());
        }
    }
    first_gets(400..=600, &arbiter, &[&gang, &single]);
}

#[test]
fn a_tenant_without_a_policy_or_released_is_free() {
    let arbiter = arbiter();
    let free = Tenant::with("free", &["GPU-0"], 500, Policy::None);
    arbiter.admit(free.path()).unwrap();
    let gone = Tenant::new("gone", 500).at(&arbiter);
    assert_eq!(gone.state(), GATE_CLOSED);
    arbiter.release("gone");
    until("it is free", || gone.state() == GATE_SOLO && gone.reader().arbiter_ns() == 0);
    assert_eq!(free.state(), GATE_SOLO);
    assert_eq!(gate_state(free.page.gate(0)), GATE_SOLO);
    assert!(arbiter.view().unwrap().tenants.is_empty());
    assert!(!free.path().join("gate.sock").exists());
}

#[test]
fn those_that_run_have_parts_of_the_cycle_of_their_own() {
    let arbiter = arbiter();
    let tenants: Vec<Tenant> =
        (0..4).map(|n| Tenant::new(&format!("t{n}"), 250).at(&arbiter)).collect();
    let _peers: Vec<Peer> = tenants.iter().map(|t| Peer::bound(t, &arbiter)).collect();
    let mut phases = Vec::new();
    until("everybody has a part", || {
        phases = tenants.iter().map(|t| t.reader().phase_millis(0)).collect();
        phases.sort_unstable();
        phases == [0, 250, 500, 750]
    });
}

#[test]
fn a_gpus_idle_time_is_kept_while_its_tenants_come_and_go() {
    let arbiter = arbiter();
    let total = || -> u64 {
        let view = arbiter.view().unwrap();
        view.idle.get("GPU-0").map_or(0, |idle| idle.iter().sum())
    };
    let pair = |names: [&str; 2]| names.map(|name| Tenant::new(name, 500).at(&arbiter));
    let both = pair(["one", "other"]);
    assert_eq!(total(), 0);
    let workers = both.each_ref().map(Worker::new);
    // What they say of their leases is that nothing was in flight.
    until("the GPU was idle", || total() > 1_000_000);
    drop(workers);
    both.iter().for_each(|tenant| arbiter.release(&tenant.id));
    until("nobody has it", || arbiter.view().unwrap().gpus.is_empty());
    let kept = total();
    assert!(kept > 1_000_000);
    // Another GPU takes its place.
    let elsewhere = Tenant::with("elsewhere", &["GPU-9"], 500, Policy::Burst).at(&arbiter);
    assert_eq!(arbiter.view().unwrap().idle.get("GPU-9"), Some(&[0; 6]));
    let _back = pair(["third", "fourth"]);
    assert_eq!((total(), elsewhere.share(&arbiter).processes), (kept, 0));
}
