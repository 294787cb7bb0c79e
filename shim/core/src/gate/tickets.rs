//! Launches that wait at a closed gate, and the ticket with which the helper lets one of them pass
//! before what is in flight has drained: see [`super::progress`].
//!
//! Order: a launch takes its ticket after it has raised its flag. The helper checks whether the ticket was
//! taken before it reports drained; if it was, it drains once more, and finds the flag or what was launched.
//! `model_tests` walks through it.

use super::{Stream, events};
use crate::pages::List;
use crate::pages::Zeroed;
use crate::spin::Spin;
use core::sync::atomic::{AtomicU32, Ordering};

/// A thread that waits.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    ticket: u32,
    stream: usize,
    ctx: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Waiter {}

/// See the module. A ticket is a number; 0 is none.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// In the order in which they came.
    waiters: Spin<List<Waiter>>,
    last: AtomicU32,
    /// The one that may pass.
    offered: AtomicU32,
}

impl Tickets {
    /// The calling thread begins to wait with a launch into `stream`.
    pub(super) fn enter(&self, stream: Stream) -> u32 {
        let ctx = events::context_of(stream);
        let ticket = self.last.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        match self.waiters.lock().push(Waiter { ticket, stream: stream.0, ctx }) {
            Ok(()) => ticket,
            Err(_) => 0,
        }
    }

    /// It waits no more.
    pub(super) fn leave(&self, ticket: u32) {
        self.waiters.lock().take(|waiter| waiter.ticket == ticket);
    }

    pub(super) fn is_offered(&self, ticket: u32) -> bool {
        ticket != 0 && self.offered.load(Ordering::Relaxed) == ticket
    }

    /// Whether the calling thread, whose flag is up, may pass.
    pub(super) fn take(&self, ticket: u32) -> bool {
        let taken = || self.offered.compare_exchange(ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        ticket != 0 && taken().is_ok()
    }

    /// Whether one is offered that nobody has taken yet.
    pub(super) fn is_out(&self) -> bool {
        self.offered.load(Ordering::SeqCst) != 0
    }

    /// Takes an offer back. True if nobody has taken it.
    pub(super) fn withdraw(&self) -> bool {
        self.offered.swap(0, Ordering::SeqCst) != 0
    }

    /// Lets one waiting launch pass: of those with the least `rank`, by stream and context, who has
    /// waited longest. It goes to the end of the queue, in case its thread has ended. Returns its rank, or `None` where nobody
    /// of rank `most` or less waits.
    pub(super) fn offer(&self, rank: impl Fn(usize, usize) -> u32, most: u32) -> Option<u32> {
        let mut waiters = self.waiters.lock();
        let ranks = waiters.iter().enumerate().map(|(at, w)| (rank(w.stream, w.ctx), at));
        let (rank, at) = ranks.min().filter(|(rank, _)| *rank <= most)?;
        let waiter = waiters.remove(at);
        let _ = waiters.push(waiter);
        self.offered.store(waiter.ticket, Ordering::SeqCst);
        Some(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(streams: &[usize]) -> Tickets {
        let tickets = Tickets::default();
        for (ticket, &stream) in (1..).zip(streams) {
            tickets.waiters.lock().push(Waiter { ticket, stream, ctx: 0 }).unwrap();
        }
        tickets
    }

    #[test]
    fn a_ticket_is_for_one_and_is_taken_once() {
        let tickets = with(&[10, 20]);
        assert!(!tickets.take(0) && !tickets.take(1));
        assert_eq!(tickets.offer(|_, _| 0, 2), Some(0));
        assert!(tickets.is_offered(1) && !tickets.is_offered(2) && !tickets.take(2));
        assert!(tickets.take(1) && !tickets.take(1) && !tickets.withdraw());
    }

    #[test]
    fn who_launches_where_nothing_is_in_flight_comes_first_and_then_each_in_turn() {
        let tickets = with(&[10, 20, 30]);
        assert_eq!(tickets.offer(|_, _| 3, 2), None);
        tickets.offer(|stream, _| u32::from(stream != 20), 2);
        assert!(tickets.take(2));
        tickets.offer(|_, _| 0, 2);
        assert!(tickets.is_offered(1) && tickets.withdraw(), "its thread does not come");
        tickets.offer(|_, _| 0, 2);
        assert!(tickets.take(3));
        tickets.leave(1);
        tickets.leave(2);
        tickets.leave(3);
        assert_eq!(tickets.offer(|_, _| 0, 2), None);
    }
}
