//! An arbiter ends, in order or not, and another takes its place.

use std::time::Duration;

use tessera_region::layout::{ARBITER_GONE, ARBITER_STALE_NS, GATE_CLOSED};
use tessera_region::usage::UsageMap;

use crate::process::Process;
use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter, until};

#[test]
fn at_its_orderly_end_tenants_are_notified() {
    let arbiter = arbiter();
    let tenant = Tenant::new("tenant", 500).at(&arbiter);
    arbiter.stop();
    assert_eq!(tenant.reader().arbiter_ns(), ARBITER_GONE);
    assert!(arbiter.view().is_none());
}

#[test]
fn its_sign_of_life_never_goes_stale() {
    let arbiter = arbiter();
    let (idle, busy) =
        (Tenant::new("idle", 500).at(&arbiter), Tenant::new("busy", 500).at(&arbiter));
    let _peer = Peer::bound(&busy, &arbiter);
    for _ in 0..100 {
        let now = tessera_model::clock::monotonic_ns();
        for tenant in [&idle, &busy] {
            let age = now.saturating_sub(tenant.reader().arbiter_ns());
            assert!(age < ARBITER_STALE_NS, "{}: {age} ns", tenant.id);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn another_closes_the_gates_of_a_killed_one_and_waits_for_the_processes() {
    let (one, other) = (Tenant::new("one", 500), Tenant::new("other", 500));
    // Each tenant has a process with a slot, as every process with the shim has.
    let maps = [&one, &other].map(|t| UsageMap::attach(t.path()).unwrap());
    let _slots = maps.each_ref().map(|map| map.claim().unwrap());
    let first = Process::new("arbitrates", &[one.path(), other.path()]);
    until("they are taken on", || other.reader().arbiter_ns() > 1);
    let peer = Peer::connect(one.path()).hello();
    peer.want();
    one.opens();
    let epoch = one.epoch();
    first.kill();
    assert!(one.is_open(), "nobody has closed it");

    let arbiter = arbiter();
    for tenant in [&one, &other] {
        arbiter.admit(tenant.path()).unwrap();
    }
    assert_ne!(one.closes(), epoch, "in a new epoch");
    until("it is waited for", || one.share(&arbiter).owing == 1);
    // Its helper reconnects; it is the only one with a slot.
    let again = Peer::connect(one.path()).hello();
    until("it is known", || one.share(&arbiter).processes == 1);
    again.drained(one.epoch());
    until("nobody is waited for", || one.share(&arbiter).owing == 0);
    again.want();
    one.opens();
    // Of the other nobody comes, and nobody waits for ever.
    until("strangers are forgotten", || other.share(&arbiter).owing == 0);
}

#[test]
fn a_removed_socket_is_made_again_and_who_was_connected_stays() {
    let arbiter = arbiter();
    let tenant = Tenant::new("again", 500).at(&arbiter);
    let peer = Peer::bound(&tenant, &arbiter);
    std::fs::remove_file(tenant.path().join("gate.sock")).unwrap();
    arbiter.admit(tenant.path()).unwrap();
    assert!(tenant.path().join("gate.sock").exists());
    peer.want();
    tenant.opens();
    let worker = Worker::new(&tenant);
    until("newcomers are served", || tenant.share(&arbiter).processes == 1);
    drop(worker);
}

#[test]
fn new_pages_are_a_new_tenant() {
    let arbiter = arbiter();
    let tenant = Tenant::new("again", 500).at(&arbiter);
    let peer = Peer::bound(&tenant, &arbiter);
    peer.want();
    tenant.opens();
    let spec = tenant.page.spec();
    tessera_region::remove_pages(tenant.path()).unwrap();
    let page = tessera_region::quota::create(tenant.path(), &spec).unwrap();
    tessera_region::usage::create(tenant.path(), 2).unwrap();
    arbiter.admit(tenant.path()).unwrap();
    until("it begins closed", || tessera_region::layout::gate_state(page.gate(0)) == GATE_CLOSED);
    assert_eq!(tenant.share(&arbiter).processes, 0);
}
