//! Every interleaving of a launching thread, a closing helper and an arbiter, on a machine whose
//! processors buffer their stores (x86's order; a barrier empties the buffer). What the parts do is
//! what [`super::admit_at_once`], [`super::admit`] and [`super::closing`] do, in their order.

use std::collections::HashSet;
use std::hash::Hash;

/// What is left out or done in another order, to see that the model finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    NoBarrier,
    /// Notes are taken after the flags: a stream is lost.
    NotesTakenLast,
    /// And before them alone: who was between gate and note is.
    NotesTakenOnce,
    /// A launch does not look at its note.
    StreamNotCompared,
    /// A ticket is taken before the flag is raised.
    TicketFirst,
    /// Nobody asks whether a ticket was taken.
    TicketForgotten,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct World {
    /// Closings and openings so far; odd is closed.
    gate: u8,
    busy: bool,
    /// The launching thread's note of its stream.
    noted: bool,
    dirty: bool,
    /// Stores to `busy` that only the launching thread sees yet.
    buffer: Vec<bool>,
    launcher: u8,
    launches: u8,
    /// Whether the launcher found its stream noted.
    seen_note: bool,
    helper: u8,
    closing: u8,
    taken: bool,
    /// Something was launched that no marker covers.
    uncovered: bool,
    /// The closing that was called drained.
    drained: u8,
    /// A ticket is out; the helper has offered it in this round; how many there have been.
    ticket: bool,
    offered: bool,
    offers: u8,
    /// The launcher has taken one.
    holds: bool,
}

const LAUNCHES: u8 = 3;
const MOVES: u8 = 5;
const OFFERS: u8 = 2;
/// Where the launcher hands over.
const LAUNCH: u8 = 7;

impl World {
    fn is_closed(&self) -> bool {
        self.gate % 2 == 1
    }

    fn flush(&mut self) {
        while !self.buffer.is_empty() {
            self.busy = self.buffer.remove(0);
        }
    }

    /// One step of the launching thread; `None` while it waits or has ended.
    fn launcher(mut self, flaw: Flaw) -> Option<Self> {
        self.launcher = match self.launcher {
            0 if self.launches == LAUNCHES => return None,
            // The hot path.
            0 => {
                self.buffer.push(true);
                1
            }
            1 => {
                self.seen_note = self.noted || flaw == Flaw::StreamNotCompared;
                2
            }
            2 if self.seen_note && !self.is_closed() => LAUNCH,
            2 => {
                self.buffer.push(false);
                3
            }
            // The other one.
            3 => {
                self.buffer.push(true);
                4
            }
            4 if self.is_closed() => {
                if flaw != Flaw::TicketFirst {
                    self.take_ticket();
                }
                match std::mem::take(&mut self.holds) {
                    true => 5,
                    false => {
                        self.buffer.push(false);
                        6
                    }
                }
            }
            4 => 5,
            // Under the lock.
            5 => {
                self.dirty = true;
                self.noted = true;
                LAUNCH
            }
            // The futex.
            6 if self.is_closed() && !self.ticket => return None,
            6 if flaw == Flaw::TicketFirst => {
                self.take_ticket();
                3
            }
            6 => 3,
            // The driver has it.
            LAUNCH => {
                let is_late = self.is_closed() && self.drained == self.gate;
                assert!(!is_late, "launched at a closed gate after drained: {self:?}");
                self.uncovered = true;
                self.launches += 1;
                LAUNCH + 1
            }
            _ => {
                self.buffer.push(false);
                0
            }
        };
        Some(self)
    }

    /// A locked instruction: what was stored before it is in memory.
    fn take_ticket(&mut self) {
        if self.ticket {
            self.flush();
            self.ticket = false;
            self.holds = true;
        }
    }

    /// The helper, while it drains, lets one launch pass.
    fn offer(mut self) -> Option<Self> {
        if !(1..=6).contains(&self.helper) || self.offered || self.offers == OFFERS {
            return None;
        }
        (self.ticket, self.offered) = (true, true);
        self.offers += 1;
        Some(self)
    }

    /// One store reaches memory.
    fn drain_buffer(mut self) -> Option<Self> {
        if self.buffer.is_empty() {
            return None;
        }
        self.busy = self.buffer.remove(0);
        Some(self)
    }

