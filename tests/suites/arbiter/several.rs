//! Processes with several shares.

use tessera_arbiter::Arbiter;
use tessera_region::quota::Policy;
use tessera_region::session::Message;

use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter, first_gets};
use tessera_harness::until;

/// A process of that token joins these gates, and keeps to the first, where it says hello.
fn joined(token: u64, tenants: &[&Tenant]) -> Vec<Peer> {
    let join = |(at, tenant): (usize, &&Tenant)| {
        let peer = Peer::connect(tenant.path());
        let peer = if at == 0 { peer.hello() } else { peer };
        assert!(peer.say(Message::Joins { token, leads: at == 0 }));
        peer
    };
    tenants.iter().enumerate().map(join).collect()
}

/// The process of that token, which keeps to another gate, joins this one.
fn joins(token: u64, tenant: &Tenant) -> Peer {
    let peer = Peer::connect(tenant.path());
    assert!(peer.say(Message::Joins { token, leads: false }));
    peer
}

fn has(tenant: &Tenant, arbiter: &Arbiter, millis: u32) {
    until("it has its share", || tenant.share(arbiter).share.millis == millis);
}

#[test]
fn two_shares_of_one_gpu_are_their_sum_while_a_process_has_both() {
    let arbiter = arbiter();
    let one = Tenant::new("one", 250).at(&arbiter);
    let two = Tenant::new("two", 500).at(&arbiter);
    let other = Tenant::new("other", 250).at(&arbiter);
    let _workers = [Worker::leading(&one, 7), Worker::new(&other)];
    let link = joins(7, &two);
    has(&one, &arbiter, 750);
    first_gets(700..=800, &arbiter, &[&one, &other]);
    // A new limit of the second counts for the first.
    two.page.set_cores(0, 250, Policy::Burst);
    arbiter.admit(two.path()).unwrap();
    has(&one, &arbiter, 500);
    drop(link);
    has(&one, &arbiter, 250);
    first_gets(450..=550, &arbiter, &[&one, &other]);
}

#[test]
fn shares_of_two_gpus_are_leased_together() {
    let arbiter = arbiter();
    let one = Tenant::with("one", &["GPU-0"], 500, Policy::Burst).at(&arbiter);
    let two = Tenant::with("two", &["GPU-1"], 500, Policy::Burst).at(&arbiter);
    let single = Tenant::with("single", &["GPU-1"], 500, Policy::Burst).at(&arbiter);
    let _workers = [Worker::leading(&one, 7), Worker::new(&single)];
    until("each has its GPU", || one.is_open() && single.is_open());
    // On different GPUs they are in nobody's way, until a process has both, in the middle of its work.
    let link = joins(7, &two);
    let leases = |tenant: &Tenant| tenant.share(&arbiter).totals.leases;
    let before = leases(&single);
    until("they take turns", || leases(&single) > before + 3);
    first_gets(400..=600, &arbiter, &[&one, &single]);
    drop(link);
    until("each has its GPU", || one.is_open() && single.is_open());
}

#[test]
fn nonsense_in_joining_harms_nobody() {
    let arbiter = arbiter();
    let (one, two) = (Tenant::new("one", 300).at(&arbiter), Tenant::new("two", 200).at(&arbiter));
    // Two lead each other; one joins itself, again and again; nobody leads.
    let around = [joined(2, &[&one, &two]), joined(3, &[&two, &one])];
    let own = [joins(4, &one), joins(4, &one)];
    let stray = joins(5, &two);
    // Each share is divided between the two that use it.
    has(&one, &arbiter, 250);
    has(&two, &arbiter, 250);
    arbiter.release("two");
    has(&one, &arbiter, 300);
    drop((stray, around, own));
    let _worker = Worker::new(&one);
    until("it runs", || one.share(&arbiter).totals.leases > 0);
}

#[test]
fn a_connection_is_one_process_and_keeps_to_a_gate_only_after_its_hello() {
    let arbiter = arbiter();
    let (one, two) = (Tenant::new("one", 300).at(&arbiter), Tenant::new("two", 200).at(&arbiter));
    let nonsense = |tenant: &Tenant| tenant.share(&arbiter).violations.nonsense;
    let links = joined(7, &[&one, &two]);
    has(&one, &arbiter, 500);
    // Another process, and another word of this one: neither is taken. Said again is nothing new.
    for message in [
        Message::Joins { token: 8, leads: false },
        Message::Joins { token: 7, leads: true },
        Message::Joins { token: 7, leads: false },
    ] {
        assert!(links[1].say(message));
    }
    until("it is heard", || nonsense(&two) == 2);
    // Without a hello nobody leads.
    let stranger = Peer::connect(two.path());
    assert!(stranger.say(Message::Joins { token: 7, leads: true }));
    until("it is heard", || nonsense(&two) == 3);
    has(&one, &arbiter, 500);
    has(&two, &arbiter, 200);
    // Who goes on so is not listened to.
    until("it is dropped", || !stranger.say(Message::Joins { token: 7, leads: true }));
    assert_eq!(two.share(&arbiter).violations.dropped, 1);
    drop(links);
    has(&one, &arbiter, 300);
}
