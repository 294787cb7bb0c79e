//! Tenants that lie, flood, or send what is no message.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tessera_region::layout::GATE_CLOSED;
use tessera_region::session::{Kind, Message};

use tessera_harness::gate_tenants::{Peer, Tenant, Worker, arbiter};
use tessera_harness::{in_own_process, until};

#[test]
fn a_lie_about_draining_ends_nothing() {
    let arbiter = arbiter();
    let (liar, waiter) =
        (Tenant::new("liar", 500).at(&arbiter), Tenant::new("w", 500).at(&arbiter));
    let lies = Peer::bound(&liar, &arbiter);
    lies.want();
    liar.opens();
    // Early: the gate is open.
    lies.drained(liar.epoch());
    lies.drained(liar.epoch() + 1);
    let peer = Peer::bound(&waiter, &arbiter);
    peer.want();
    let epoch = liar.closes();
    for wrong in [0, epoch - 1, epoch + 1, u32::MAX] {
        lies.drained(wrong);
    }
    until("all are heard", || liar.share(&arbiter).ignored == 6);
    assert_eq!(liar.share(&arbiter).owing, 1);
    lies.drained(epoch);
    waiter.opens();
    // Late, and again: nobody else's lease moves.
    let word = waiter.page.gate(0);
    lies.drained(epoch);
    lies.say(Message::Idle { gpu: 0, epoch });
    until("it is heard", || liar.share(&arbiter).ignored == 7);
    assert_eq!(waiter.page.gate(0), word);
}

#[test]
fn idle_counts_for_the_one_who_says_it() {
    let arbiter = arbiter();
    let (one, other) =
        (Tenant::new("one", 500).at(&arbiter), Tenant::new("other", 500).at(&arbiter));
    let (busy, waiting) = (Peer::bound(&one, &arbiter), Peer::bound(&other, &arbiter));
    busy.want();
    one.opens();
    waiting.say(Message::Idle { gpu: 0, epoch: one.epoch() });
    waiting.say(Message::Idle { gpu: 0, epoch: other.epoch() });
    waiting.want();
    let epoch = one.closes();
    busy.drained(epoch);
    other.opens();
}

#[test]
fn a_flood_is_slowed_down() {
    let arbiter = arbiter();
    let flooder = Tenant::new("flooder", 250).at(&arbiter);
    let peers = [(); 3].map(|()| Peer::connect(flooder.path()).hello());
    std::thread::scope(|scope| {
        for peer in &peers {
            // Blocks once its own queue is full, and ends with the tenant.
            scope.spawn(|| while peer.drained(0) {});
        }
        until("it is slowed down", || flooder.share(&arbiter).violations.throttled > 3);
        arbiter.release("flooder");
    });
}

/// Resident memory of this process, KiB.
fn rss_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Says something new of this kind all the time, and connects again whenever it is dropped.
fn say_without_end(tenant: &Tenant, kind: Kind, first: u64, said: &AtomicU64, stop: &AtomicBool) {
    let mut number = first;
    while !stop.load(Ordering::Relaxed) {
        let Ok(peer) = Peer::try_connect(tenant.path()) else { continue };
        // What is said before a hello is tried as well.
        let peer = if number.is_multiple_of(2) { peer.hello() } else { peer };
        let mut is_heard = true;
        while is_heard && !stop.load(Ordering::Relaxed) {
            number += 1;
            is_heard = peer.say(Message::specimen(kind, number));
            said.fetch_add(u64::from(is_heard), Ordering::Relaxed);
        }
    }
}

#[test]
fn no_kind_of_message_grows_the_arbiter_or_stops_the_others() {
    if !in_own_process("hostile::no_kind_of_message_grows_the_arbiter_or_stops_the_others") {
        return;
    }
    let arbiter = arbiter();
    let (a, b) = (Tenant::new("a", 500).at(&arbiter), Tenant::new("b", 250).at(&arbiter));
    let _workers = [Worker::new(&a), Worker::new(&b)];
    let mut seen = Vec::new();
    for round in 0..3 {
        for &kind in Kind::ALL {
            let flooder = Tenant::new("flooder", 250).at(&arbiter);
            let (said, stop) = (AtomicU64::new(0), AtomicBool::new(false));
            std::thread::scope(|scope| {
                for first in 0..3 {
                    let (flooder, said, stop) = (&flooder, &said, &stop);
                    let first = first << 40 | first;
                    scope.spawn(move || say_without_end(flooder, kind, first, said, stop));
                }
                let name = format!("{kind:?}");
                until(&format!("so many of {name}"), || said.load(Ordering::Relaxed) > 10_000);
                let leases = || [&a, &b].map(|tenant| tenant.share(&arbiter).totals.leases);
                let before = leases();
                until(&format!("others go on beside {name}"), || {
                    let now = leases();
                    now[0] > before[0] + 10 && now[1] > before[1] + 10
                });
                stop.store(true, Ordering::Relaxed);
                arbiter.release("flooder");
            });
            let shares = [&a, &b].map(|tenant| tenant.share(&arbiter).share.millis);
            assert_eq!(shares, [500, 250], "{kind:?}");
        }
        seen.push((round, rss_kib()));
    }
    // All that is ever needed was there after the first round.
    let grown = seen[2].1.saturating_sub(seen[0].1);
    assert!(grown < 2048, "{grown} KiB more after as many messages again: {seen:?}");
}

#[test]
fn garbage_is_counted_and_then_its_sender_is_dropped() {
    let arbiter = arbiter();
    let tenant = Tenant::new("garbage", 500).at(&arbiter);
    let peer = Peer::bound(&tenant, &arbiter);
    for n in 0..32 {
        peer.raw(&vec![n; usize::from(n) * 4 + 1]);
    }
    until("it is dropped", || tenant.share(&arbiter).violations.dropped == 1);
    assert_eq!(tenant.share(&arbiter).violations.garbage, 16);
    until("it is not waited for", || tenant.share(&arbiter).processes == 0);
    // Others of the same tenant are served.
    let good = Peer::bound(&tenant, &arbiter);
    good.want();
    tenant.opens();
}

#[test]
fn connections_are_bounded_and_the_others_are_served() {
    let arbiter = arbiter();
    let (greedy, good) =
        (Tenant::new("greedy", 500).at(&arbiter), Tenant::new("good", 500).at(&arbiter));
    let connect = |_| Peer::connect(greedy.path());
    let held: Vec<Peer> = (0..300).map(connect).collect();
    until("most are turned away or wait", || {
        let violations = greedy.share(&arbiter).violations;
        violations.turned_away + violations.throttled > 0
    });
    let peer = Peer::bound(&good, &arbiter);
    peer.want();
    good.opens();
    drop(held);
    let peer = Peer::bound(&greedy, &arbiter);
    peer.want();
    greedy.opens();
}

#[test]
fn whoever_never_said_hello_is_not_listened_to() {
    let arbiter = arbiter();
    let tenant = Tenant::new("silent", 500).at(&arbiter);
    let peer = Peer::connect(tenant.path());
    peer.want();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(tenant.state(), GATE_CLOSED);
    let peer = peer.hello();
    peer.want();
    tenant.opens();
}
