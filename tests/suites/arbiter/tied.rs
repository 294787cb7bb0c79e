//! Tenants whose processes wait for each other: what one has in flight for a launch that waits at the
//! gate of another.

use std::time::Duration;

use tessera_arbiter::Arbiter;
use tessera_region::layout::GATE_CLOSED;
use tessera_region::session::Message;

use crate::process::Process;
use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter, until};

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

#[test]
fn who_never_drains_gets_its_next_lease_all_the_same() {
    let arbiter = arbiter();
    let (holder, peer, _stuck, _worker, _epoch) = closing(&arbiter);
    let leases = holder.share(&arbiter).totals.leases;
    peer.want();
    until("it is let in again", || holder.share(&arbiter).totals.leases > leases);
}
