//! Peak use and refusals of a command tree, from repeated looks at its usage page.

use tessera_region::layout::MAX_GPUS;
use tessera_region::usage::{Snapshot, Tally};

use tessera_model::quantity::format_bytes;

/// What was seen so far.
#[derive(Debug, Default)]
pub(super) struct Observer {
    peaks: [u64; MAX_GPUS],
    refusals: u64,
}

impl Observer {
    /// Takes one look into account. `ended`: what processes did whose slots the look zeroed.
    pub fn see(&mut self, snapshot: &Snapshot, ended: &Tally) {
        let mut tally = snapshot.tally();
        tally.merge(ended);
        let mut now = [0u64; MAX_GPUS];
        for slot in &snapshot.slots {
            for (now, granted) in now.iter_mut().zip(slot.granted) {
                *now = now.saturating_add(granted);
            }
        }
        // One process's own peak is a lower bound that no look can miss.
        for (peak, seen) in self.peaks.iter_mut().zip(now.into_iter().zip(tally.peak)) {
            *peak = (*peak).max(seen.0).max(seen.1);
        }
        self.refusals = self.refusals.max(tally.refusals);
    }

    /// One line per GPU, in the page's order.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.peaks.iter().map(|&peak| format!("peak use {}", format_bytes(peak)))
    }

    /// Requests refused because of the quota.
    pub fn refusals(&self) -> u64 {
        self.refusals
    }
}

#[cfg(test)]
mod tests {
    use tessera_region::usage::SlotView;

    use super::*;

    fn slot(index: usize, claimed_ns: u64, granted: u64, peak: u64, refusals: u64) -> SlotView {
        let mut slot = SlotView { index, claimed_ns, ..SlotView::default() };
        slot.granted[0] = granted;
        slot.did.refusals = refusals;
        slot.did.peak[0] = peak;
        slot
    }

    #[test]
    fn a_peak_is_the_most_held_at_once() {
        let mut observer = Observer::default();
        for slots in [
            vec![slot(0, 1, 10 << 20, 10 << 20, 0), slot(1, 1, 20 << 20, 20 << 20, 0)],
            vec![slot(0, 1, 0, 10 << 20, 0), slot(1, 1, 5 << 20, 20 << 20, 0)],
        ] {
            observer.see(&Snapshot { slots, ..Snapshot::default() }, &Tally::default());
        }
        assert_eq!(observer.lines().next().unwrap(), "peak use 30 MiB");
    }

    #[test]
    fn what_ended_between_two_looks_counts() {
        let mut observer = Observer::default();
        let none = Tally::default();
        let seen = slot(0, 1, 0, 10 << 20, 2);
        observer.see(&Snapshot { slots: vec![seen.clone()], ..Snapshot::default() }, &none);
        // Its slot was taken over, by one that this program recovered, and by one that lives.
        let past = seen.did;
        let ended = slot(0, 2, 0, 30 << 20, 1).did;
        let slots = vec![slot(0, 3, 0, 20 << 20, 4)];
        observer.see(&Snapshot { slots, past, ..Snapshot::default() }, &ended);
        assert_eq!(observer.refusals(), 7);
        assert_eq!(observer.lines().next().unwrap(), "peak use 30 MiB");
    }
}
