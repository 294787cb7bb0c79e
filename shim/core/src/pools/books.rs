//! What one pool is charged: pure, so that it can be tried against a model of the driver.
//!
//! A pool's charge follows what the driver says it *reserves*. Calls run at the same time in one
//! pool, and the driver's figure shows the sum of their growths, not each. So no
//! call is asked for its own growth:
//!
//! - a call announces what it has reserved from the quota (*pending*) before it calls the driver;
//! - afterwards it settles under the pool's lock: the driver is asked, the charge moves to the
//!   answer, and the call's own reservation pays for as much of a growth as it can. What it does not
//!   need goes back. What it cannot pay is *lacking* only as far as no other call is pending.
//! - a call whose growth may exceed what it announces is *alone*: it starts when no other is pending,
//!   and none starts before it ends, so that what is lacking afterwards is its own doing.
//!
//! With growths of at most what each call announced, `reserved <= charged + pending` holds at every
//! moment but within a call that is alone, and `charged` is what the driver reserves whenever no call
//! is pending. Nothing is charged twice, because the charge is set to the driver's figure, never
//! added up.
//!
//! What such a call took and cannot give back at once is *owed*: charged whatever the quota says, so
//! that nothing is granted beside it, and paid by the first bytes that the driver returns.

/// The chunk in which pools grow, as far as is known: the CUDA driver's is 32 MiB.
const CHUNK: u64 = 32 << 20;
/// A chunk larger than this is not believed; such a pool's growths are paid for as they are seen.
const LARGEST_CHUNK: u64 = 1 << 30;
/// Device memory comes in pages of this size at least.
const PAGE: u64 = 2 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Books {
    pub(super) charged: u64,
    /// Bytes that calls under way have reserved from the quota.
    pending: u64,
    /// Bytes of the charge for which the quota had no room.
    pub(super) owed: u64,
    /// One call wants to be alone, or is: no more begin beside others.
    pub(super) closed: bool,
}

/// What a settlement says is to be done with the quota, while the lock is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settled {
    /// Bytes of the call's own reservation that are charged now; the rest goes back.
    pub(crate) keep: u64,
    /// Bytes charged before that the driver has given back.
    pub(crate) release: u64,
    /// Bytes that the pool holds and nobody has reserved.
    pub(crate) lacking: u64,
}

impl Books {
    /// Whether a call is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.pending > 0
    }

    /// As [`Books::begin`], for a call that grows the pool by at most `bytes`; false, with nothing
    /// announced, while another wants to be alone.
    pub(crate) fn begin_beside_others(&mut self, bytes: u64) -> bool {
        if !self.closed {
            self.begin(bytes);
        }
        !self.closed
    }

    /// A call that has reserved `bytes` from the quota is about to call the driver.
    pub(crate) fn begin(&mut self, bytes: u64) {
        self.pending = self.pending.saturating_add(bytes);
    }

    /// Moves the charge to the `reserved` bytes that the driver reports. `mine` is what the calling
    /// thread announced with [`Books::begin`]; 0 for who only looks.
    pub(crate) fn settle(&mut self, mine: u64, reserved: u64) -> Settled {
        let reserved = pages(reserved);
        self.pending = self.pending.saturating_sub(mine);
        let grown = reserved.saturating_sub(self.charged);
        let keep = grown.min(mine);
        let release = self.charged.saturating_sub(reserved);
        self.charged = self.charged + keep - release;
        self.owed = self.owed.saturating_sub(release);
        let lacking = reserved.saturating_sub(self.charged.saturating_add(self.pending));
        Settled { keep, release, lacking }
    }

    /// Whether what is lacking is nobody's who is still to answer for it.
    pub(crate) fn is_quiet(&self) -> bool {
        !self.closed && !self.is_busy()
    }

    /// The pool keeps `lacking` bytes for which the quota has no room.
    pub(crate) fn owe(&mut self, lacking: u64) {
        self.charged = self.charged.saturating_add(lacking);
        self.owed = self.owed.saturating_add(lacking);
    }

    /// The tenant is `excess` bytes over its quota, all in all: no more than that is owed.
    pub(crate) fn forgive(&mut self, excess: u64) {
        self.owed = self.owed.min(excess);
    }

    /// The pool is gone: forgets the charge and returns it.
    pub(crate) fn end(&mut self) -> u64 {
        self.owed = 0;
        core::mem::take(&mut self.charged)
    }
}

