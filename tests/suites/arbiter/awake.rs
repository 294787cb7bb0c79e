//! The next tenant is awake when its gate opens, and nobody is kept awake.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN};
use tessera_region::session::Message;

use tessera_harness::gate_tenants::{Peer, Tenant, arbiter, until};

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
