//! What happens to the others when a tenant dies, stops, or closes its socket.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::process::Process;
use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter, until};

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
