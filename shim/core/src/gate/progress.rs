//! Detects that work in flight stands still: it may wait for a launch that the gate, or the window, holds
//! back. Nobody can see what waits for what, so progress decides: where nothing has completed for longer
//! than operations of this process take, one launch is let pass. Progress after it shows whether that was
//! the reason. Programs of which it was, again and again, are helped sooner; where it was not, the next
//! launch waits twice as long, so that a program with long operations gains next to nothing.

use core::sync::atomic::{AtomicU32, Ordering};

/// Nothing has completed for so long, microseconds: then it stands still.
const STILL_US: u32 = 1_000;
/// The same of a process that has proved to need help.
const PROVEN_STILL_US: u32 = 200;
/// Proofs from which on it has, and up to which they count.
const PROVEN: u32 = 2;
const MOST_PROVEN: u32 = 8;
/// What completes so soon after a launch was let pass had waited for it, beside the time that the
/// operation itself takes.
const PROMPT_US: u32 = 400;
/// How often the patience is doubled at most, and how long it is then.
const MOST_DOUBLED: u32 = 14;
const LONGEST_US: u32 = 10_000_000;

/// See the module. Times are microseconds that wrap.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// When something was last found complete, or a launch was let pass.
    last_us: AtomicU32,
    /// Launches that were let pass since something was found complete. It may take several of them.
    passed: AtomicU32,
    proven: AtomicU32,
    fruitless: AtomicU32,
}

impl Progress {
    /// Somebody begins to look.
    pub(super) fn begin(&self, now_us: u32) {
        self.last_us.store(now_us, Ordering::Relaxed);
        // The last may still have been it: whatever waited could pass when the gate opened.
        let in_vain = self.passed.swap(0, Ordering::Relaxed).saturating_sub(1);
        self.disproved(in_vain);
    }

    /// Something was found complete. An operation is expected to take `expected_us`.
    pub(super) fn made(&self, now_us: u32, expected_us: u32) {
        let passed = self.passed.swap(0, Ordering::Relaxed);
        if passed != 0 {
            let since_us = now_us.wrapping_sub(self.last_us.load(Ordering::Relaxed));
            if since_us <= PROMPT_US.saturating_add(expected_us.saturating_mul(2)) {
                self.fruitless.store(0, Ordering::Relaxed);
                let proven = self.proven.load(Ordering::Relaxed);
                self.proven.store((proven + 1).min(MOST_PROVEN), Ordering::Relaxed);
            } else {
                self.was_fruitless();
                self.disproved(passed);
            }
        }
        self.last_us.store(now_us, Ordering::Relaxed);
    }

    /// A launch is let pass.
    pub(super) fn passed(&self, now_us: u32) {
        let before = self.passed.load(Ordering::Relaxed);
        self.passed.store(before.saturating_add(1), Ordering::Relaxed);
        if before != 0 {
            self.was_fruitless();
        }
        self.last_us.store(now_us, Ordering::Relaxed);
    }

    fn was_fruitless(&self) {
        let fruitless = self.fruitless.load(Ordering::Relaxed);
        self.fruitless.store((fruitless + 1).min(MOST_DOUBLED), Ordering::Relaxed);
    }

    /// So many launches that were let pass changed nothing.
    fn disproved(&self, launches: u32) {
        let proven = self.proven.load(Ordering::Relaxed);
        self.proven.store(proven.saturating_sub(launches), Ordering::Relaxed);
    }

    /// How often, of late, it was a launch that was held back that work waited for.
    pub(super) fn proofs(&self) -> u32 {
        self.proven.load(Ordering::Relaxed)
    }

    /// Whether it has been so often enough that it is to be expected again.
    pub(super) fn is_proven(&self) -> bool {
        self.proofs() >= PROVEN
    }

    /// For how long nothing may complete, `least_us` or longer.
    pub(super) fn patience_us(&self, expected_us: u32, least_us: u32) -> u32 {
        let still_us = if self.is_proven() { PROVEN_STILL_US } else { STILL_US };
        let once = still_us.max(least_us).max(expected_us.saturating_mul(2));
        let doubled = self.fruitless.load(Ordering::Relaxed);
        once.saturating_mul(1 << doubled.min(MOST_DOUBLED)).min(LONGEST_US)
    }