/// The most by which a pool grows for an allocation of `bytes`, where chunks of `learnt` were seen.
#[inline]
pub(crate) fn worst(bytes: u64, learnt: u64) -> u64 {
    let chunk = learnt.max(CHUNK); // a power of two
    // What overflows fits no quota.
    bytes.checked_add(chunk - 1).map_or(u64::MAX, |most| most & !(chunk - 1))
}

/// The chunk of a pool in which the driver took `lacking` bytes more than the `worst` that a call alone had reserved;
/// 0 where that is not to be believed.
pub(crate) fn learnt(worst: u64, lacking: u64) -> u64 {
    let chunk = worst.saturating_add(lacking).checked_next_power_of_two();
    chunk.filter(|chunk| *chunk <= LARGEST_CHUNK).unwrap_or(0)
}

/// Whole pages: no driver backs less with memory, whatever it reports.
pub(crate) fn pages(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_is_owed_is_charged_and_paid_first() {
        let mut books = Books::default();
        books.begin(2 * MIB);
        let lacking = books.settle(2 * MIB, 32 * MIB).lacking;
        books.owe(lacking);
        assert_eq!(books.settle(0, 32 * MIB).lacking, 0);
        assert_eq!((books.charged, books.owed), (32 * MIB, 30 * MIB));
        assert_eq!(books.settle(0, 22 * MIB).release, 10 * MIB);
        assert_eq!((books.charged, books.owed), (22 * MIB, 20 * MIB));
        books.forgive(5 * MIB);
        assert_eq!((books.charged, books.owed), (22 * MIB, 5 * MIB));
        assert_eq!((books.end(), books.owed), (22 * MIB, 0));
    }

    #[test]
    fn a_larger_chunk_is_learnt_and_nonsense_is_not() {
        assert_eq!(worst(1, 0), 32 * MIB);
        assert_eq!(learnt(32 * MIB, 32 * MIB), 64 * MIB);
        assert_eq!((learnt(64 * MIB, u64::MAX), learnt(64 * MIB, 4096 * MIB)), (0, 0));
        let of = |bytes| worst(bytes, 64 * MIB);
        assert_eq!((of(1), of(65 * MIB), of(u64::MAX)), (64 * MIB, 128 * MIB, u64::MAX));
        assert_eq!((of(0), of(64 * MIB)), (0, 64 * MIB));
    }

    /// A thread's next step, or something the driver does by itself.
    #[derive(Clone, Debug)]
    enum Act {
        /// The thread goes one step on: announces, calls the driver, settles. A call that grows the
        /// pool does so by at most what was announced, unless it is alone.
        Step { thread: usize, bytes: u64, grows: bool },
        /// An idle thread wants to be alone, one that waits gets on if nobody is under way and grows
        /// the pool by more than it announces, one that is alone settles and gives up what is
        /// lacking: at once, or as soon as the driver lets go of it.
        Alone { thread: usize, announced: u64, grown: u64, at_once: bool },
        /// The driver gives back up to so many chunks: a synchronisation, a trim.
        Shrink(u64),
        /// Somebody only looks.
        Look,
    }

    #[derive(Clone, Copy)]
    enum Thread {
        Idle,
        Announced(u64),
        Called(u64),
        /// Waits to be alone.
        Waiting,
        /// Is alone, and announced less than it may take.
        Alone {
            announced: u64,
            grown: u64,
        },
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            8 => (0usize..4, 1u64..200, any::<bool>())
                .prop_map(|(thread, mib, grows)| Act::Step { thread, bytes: mib * MIB, grows }),
            4 => (0usize..4, 0u64..100, 1u64..100, any::<bool>())
                .prop_map(|(thread, announced, more, at_once)| Act::Alone {
                    thread,
                    announced: announced * PAGE,
                    grown: (announced + more) * PAGE,
                    at_once,
                }),
            2 => (1u64..4).prop_map(Act::Shrink),
            1 => Just(Act::Look),
        ]
    }

    /// What a call that is alone has taken beyond what it announced.
    fn excess(threads: &[Thread]) -> u64 {
        let of = |thread: &Thread| match thread {
            Thread::Alone { announced, grown } => grown - announced,
            _ => 0,
        };
        threads.iter().map(of).sum()
    }

    proptest! {
        /// However calls race, settle and shrink: what the driver holds is always charged or
        /// reserved, nothing is ever lacking but to a call that is alone, and when all is quiet the charge is the driver's figure.
        #[test]
        fn racing_settlements_lose_nothing_and_charge_nothing_twice(
            acts in proptest::collection::vec(act(), 1..300)
        ) {
            let mut books = Books::default();
            let mut threads = [Thread::Idle; 4];
            let (mut reserved, mut quota, mut closed) = (0u64, 0u64, false);
            let mut owed = 0u64;
            let looked = |books: &mut Books, mine: u64, reserved: u64, quota: &mut u64| {
                let settled = books.settle(mine, reserved);
                *quota = *quota - mine + settled.keep - settled.release;
                settled
            };
            for act in acts {
                match act {
                    Act::Step { thread, bytes, grows } => threads[thread] = match threads[thread] {
                        Thread::Idle => {
                            let worst = worst(bytes, 0);
                            if books.begin_beside_others(worst) {
                                quota += worst;
                                Thread::Announced(worst)
                            } else {
                                Thread::Idle
                            }
                        }
                        Thread::Announced(worst) => {
                            if grows {
                                reserved += worst;
                            }
                            Thread::Called(worst)
                        }
                        Thread::Called(worst) => {
                            let settled = looked(&mut books, worst, reserved, &mut quota);
                            prop_assert_eq!(settled.lacking, 0);
                            Thread::Idle
                        }
                        waits => waits,
                    },
                    Act::Alone { thread, announced, grown, at_once } => threads[thread] = match threads[thread] {
                        Thread::Idle if !closed => {
                            closed = true;
                            books.closed = true;
                            Thread::Waiting
                        }
                        Thread::Waiting if !books.is_busy() => {
                            quota += announced;
                            books.begin(announced);
                            reserved += grown;
                            Thread::Alone { announced, grown }
                        }
                        Thread::Alone { announced, grown } => {
                            // Only what it took itself can be lacking, and it gives that up.
                            let lacking = looked(&mut books, announced, reserved, &mut quota).lacking;
                            prop_assert!(lacking <= grown - announced);
                            if at_once {
                                reserved -= lacking;
                            } else {
                                books.owe(lacking);
                                quota += lacking;
                                owed += lacking;
                            }
                            closed = false;
                            books.closed = false;
                            Thread::Idle
                        }
                        other => other,
                    },
                    Act::Shrink(chunks) => reserved = reserved.saturating_sub(chunks * CHUNK),
                    Act::Look => {
                        let lacking = looked(&mut books, 0, reserved, &mut quota).lacking;
                        prop_assert!(lacking <= excess(&threads));
                    }
                }
                prop_assert!(
                    reserved <= quota + excess(&threads),
                    "the driver holds what nobody has reserved"
                );
                prop_assert_eq!(quota, books.charged + books.pending);
                // Nobody owes more than was left owing, or than there is.
                owed = owed.min(books.owed);
                prop_assert!(books.owed <= owed && books.owed <= books.charged);
            }
            for thread in threads {
                match thread {
                    Thread::Idle | Thread::Waiting => {}
                    Thread::Announced(worst) | Thread::Called(worst) => {
                        looked(&mut books, worst, reserved, &mut quota);
                    }
                    Thread::Alone { announced, .. } => {
                        reserved -= looked(&mut books, announced, reserved, &mut quota).lacking;
                    }
                }
            }
            looked(&mut books, 0, reserved, &mut quota);
            prop_assert_eq!((books.charged, books.pending, quota), (reserved, 0, reserved));
        }
    }
}