    fn arbiter(mut self) -> Option<Self> {
        if self.gate == MOVES {
            return None;
        }
        self.gate += 1;
        Some(self)
    }

    fn take_notes(&mut self) {
        self.taken |= self.dirty;
        self.dirty = false;
        self.noted = false;
    }

    fn helper(mut self, flaw: Flaw) -> Option<Self> {
        match self.helper {
            0 if !self.is_closed() || self.drained == self.gate => return None,
            0 => self.closing = self.gate,
            1 if flaw != Flaw::NotesTakenLast => self.take_notes(),
            2 if flaw != Flaw::NoBarrier => self.flush(),
            3 if self.busy => return None,
            4 if flaw == Flaw::NotesTakenLast => self.take_notes(),
            // Noted since: drained, and dirty still, as the note is there still.
            4 if flaw != Flaw::NotesTakenOnce => self.taken |= self.dirty,
            5 => {
                if self.taken {
                    self.uncovered = false;
                }
                self.taken = false;
            }
            6 => {
                // Taken back, or taken: then all is drained once more.
                let was_taken = self.offered && !self.ticket;
                (self.ticket, self.offered) = (false, false);
                if was_taken && flaw != Flaw::TicketForgotten {
                    self.helper = 1;
                    return Some(self);
                }
                if self.gate == self.closing {
                    assert!(!self.uncovered, "drained with work in flight: {self:?}");
                    self.drained = self.closing;
                }
                self.helper = u8::MAX;
            }
            _ => {}
        }
        self.helper = self.helper.wrapping_add(1);
        Some(self)
    }
}

/// Looks at every state that can be reached, of which `next` gives those that follow one; panics where a promise is broken.
fn reach<W: Clone + Default + Eq + Hash, const N: usize>(
    next: impl Fn(W) -> [Option<W>; N],
) -> usize {
    let mut seen = HashSet::new();
    let mut ahead = vec![W::default()];
    while let Some(world) = ahead.pop() {
        if seen.insert(world.clone()) {
            ahead.extend(next(world).into_iter().flatten());
        }
    }
    seen.len()
}

fn explore(flaw: Flaw) -> usize {
    reach(|world: World| {
        [
            world.clone().launcher(flaw),
            world.clone().drain_buffer(),
            world.clone().arbiter(),
            world.clone().offer(),
            world.helper(flaw),
        ]
    })
}

#[test]
fn nothing_is_in_flight_when_drained_is_said_and_nothing_is_launched_until_the_next_opening() {
    assert!(explore(Flaw::None) > 1_000);
}

/// The model finds a promise broken, and says which.
fn finds(explore: impl FnOnce() -> usize + std::panic::UnwindSafe, promise: &str) {
    let found = std::panic::catch_unwind(explore).expect_err("the model finds it");
    let said = found.downcast_ref::<String>().expect("it says what");
    assert!(said.contains(promise), "{said}");
}

#[test]
fn it_would_not_hold_with_any_of_the_flaws() {
    for (flaw, promise) in [
        (Flaw::NoBarrier, "drained"),
        (Flaw::NotesTakenLast, "drained with work in flight"),
        (Flaw::NotesTakenOnce, "drained with work in flight"),
        (Flaw::StreamNotCompared, "drained with work in flight"),
        (Flaw::TicketFirst, "drained"),
        (Flaw::TicketForgotten, "drained"),
    ] {
        finds(|| explore(flaw), promise);
    }
}

/// A launch that is counted, and an arbiter that ends its lease by what it reads alone: no flag, no barrier of the
/// process's, no thread of it. What the parts do is what [`super::admit`], [`super::flight::take_room`] and
/// `FlightPage::in_flight` do.
mod counted {
    use super::{finds, reach};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Flaw {
        None,
        /// The gate is looked at before the count alone.
        NoSecondLook,
        /// The arbiter's store waits in its processor's buffer.
        NoBarrier,
        AdmittedReadFirst,
        /// A context that ends settles its operations before it zeroes its lanes.
        SettledFirst,
    }

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
    struct World {
        /// Closings and openings so far, as launchers see it; odd is closed.
        gate: u8,
        /// The arbiter has stored it, and nobody sees it yet.
        buffered: bool,
        admitted: i8,
        settled: i8,
        /// In two contexts.
        landed: [i8; 2],
        launchers: [u8; 2],
        launches: u8,
        /// In the driver, not complete.
        flying: i8,
        /// The first context ends: how far that is, and what was counted there.
        ending: u8,
        queued: i8,
        arbiter: u8,
        read: i8,
        /// The closing that counts as drained.
        drained: u8,
    }