    /// Whether what stands still may go on with the help of a launch that is let pass after `times` the
    /// patience: that has lately been so, or has not been tried in vain.
    pub(super) fn is_hopeful(&self, now_us: u32, expected_us: u32, times: u32) -> bool {
        if !self.is_proven() && self.fruitless.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let patience_us = self.patience_us(expected_us, 0).saturating_mul(times);
        self.still_for_us(now_us) <= patience_us.saturating_add(STILL_US)
    }

    /// How long nothing has completed.
    pub(super) fn still_for_us(&self, now_us: u32) -> u32 {
        now_us.wrapping_sub(self.last_us.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_still(progress: &Progress, now_us: u32, expected_us: u32) -> bool {
        progress.still_for_us(now_us) >= progress.patience_us(expected_us, 0)
    }

    #[test]
    fn who_is_helped_by_it_is_helped_sooner() {
        let progress = Progress::default();
        progress.begin(0);
        assert!(!is_still(&progress, 999, 0) && is_still(&progress, 1_000, 0));
        for round in 1..=2 {
            progress.passed(round * 10_000);
            progress.made(round * 10_000 + 100, 0);
        }
        assert!(is_still(&progress, 20_300, 0));
    }

    #[test]
    fn whose_operations_are_long_is_let_pass_ever_less() {
        let progress = Progress::default();
        progress.begin(0);
        // Operations of three seconds that nobody has seen end yet.
        let (mut now_us, mut passes) = (0, 0);
        while now_us < 3_000_000 {
            now_us += 100;
            if is_still(&progress, now_us, 0) {
                progress.passed(now_us);
                passes += 1;
            }
        }
        assert!(passes <= 12, "{passes}");
        progress.made(now_us, 0);
        // They are known now: nobody passes.
        let begun_us = now_us;
        while now_us < begun_us + 6_000_000 {
            now_us += 100;
            assert!(!is_still(&progress, now_us, 3_000_000));
        }
    }

    #[test]
    fn who_needs_several_launches_is_helped_sooner_too() {
        let progress = Progress::default();
        for round in 1..=3 {
            progress.begin(round * 10_000);
            progress.passed(round * 10_000 + 1_000);
            progress.passed(round * 10_000 + 3_000);
            progress.made(round * 10_000 + 3_100, 0);
        }
        progress.begin(40_000);
        assert!(is_still(&progress, 40_200, 0));
    }

    #[test]
    fn what_was_proved_is_forgotten_where_it_is_so_no_more() {
        let progress = Progress::default();
        for round in 1..=8 {
            progress.passed(round * 10_000);
            progress.made(round * 10_000 + 100, 0);
        }
        progress.begin(100_000);
        for at in 1..=12 {
            progress.passed(100_000 + at * 1_000);
        }
        progress.made(3_000_000, 0);
        assert_eq!(progress.proofs(), 0);
    }

    #[test]
    fn one_success_makes_up_for_all_failures() {
        let progress = Progress::default();
        (0..50).for_each(|at| progress.passed(at));
        assert_eq!(progress.patience_us(0, 0), LONGEST_US);
        progress.made(100, 0);
        assert_eq!(progress.patience_us(0, 0), STILL_US);
    }

    #[test]
    fn hope_lasts_until_help_had_its_time_or_was_in_vain() {
        let progress = Progress::default();
        progress.begin(0);
        assert!(progress.is_hopeful(4_900, 0, 4) && !progress.is_hopeful(5_100, 0, 4));
        progress.passed(4_000);
        assert!(progress.is_hopeful(4_300, 0, 4), "a launch has just passed");
        progress.made(9_000, 0);
        assert!(!progress.is_hopeful(9_000, 0, 4), "that changed nothing");
        for round in 1..=2 {
            progress.passed(round * 10_000);
            progress.made(round * 10_000 + 100, 0);
        }
        assert!(progress.is_hopeful(21_800, 0, 4) && !progress.is_hopeful(22_000, 0, 4));
    }

    #[test]
    fn times_wrap() {
        let progress = Progress::default();
        progress.begin(u32::MAX - 10);
        assert!(!is_still(&progress, 500, 0) && is_still(&progress, 1_000, 0));
    }
}
