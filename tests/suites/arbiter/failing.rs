//! What happens to the others when a tenant dies, stops, or closes its socket.

use std::time::Duration;

use nix::sys::signal::Signal;
use tessera_arbiter::Arbiter;
use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter};
use tessera_harness::until;
use tessera_region::layout::{ARBITER_GONE, ARBITER_STALE_NS, GATE_CLOSED};
use tessera_region::session::Message;
use tessera_region::usage::UsageMap;

use crate::process::Process;

/// A process holds the lease, and somebody else waits for it.
fn holding(role: &str) -> (tessera_arbiter::Arbiter, Tenant, Process, Tenant, Peer) {
    let arbiter = arbiter();
    let (holder, waiter) =
        (Tenant::new("holder", 500).at(&arbiter), Tenant::new("w", 500).at(&arbiter));
    let process = Process::new(role, &[holder.path()]);
    until("it holds", || holder.is_open());
    let peer = Peer::bound(&waiter, &arbiter);
    (arbiter, holder, process, waiter, peer)
}

#[test]
fn a_dead_holder_is_not_waited_for() {
    for role in ["holds", "forks"] {
        let (arbiter, holder, process, waiter, peer) = holding(role);
        process.kill();
        peer.want();
        waiter.opens();
        let share = holder.share(&arbiter);
        assert_eq!((share.processes, share.owing, share.totals.overlaps), (0, 0, 0), "{role}");
    }
}

#[test]
fn a_stopped_holder_is_overlapped_after_the_deadline_and_goes_on_later() {
    let (arbiter, holder, process, waiter, peer) = holding("works");
    process.stop();
    peer.want();
    waiter.opens();
    until("it is reported", || holder.share(&arbiter).totals.overlaps == 1);
    assert_eq!(holder.share(&arbiter).owing, 1);
    assert_eq!(arbiter.view().unwrap().gpus[0].late, ["holder"]);
    process.signal(Signal::SIGCONT);
    until("it drains", || holder.share(&arbiter).owing == 0);
    // And takes part again.
    let before = holder.share(&arbiter).totals.leases;
    let waiting = Worker::new(&waiter);
    until("it is let in again", || holder.share(&arbiter).totals.leases > before + 2);
    drop(waiting);
}

#[test]
fn a_process_without_its_socket_is_waited_for_a_moment_only() {
    let arbiter = arbiter();
    let (holder, waiter) =
        (Tenant::new("holder", 500).at(&arbiter), Tenant::new("w", 500).at(&arbiter));
    let held = Peer::bound(&holder, &arbiter);
    held.want();
    holder.opens();
    let peer = Peer::bound(&waiter, &arbiter);
    // This process lives on, as after closefrom(3) or exec.
    drop(held);
    until("it has left", || holder.share(&arbiter).processes == 0);
    peer.want();
    waiter.opens();
    assert_eq!(holder.share(&arbiter).totals.overlaps, 0);
}

#[test]
fn a_process_that_connects_again_keeps_what_it_owes() {
    let arbiter = arbiter();
    let (holder, waiter) =
        (Tenant::new("holder", 500).at(&arbiter), Tenant::new("w", 500).at(&arbiter));
    let held = Peer::bound(&holder, &arbiter);
    held.want();
    holder.opens();
    let peer = Peer::bound(&waiter, &arbiter);
    peer.want();
    let epoch = holder.closes();
    drop(held);
    let again = Peer::connect(holder.path()).hello();
    std::thread::sleep(Duration::from_millis(5));
    let share = holder.share(&arbiter);
    assert_eq!((share.processes, share.owing), (1, 1));
    again.drained(epoch);
    waiter.opens();
    assert_eq!(holder.share(&arbiter).owing, 0);
}

#[test]
fn where_pids_are_hidden_the_end_of_a_connection_is_a_death() {
    let tenant = Tenant::new("hidden", 500);
    let waiter = Tenant::new("waiter", 500);
    let own_pids = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let arbiter = Process::under(&own_pids, "arbitrates", &[tenant.path(), waiter.path()]);
    until("it is taken on", || waiter.reader().arbiter_ns() > 0);
    let one = Peer::connect(tenant.path()).hello();
    let other = Peer::connect(tenant.path()).hello();
    one.want();
    tenant.opens();
    let waiting = Peer::connect(waiter.path()).hello();
    waiting.want();
    let epoch = tenant.closes();
    other.drained(epoch);
    drop(one);
    waiter.opens();
    drop(arbiter);
}

// Tenants whose processes wait for each other: what one has in flight for a launch that waits at the
// gate of another.

/// A holder with two processes, this one and one whose work stands still at each closing; somebody else
/// has made it close.
fn closing(arbiter: &Arbiter) -> (Tenant, Peer, Process, Worker, u32) {
    let (holder, waiter) =
        (Tenant::new("holder", 500).at(arbiter), Tenant::new("w", 500).at(arbiter));
    let peer = Peer::bound(&holder, arbiter);
    let stuck = Process::new("stuck", &[holder.path()]);
    until("both are bound", || holder.share(arbiter).processes == 2);
    peer.want();
    holder.opens();
    let worker = Worker::new(&waiter);
    let epoch = holder.closes();
    (holder, peer, stuck, worker, epoch)
}

#[test]
fn a_launch_of_one_process_is_let_pass_when_all_that_others_have_in_flight_stands_still() {
    let arbiter = arbiter();
    let (holder, peer, stuck, _worker, epoch) = closing(&arbiter);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(holder.epoch(), epoch, "this one may go on");
    peer.drained(epoch);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(holder.epoch(), epoch, "nobody waits");
    peer.want();
    until("it is closed once more", || holder.epoch() > epoch);
    // And once more, as long as nothing helps.
    for _ in 0..3 {
        let epoch = holder.epoch();
        peer.drained(epoch);
        until("it is let pass again, or has a lease", || holder.epoch() > epoch);
    }
    // The lease, its charge and its end are as ever.
    until("it has its next lease", || holder.is_open());
    stuck.kill();
    until("it is closed", || holder.state() == GATE_CLOSED);
    peer.drained(holder.epoch());
    until("it drains", || holder.share(&arbiter).owing == 0);
}

#[test]
fn nobody_is_let_pass_while_something_goes_on() {
    let arbiter = arbiter();
    let (holder, peer, _stuck, _worker, epoch) = closing(&arbiter);
    peer.want();
    peer.say(Message::Idle { gpu: 0, epoch: epoch.wrapping_sub(1) });
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(holder.epoch(), epoch, "said of another closing");
    peer.say(Message::Idle { gpu: 0, epoch });
    until("it is closed once more", || holder.epoch() > epoch);
}

// An arbiter ends, in order or not, and another takes its place.

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
