//! Every interleaving of a launching thread, a closing helper and an arbiter, on a machine whose
//! processors buffer their stores (x86's order; a barrier empties the buffer). What the parts do is
//! what [`super::admit_at_once`], [`super::admit_as`] and [`super::closing`] do, in their order.

use std::collections::HashSet;

/// What is left out or done in another order, to see that the model finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    NoBarrier,
    NotesTakenLast,
    NotesTakenOnce,
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

/// Looks at every state that can be reached; panics where a promise is broken.
fn explore(flaw: Flaw) -> usize {
    let mut seen = HashSet::new();
    let mut ahead = vec![World::default()];
    while let Some(world) = ahead.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        let next = [
            world.clone().launcher(flaw),
            world.clone().drain_buffer(),
            world.clone().arbiter(),
            world.clone().offer(),
            world.helper(flaw),
        ];
        ahead.extend(next.into_iter().flatten());
    }
    seen.len()
}

#[test]
fn nothing_is_in_flight_when_drained_is_said_and_nothing_is_launched_until_the_next_opening() {
    assert!(explore(Flaw::None) > 1_000);
}

#[test]
#[should_panic(expected = "drained")]
fn without_a_barrier_it_would_not_hold() {
    explore(Flaw::NoBarrier);
}

#[test]
#[should_panic(expected = "drained with work in flight")]
fn notes_taken_after_the_flags_would_lose_a_stream() {
    explore(Flaw::NotesTakenLast);
}

#[test]
#[should_panic(expected = "drained with work in flight")]
fn notes_taken_before_the_flags_alone_would_lose_who_was_between_gate_and_note() {
    explore(Flaw::NotesTakenOnce);
}

#[test]
#[should_panic(expected = "drained with work in flight")]
fn a_launch_that_did_not_look_at_its_note_would_be_lost() {
    explore(Flaw::StreamNotCompared);
}

#[test]
#[should_panic(expected = "drained")]
fn a_ticket_taken_before_the_flag_is_up_would_let_a_launch_pass_unseen() {
    explore(Flaw::TicketFirst);
}

#[test]
#[should_panic(expected = "drained")]
fn a_ticket_that_nobody_asks_about_would_let_a_launch_pass_unseen() {
    explore(Flaw::TicketForgotten);
}
