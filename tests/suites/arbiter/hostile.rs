//! Tenants that lie, flood, or send packets that are not messages.

use std::time::Duration;

use tessera_region::layout::GATE_CLOSED;
use tessera_region::session::Message;

use tessera_harness::gate_tenants::{Peer, Tenant, arbiter};
use tessera_harness::until;

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
