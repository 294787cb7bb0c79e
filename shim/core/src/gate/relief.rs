//! Relief at a closed gate, so that a closing does not wait for ever for what the gate itself holds back:
//! where work in flight stands still ([`super::progress`]), waiting launches are let pass one by one until
//! it is complete. The process also reports that it stands still, because the launch that is waited for may
//! be another process's.

use super::flight::{BEHIND, PAUSED_US, now_us};
use super::futex;
use crate::spin::sleep_us;
use crate::state::Process;
use core::cell::Cell;
use core::sync::atomic::Ordering;

/// After so long the next tenant may have been let in; from then on tickets are rare, microseconds.
const ALONE_US: u32 = 10_000;
/// Launches that are let pass, in one closing, because a stream waits for the host.
const MOST_PAUSED: u32 = 8;
/// A ticket that nobody has taken for so long is offered to the next.
const UNTAKEN_US: u32 = 2_000;

/// So much later the arbiter may see that something is complete, microseconds.
const SEEN_US: u32 = 250;

/// Between two looks whether a ticket was taken, microseconds.
const LOOK_US: u32 = 20;

/// Whose launch is let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Anybody,
    /// Into a stream that has nothing in flight.
    Idle,
    /// Into a stream that has less in flight than another.
    Behind,
}

/// One closing's.
pub(super) struct Relief<'a> {
    process: &'a Process,
    begun_us: u32,
    /// When the ticket that is out was offered.
    offered_us: Cell<Option<u32>>,
    /// Whether one was taken since the drain began.
    taken: Cell<bool>,
    passes: Cell<u32>,
    /// Launches that are to pass at once, as they come, and whose.
    due: Cell<(u32, To)>,
    /// Whether the ticket that is out is one of those.
    is_due: Cell<bool>,
    is_said: Cell<bool>,
}

impl<'a> Relief<'a> {
    pub(super) fn new(process: &'a Process) -> Self {
        let begun_us = now_us();
        process.gate.progress.begin(begun_us);
        Self {
            process,
            begun_us,
            offered_us: Cell::new(None),
            taken: Cell::new(false),
            passes: Cell::new(0),
            due: Cell::new((0, To::Anybody)),
            is_due: Cell::new(false),
            is_said: Cell::new(false),
        }
    }

    /// Launches that were let pass.
    pub(super) fn passes(&self) -> u32 {
        self.passes.get()
    }

    /// Lets so many launches pass whatever is in flight, as they come: another process may wait for them.
    pub(super) fn pass(&self, count: u32) {
        self.due.set((count, To::Anybody));
        self.pass_due(now_us());
    }

    fn pass_due(&self, now_us: u32) -> bool {
        let (due, to) = self.due.get();
        let is_early = now_us.wrapping_sub(self.begun_us) <= ALONE_US;
        let passes = due > 0 && is_early && self.offer(now_us, to).is_some();
        self.is_due.set(passes);
        passes
    }

    /// Looks at the ticket that is out, or whether one is due. True when it is to be said that the
    /// process stands still, which is once.
    pub(super) fn look(&self) -> bool {
        let (gate, now_us) = (&self.process.gate, now_us());
        if let Some(offered_us) = self.offered_us.get() {
            if !gate.tickets.is_out() {
                self.was_passed(now_us);
            } else if now_us.wrapping_sub(offered_us) > UNTAKEN_US {
                self.withdraw(now_us);
            } else {
                futex::wake(gate.gate());
            }
            return false;
        }
        if self.pass_due(now_us) {
            return false;
        }
        let is_late = now_us.wrapping_sub(self.begun_us) > ALONE_US;
        let patience_us =
            gate.progress.patience_us(gate.expected_us(), if is_late { ALONE_US } else { 0 });
        let still_us = self.still_for_us(now_us);
        let paused_us = if gate.progress.is_proven() { PAUSED_US / 4 } else { PAUSED_US };
        let is_known = still_us >= paused_us && self.is_paused();
        if !is_known && still_us < patience_us {
            return false;
        }
        let is_long = still_us >= patience_us.saturating_mul(BEHIND);
        let to = if is_known || is_long { To::Anybody } else { To::Idle };
        let waits = gate.flight().waiting.load(Ordering::Relaxed) != 0;
        let offered = if waits { self.offer(now_us, to) } else { None };
        if let Some(behind) = offered
            && gate.progress.is_proven()
        {
            // A collective's parts wait for as many launches as one of them is ahead.
            self.due.set((behind, To::Behind));
        }
        // Its own launches first: they are at hand.
        (offered.is_none() || self.passes.get() > 1) && !self.is_said.replace(true)
    }

    /// How long nothing of the tenant has completed, as far as is known: processes that have nothing to do with each other
    /// share the GPU.
    fn still_for_us(&self, now_us: u32) -> u32 {
        let gate = &self.process.gate;
        let seen_us = gate.flight().elsewhere_us.load(Ordering::Relaxed);
        still_us(gate.progress.still_for_us(now_us), seen_us, self.begun_us, now_us)
    }

    /// Whether what is in flight is known to wait for the host, which waits with a launch: no need to guess.
    fn is_paused(&self) -> bool {
        let gate = &self.process.gate;
        gate.flight().waiting.load(Ordering::Relaxed) != 0
            && self.passes.get() < MOST_PAUSED
            && now_us().wrapping_sub(self.begun_us) <= ALONE_US
            && gate.streams.lock_soon().is_some_and(|mut streams| streams.is_at_pause())
    }