    impl World {
        fn is_closed(&self) -> bool {
            self.gate % 2 == 1
        }

        fn launcher(mut self, who: usize, flaw: Flaw) -> Option<Self> {
            let step = &mut self.launchers[who];
            match *step {
                0 if self.gate % 2 == 1 || self.launches >= 3 => return None,
                0 => *step = 1,
                1 => {
                    self.admitted += 1;
                    *step = 2;
                }
                2 if self.gate % 2 == 1 && flaw != Flaw::NoSecondLook => {
                    self.admitted -= 1;
                    *step = 0;
                }
                2 => *step = 3,
                _ => {
                    *step = 0;
                    let gate = self.gate + u8::from(self.buffered);
                    let is_late = gate % 2 == 1 && self.drained == gate;
                    assert!(!is_late, "launched after drained: {self:?}");
                    self.flying += 1;
                    self.launches += 1;
                }
            }
            Some(self)
        }

        fn gpu(mut self, context: usize) -> Option<Self> {
            (self.flying > 0 && (context == 1 || self.ending == 0)).then(|| {
                self.flying -= 1;
                self.landed[context] += 1;
                self
            })
        }

        /// A context ends, all that was in it complete.
        fn context(mut self, flaw: Flaw) -> Option<Self> {
            let zeroes = (self.ending == 0) == (flaw != Flaw::SettledFirst);
            match self.ending {
                0 if self.landed[0] == 0 => return None,
                0 => self.queued = self.landed[0],
                1 => {}
                _ => return None,
            }
            match zeroes {
                true => self.landed[0] = 0,
                false => self.settled += self.queued,
            }
            self.ending += 1;
            Some(self)
        }

        fn arbiter(mut self, flaw: Flaw) -> Option<Self> {
            match self.arbiter {
                0 if self.gate == 3 || self.buffered => return None,
                0 if self.is_closed() => {
                    self.gate += 1;
                    return Some(self);
                }
                0 if flaw == Flaw::NoBarrier => self.buffered = true,
                0 => self.gate += 1,
                1 if flaw == Flaw::AdmittedReadFirst => self.read = self.admitted,
                1 => self.read = -self.settled,
                2 => self.read -= self.landed[0],
                3 => self.read -= self.landed[1],
                4 if flaw == Flaw::AdmittedReadFirst => self.read -= self.settled,
                4 => self.read += self.admitted,
                _ if self.read != 0 => {
                    self.arbiter = 1;
                    return Some(self);
                }
                _ => {
                    assert_eq!(self.flying, 0, "drained with work in flight: {self:?}");
                    self.drained = self.gate + u8::from(self.buffered);
                    self.arbiter = 0;
                    return Some(self);
                }
            }
            self.arbiter += 1;
            Some(self)
        }

        fn flush(mut self) -> Option<Self> {
            self.buffered.then(|| {
                self.buffered = false;
                self.gate += 1;
                self
            })
        }
    }

    fn explore(flaw: Flaw) -> usize {
        reach(|world: World| {
            [
                world.clone().launcher(0, flaw),
                world.clone().launcher(1, flaw),
                world.clone().gpu(0),
                world.clone().gpu(1),
                world.clone().context(flaw),
                world.clone().flush(),
                world.arbiter(flaw),
            ]
        })
    }

    #[test]
    fn what_counts_nothing_in_flight_at_a_closed_gate_is_right() {
        assert!(explore(Flaw::None) > 500);
    }

    #[test]
    fn it_would_not_be_right_with_any_of_the_flaws() {
        for (flaw, promise) in [
            (Flaw::NoSecondLook, "drained"),
            (Flaw::NoBarrier, "drained"),
            (Flaw::AdmittedReadFirst, "drained with work in flight"),
            (Flaw::SettledFirst, "drained"),
        ] {
            finds(|| explore(flaw), promise);
        }
    }
}
