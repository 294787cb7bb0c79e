//! What the arbiter reads in the pages of processes that say nothing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;
use tessera_arbiter::Arbiter;
use tessera_harness::gate_tenants::{HELLO, Peer, Tenant, arbiter};
use tessera_harness::until;
use tessera_region::flight::{self, FLIGHT_BYTES, FlightPage};
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_SOLO};
use tessera_region::session::Message;

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

// The next tenant is awake when its gate opens, and nobody is kept awake.

/// Threads that sleep at a closed gate, and how often they were woken although it stayed as it was.
struct Sleepers<'a> {
    gate: &'a AtomicU32,
    woken: AtomicU32,
    asleep: AtomicU32,
    ended: AtomicBool,
}

impl<'a> Sleepers<'a> {
    fn new(gate: &'a AtomicU32) -> Self {
        Self {
            gate,
            woken: AtomicU32::new(0),
            asleep: AtomicU32::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// One of them, until its gate is another.
    fn sleep(&self, word: u32) {
        let patience = futex::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        while self.gate.load(Ordering::Relaxed) == word && !self.ended.load(Ordering::Relaxed) {
            self.asleep.fetch_add(1, Ordering::Relaxed);
            let woken = futex::wait(self.gate, futex::Flags::empty(), word, Some(&patience));
            self.asleep.fetch_sub(1, Ordering::Relaxed);
            if woken.is_ok() && self.gate.load(Ordering::Relaxed) == word {
                self.woken.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// How it is known that a lease is nearly over.
#[derive(Clone, Copy, PartialEq)]
enum Sign {
    /// The holder says of its closing that it ends.
    Late,
    /// It was closed because it was idle.
    Idle,
}

/// A closing whose end is announced. `None` where this machine was elsewhere until its deadline had passed;
/// else how often threads were woken of who is next, and of somebody who wants nothing.
fn announced(sign: Sign) -> Option<(u32, u32)> {
    let arbiter = arbiter();
    let tenant = |id| Tenant::new(id, 333).at(&arbiter);
    let (holder, next, third) = (tenant("holder"), tenant("next"), tenant("third"));
    let peer = |tenant| Peer::bound(tenant, &arbiter);
    let (ends, wants, idles) = (peer(&holder), peer(&next), peer(&third));
    // Somebody else was there a moment ago: the holder is not taken to be alone.
    idles.want();
    third.opens();
    ends.want();
    idles.drained(third.closes());
    holder.opens();
    let (reader, bystander) = (next.reader(), third.reader());
    // SAFETY: words of pages that `reader` and `bystander` keep mapped.
    let gates = unsafe { [&*reader.gate_word(0), &*bystander.gate_word(0)] };
    let [waiting, idle] = gates.map(Sleepers::new);
    let words = [next.page.gate(0), third.page.gate(0)];
    std::thread::scope(|scope| {
        scope.spawn(|| waiting.sleep(words[0]));
        scope.spawn(|| waiting.sleep(words[0]));
        scope.spawn(|| idle.sleep(words[1]));
        let asleep = |of: &Sleepers, count| of.asleep.load(Ordering::Relaxed) == count;
        until("they sleep", || asleep(&waiting, 2) && asleep(&idle, 1));
        wants.want();
        if sign == Sign::Idle {
            until("it is to say when it is idle", || holder.state() != GATE_OPEN);
            ends.say(Message::Idle { gpu: 0, epoch: holder.epoch() });
        }
        let epoch = holder.closes();
        // Of another closing, and another's word.
        ends.say(Message::Late { gpu: 0, epoch: epoch.wrapping_sub(1), works: true });
        idles.say(Message::Late { gpu: 0, epoch, works: true });
        // As often as it likes.
        let times = if sign == Sign::Late { 10 } else { 0 };
        for _ in 0..times {
            ends.say(Message::Late { gpu: 0, epoch, works: true });
        }
        let woken = |of: &Sleepers| of.woken.load(Ordering::Relaxed);
        until("one is woken", || woken(&waiting) > 0 || next.is_open());
        std::thread::sleep(Duration::from_millis(2));
        let is_closed = next.state() == GATE_CLOSED;
        ends.drained(epoch);
        next.opens();
        idle.ended.store(true, Ordering::Relaxed);
        let in_time = holder.share(&arbiter).totals.overlaps == 0;
        assert!(is_closed || !in_time, "the holder had not drained");
        in_time.then(|| (woken(&waiting), woken(&idle)))
    })
}

#[test]
fn one_thread_of_who_is_next_is_woken_once_before_the_end_of_a_closing() {
    for sign in [Sign::Late, Sign::Idle] {
        let seen = (0..50).find_map(|_| announced(sign));
        assert_eq!(seen, Some((1, 0)));
    }
}
