//! Peak use and refusals of a command tree, from repeated looks at its usage page.

use std::collections::HashMap;

use tessera_region::layout::MAX_GPUS;
use tessera_region::usage::Snapshot;

use crate::config::quantity::format_bytes;

/// What was seen so far. A slot's counters are its owner's alone and start again with the next
/// owner, so they are kept by slot and time of claim.
#[derive(Debug, Default)]
pub(super) struct Observer {
    peaks: [u64; MAX_GPUS],
    refusals: HashMap<(usize, u64), u64>,
}

impl Observer {
    /// Takes one look into account.
    pub fn see(&mut self, snapshot: &Snapshot) {
        let mut now = [0u64; MAX_GPUS];
        for slot in &snapshot.slots {
            for (now, granted) in now.iter_mut().zip(slot.granted) {
                *now = now.saturating_add(granted);
            }
            // One process's own peak is a lower bound that no look can miss.
            for (peak, own) in self.peaks.iter_mut().zip(slot.peak) {
                *peak = (*peak).max(own);
            }
            let seen = self.refusals.entry((slot.index, slot.claimed_ns)).or_default();
            *seen = (*seen).max(slot.refusals);
        }
        for (peak, now) in self.peaks.iter_mut().zip(now) {
            *peak = (*peak).max(now);
        }
    }

    /// One line per GPU, in the page's order.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.peaks.iter().map(|&peak| format!("peak use {}", format_bytes(peak)))
    }

    /// Requests refused because of the quota.
    pub fn refusals(&self) -> u64 {
        self.refusals.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use tessera_region::usage::SlotView;

    use super::*;

    fn slot(index: usize, claimed_ns: u64, granted: u64, peak: u64, refusals: u64) -> SlotView {
        let mut slot = SlotView { index, claimed_ns, refusals, ..SlotView::default() };
        slot.granted[0] = granted;
        slot.peak[0] = peak;
        slot
    }

    #[test]
    fn a_peak_is_the_most_held_at_once() {
        let mut observer = Observer::default();
        for slots in [
            vec![slot(0, 1, 10 << 20, 10 << 20, 0), slot(1, 1, 20 << 20, 20 << 20, 0)],
            vec![slot(0, 1, 0, 10 << 20, 0), slot(1, 1, 5 << 20, 20 << 20, 0)],
        ] {
            observer.see(&Snapshot { slots, ..Snapshot::default() });
        }
        assert_eq!(observer.lines().next().unwrap(), "peak use 30 MiB");
    }

    #[test]
    fn refusals_of_a_slots_former_owners_count() {
        let mut observer = Observer::default();
        for (claimed, refusals) in [(1, 2), (1, 3), (9, 1)] {
            let slots = vec![slot(0, claimed, 0, 0, refusals)];
            observer.see(&Snapshot { slots, ..Snapshot::default() });
        }
        assert_eq!(observer.refusals(), 4);
    }
}
