//! What the arbiter reads in the pages of processes that say nothing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tessera_region::flight::{self, FLIGHT_BYTES, FlightPage};
use tessera_region::layout::{GATE_CLOSED, GATE_SOLO};
use tessera_region::session::Message;

use tessera_arbiter::Arbiter;
use tessera_harness::gate_tenants::{HELLO, Peer, Tenant, arbiter, until};

/// A holder that counts what it launches, and another that waits. Nobody is alone: the gate is not SOLO.
struct Pair {
    arbiter: Arbiter,
    holder: Tenant,
    page: &'static FlightPage,
    holds: Peer,
    waiter: Tenant,
    waits: Peer,
}

impl Pair {
    fn new() -> Self {
        let arbiter = arbiter();
        let tenant = |id| Tenant::new(id, 500).at(&arbiter);
        let (holder, waiter) = (tenant("holder"), tenant("waiter"));
        let waits = Peer::bound(&waiter, &arbiter);
        waits.want();
        waiter.opens();
        let (holds, page) = Peer::with_page(&holder, &arbiter);
        holds.want();
        waits.drained(waiter.closes());
        holder.opens();
        Self { arbiter, holder, page, holds, waiter, waits }
    }

    /// The holder's gate is closed, because the other waits; its word.
    fn close(&self) -> u32 {
        self.waits.want();
        self.holder.closes();
        self.holder.page.gate(0)
    }

    fn settle_first(&self) {
        // Its first drain it says itself: what it launched before its hello was not counted.
        let word = self.close();
        self.page.closed.store(word, Ordering::SeqCst);
        self.waiter.opens();
        self.holds.want();
        self.waits.drained(self.waiter.closes());
        self.holder.opens();
    }
}

#[test]
fn a_lease_ends_when_the_gpu_has_written_that_all_is_complete_and_nobody_says_so() {
    let pair = Pair::new();
    pair.settle_first();
    pair.page.used_lanes[0].store(1, Ordering::SeqCst);
    pair.page.admitted.fetch_add(3, Ordering::SeqCst);
    pair.page.marked.fetch_add(3, Ordering::SeqCst);
    pair.close();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!pair.waiter.is_open(), "three are in flight");
    pair.page.lanes[0][0].store(2, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(5));
    assert!(!pair.waiter.is_open(), "one is in flight");
    pair.page.lanes[0][0].store(3, Ordering::SeqCst);
    pair.waiter.opens();
    let share = pair.holder.share(&pair.arbiter);
    assert_eq!((share.owing, share.totals.overlaps), (0, 0));
    // What it says afterwards is no fault of its.
    pair.holds.drained(pair.holder.epoch());
    pair.holds.drained(pair.holder.epoch());
    until("the second is", || pair.holder.share(&pair.arbiter).ignored == 1);
}

#[test]
fn what_a_process_launched_without_counting_it_has_to_close_itself() {
    let pair = Pair::new();
    let word = pair.close();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!pair.waiter.is_open(), "its page says 0, and it may have launched before its hello");
    pair.page.closed.store(word.wrapping_sub(8), Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(5));
    assert!(!pair.waiter.is_open(), "that was another closing");
    pair.page.closed.store(word, Ordering::SeqCst);
    pair.waiter.opens();
    assert_eq!(pair.holder.share(&pair.arbiter).totals.overlaps, 0);
}

#[test]
fn who_is_alone_is_not_taken_to_have_drained_by_what_it_counted() {
    let pair = Pair::new();
    pair.settle_first();
    pair.waits.say(Message::Want { gpu: 0 });
    let word = pair.close();
    pair.waiter.opens();
    // The other goes; the holder is alone, and launches without counting.
    drop(pair.waits);
    pair.holds.want();
    until("it is alone", || pair.holder.state() == GATE_SOLO);
    let waits = Peer::bound(&pair.waiter, &pair.arbiter);
    waits.want();
    pair.holder.closes();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!pair.waiter.is_open());
    assert_ne!(pair.holder.page.gate(0), word);
    pair.page.closed.store(pair.holder.page.gate(0), Ordering::SeqCst);
    pair.waiter.opens();
}

#[test]
fn operations_that_nobody_is_there_to_mark_do_not_keep_the_gpu() {
    let pair = Pair::new();
    pair.settle_first();
    // Its thread was stopped behind the launch, before the marker, which would be a word.
    pair.page.used_lanes[0].store(1, Ordering::SeqCst);
    pair.page.admitted.fetch_add(2, Ordering::SeqCst);
    pair.page.usual_us.store(200, Ordering::SeqCst);
    pair.close();
    pair.waiter.opens();
    assert_eq!(pair.holder.share(&pair.arbiter).totals.overlaps, 0, "sooner than the deadline");
}

#[test]
fn a_file_that_is_no_flight_page_ends_the_connection_and_nothing_else() {
    let arbiter = arbiter();
    let tenant = Tenant::new("bad", 500).at(&arbiter);
    let (page, _) = flight::create().unwrap();
    let empty: OwnedFd = tempfile::tempfile().unwrap().into();
    let large = tempfile::tempfile().unwrap();
    large.set_len(FLIGHT_BYTES as u64).unwrap();
    let large: OwnedFd = large.into();
    let null: OwnedFd = File::open("/dev/null").unwrap().into();
    let refused =
        [vec![&empty], vec![&large], vec![&null], vec![&page, &page], vec![&page, &null, &empty]];
    for (at, files) in (1..).zip(&refused) {
        let peer = Peer::connect(tenant.path());
        assert!(peer.send_with(HELLO, files));
        until("it is dropped", || tenant.share(&arbiter).violations.dropped == at);
        until("it is closed", || !peer.want());
    }
    let peer = Peer::connect(tenant.path());
    assert!(peer.send_with(Message::Want { gpu: 0 }, &[&page]), "not with a hello");
    until("it is dropped", || tenant.share(&arbiter).violations.dropped == 6);
    let (peer, _) = Peer::with_page(&tenant, &arbiter);
    assert!(peer.send_with(Message::Want { gpu: 0 }, &[&page]), "after its hello");
    until("it is dropped", || tenant.share(&arbiter).violations.dropped == 7);
    let peer = Peer::connect(tenant.path());
    assert!(peer.send_with(HELLO, &[&page]) && peer.want());
    until("a good one is served", || tenant.state() != GATE_CLOSED);
}

#[test]
fn a_page_that_lies_moves_its_own_lease_alone() {
    let pair = Pair::new();
    pair.settle_first();
    let epoch = pair.waiter.epoch();
    for used in &pair.page.used_lanes {
        used.store(u32::MAX, Ordering::SeqCst);
    }
    for words in 0..200_u64 {
        pair.page.admitted.store(words << 56, Ordering::SeqCst);
        pair.page.settled.store(words.wrapping_mul(0x9e37_79b9_7f4a_7c15), Ordering::SeqCst);
        pair.page.awake.store(pair.holder.page.gate(0), Ordering::SeqCst);
        pair.page.usual_us.store(u32::MAX, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(100));
    }
    assert!(pair.holder.is_open() && pair.waiter.epoch() == epoch, "nobody else wants");
    pair.waits.want();
    pair.waiter.opens();
}