    /// Offers a ticket, after which the launch's stream is so many launches behind the one with most in flight. `None`
    /// where no such launch waits.
    fn offer(&self, now_us: u32, to: To) -> Option<u32> {
        let gate = &self.process.gate;
        let streams = gate.streams.lock_soon();
        // What passes by it counts from now on: before it is known whether anybody takes it.
        gate.flight().admitted.fetch_add(1, Ordering::SeqCst);
        let rank = |stream, ctx| streams.as_ref().map_or(1, |streams| streams.rank(stream, ctx));
        let highest = streams.as_ref().map_or(1, |streams| streams.highest_rank());
        let most = match to {
            To::Anybody => u32::MAX,
            To::Idle => 1,
            To::Behind => highest.saturating_sub(1),
        };
        let offered = gate.tickets.offer(rank, most);
        if let (Some(_), Some(mut streams)) = (offered, streams) {
            streams.taint();
        }
        if offered.is_some() {
            self.offered_us.set(Some(now_us));
            futex::wake(gate.gate());
        } else {
            gate.flight().admitted.fetch_sub(1, Ordering::Relaxed);
        }
        Some(highest.saturating_sub(offered?.max(1) + 1))
    }

    fn was_passed(&self, now_us: u32) {
        self.offered_us.set(None);
        let (due, to) = self.due.get();
        self.due.set((due - u32::from(self.is_due.replace(false)), to));
        self.taken.set(true);
        self.passes.set(self.passes.get() + 1);
        self.process.gate.progress.passed(now_us);
    }

    fn withdraw(&self, now_us: u32) {
        match self.process.gate.tickets.withdraw() {
            true => {
                self.process.gate.flight().admitted.fetch_sub(1, Ordering::Relaxed);
                self.offered_us.set(None);
                self.is_due.set(false);
            }
            false => self.was_passed(now_us),
        }
    }

    /// Whether a launch was let pass that is to be taken up.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.get()
    }

    /// Whether a launch that waits, here or in another process, may still be what all is waiting for: then
    /// it is not to be said that the host must do something first. The next tenant would be let in, and
    /// what a ticket frees would wait for its turn among that one's work.
    pub(super) fn is_at_hand(&self) -> bool {
        let (gate, now_us) = (&self.process.gate, now_us());
        if now_us.wrapping_sub(self.begun_us) > ALONE_US {
            return false;
        }
        let waits = gate.flight().waiting.load(Ordering::Relaxed) != 0;
        gate.progress.is_hopeful(now_us, gate.expected_us(), if waits { BEHIND } else { 1 })
    }

    /// Nothing is in flight, which is no reason to take back a ticket for a launch that another process waits for, nor to
    /// give none: the thread that is to take it may not have run yet. Waits for it as long as `still`.
    pub(super) fn await_due(&self, still: impl Fn() -> bool) {
        let is_out = || match self.offered_us.get() {
            Some(_) => self.is_due.get(),
            None => self.pass_due(now_us()),
        };
        if self.due.get().1 != To::Anybody || !is_out() {
            return;
        }
        let gate = &self.process.gate;
        let is_early = || now_us().wrapping_sub(self.begun_us) <= ALONE_US;
        while gate.tickets.is_out() && is_early() && still() {
            futex::wake(gate.gate());
            sleep_us(LOOK_US);
        }
    }

    /// Takes back what is out. Whether a launch was let pass since this was asked last: then what is in
    /// flight is to be taken up once more.
    pub(super) fn was_taken(&self) -> bool {
        if self.offered_us.get().is_some() {
            self.withdraw(now_us());
        }
        self.taken.replace(false)
    }

    /// The gate's word is another before all is complete.
    pub(super) fn give_up(&self) {
        self.was_taken();
        let (gate, now_us) = (&self.process.gate, now_us());
        if self.still_for_us(now_us) >= gate.progress.patience_us(gate.expected_us(), 0) {
            // What waits now may pass. What was in flight tells no durations.
            gate.progress.passed(now_us);
            if let Some(mut streams) = gate.streams.lock_soon() {
                streams.taint();
            }
        }
    }
}

/// The same, of a process of which nothing has completed for `own_us`, where the arbiter saw at `seen_us` that another
/// went on; before this closing that says nothing.
fn still_us(own_us: u32, seen_us: u32, begun_us: u32, now_us: u32) -> u32 {
    match seen_us.wrapping_sub(begun_us).cast_signed() {
        1.. => own_us.min(now_us.wrapping_sub(seen_us).saturating_add(SEEN_US)),
        _ => own_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stands_still_while_another_process_of_the_tenant_goes_on() {
        for begun_us in [1_000, u32::MAX - 2_000] {
            let [seen_us, now_us] = [3_000, 4_000].map(|us| begun_us.wrapping_add(us));
            assert_eq!(still_us(4_000, seen_us, begun_us, now_us), 1_000 + SEEN_US);
            assert_eq!(still_us(500, seen_us, begun_us, now_us), 500, "itself went on later");
            let before_us = begun_us.wrapping_sub(1);
            assert_eq!(still_us(4_000, before_us, begun_us, now_us), 4_000);
        }
    }
}
