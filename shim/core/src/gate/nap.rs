//! How the helper waits for the end of what is in flight: by short sleeps, and in the last microseconds
//! without any.
//!
//! A sleep ends late, by some microseconds on a machine of one's own and by 50 and more on a virtual machine
//! whose idle processors are the host's. So the mean of that is measured, and the sleeps end that much
//! sooner.

use crate::spin::sleep_us;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

use super::flight;

/// The longest sleep between two looks at the markers, microseconds: others wait for the end.
const LONGEST_US: u32 = 20;
/// After so many of them it is a long operation that is waited for, and the next may be longer.
const SHORT: u32 = 64;
const LONG_US: u32 = 50;
/// The same where nobody waits.
const IDLE_US: u32 = 100;
/// What is expected to end within so long, microseconds, is looked at without a sleep, so often at most,
/// with so many pauses of the processor in between, some microseconds.
const DUE_US: u32 = 20;
const MOST_LOOKS: u32 = 64;
const PAUSES: u32 = 40;
/// The largest mean that is reckoned with, microseconds: a processor is not kept busy for longer.
const MOST_LATE_US: u32 = 80;
/// A single sleep counts for no more than this, microseconds: a processor that was taken away for
/// milliseconds says nothing of the next sleep.
const OUTLIER_US: u32 = 200;
/// The shortest and longest sleep of a thread that waits for room, microseconds.
const ROOM_US: u32 = 10;
const ROOM_MOST_US: u32 = 1_000;
/// Weight of the newest sleep in the mean, as a divisor.
const WEIGHT: u32 = 8;

/// By how much the helper's sleeps end late, on the mean. Only the helper writes it.
#[derive(Debug)]
pub(super) struct Lateness(
    /// [`WEIGHT`] times the mean, microseconds.
    AtomicU32,
);

impl Lateness {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    fn mean_us(&self) -> u32 {
        (self.0.load(Ordering::Relaxed) / WEIGHT).min(MOST_LATE_US)
    }

    fn note(&self, late_us: u32) {
        let sum = self.0.load(Ordering::Relaxed);
        self.0.store(sum - sum / WEIGHT + late_us.min(OUTLIER_US), Ordering::Relaxed);
    }

    /// Whether what is expected to take so long ends before a sleep would.
    fn is_due(&self, left_us: u32) -> bool {
        left_us <= DUE_US + self.mean_us()
    }
}

/// For how long threads that wait for room have slept beyond their time of late: the longest, which fades.
#[derive(Debug)]
pub(super) struct Overslept(AtomicU32);

impl Overslept {
    /// Of the last time, each new one takes so much away, as a divisor.
    const FADES: u32 = 32;
    /// Who slept for so much longer was stopped or throttled, microseconds: no window lasts for that.
    const STOPPED_US: u32 = 20_000;
    /// From so much on a host counts as one that wakes threads late, microseconds. The GPU waits for who sleeps for long
    /// on a prompt one.
    const LATE_US: u32 = 500;
    /// What is in flight meanwhile lasts no longer, microseconds: whoever comes next waits for it.
    const MOST_US: u32 = 4_000;

    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    fn note(&self, late_us: u32) {
        let before = self.0.load(Ordering::Relaxed);
        let late_us = if late_us < Self::STOPPED_US { late_us } else { 0 };
        self.0.store((before - before / Self::FADES).max(late_us), Ordering::Relaxed);
    }

    /// For how long what is in flight is to last where the page asks for a window of so many microseconds: as long as sleeps
    /// end late, however narrow that is.
    pub(super) fn lasts_us(&self, window_us: u32) -> u32 {
        window_us.max(self.0.load(Ordering::Relaxed).min(Self::MOST_US))
    }

    /// Sleeps as briefly as can be; where sleeps end late, until half of what is in flight is complete, if it is known how
    /// long that takes: each sleep is a chance to wake late.
    pub(super) fn nap(&self, left_us: Option<u32>) {
        let nap_us = self.nap_us(left_us);
        let begun_us = flight::now_us();
        sleep_us(nap_us);
        self.note(flight::now_us().wrapping_sub(begun_us).saturating_sub(nap_us));
    }

    fn nap_us(&self, left_us: Option<u32>) -> u32 {
        let is_late = self.0.load(Ordering::Relaxed) >= Self::LATE_US;
        let half_us = left_us.filter(|_| is_late).map_or(0, |left_us| left_us / 2);
        half_us.clamp(ROOM_US, ROOM_MOST_US)
    }
}

/// The sleeps of one drain.
pub(super) struct Naps {
    next_us: u32,
    naps: u32,
    /// Looks in a row at the expected end.
    looks: u32,
}

impl Naps {
    pub(super) const fn new() -> Self {
        Self { next_us: 5, naps: 0, looks: 0 }
    }

    /// Sleeps until it is worth looking again at what is expected to take so long.
    pub(super) fn nap(&mut self, lateness: &Lateness, left_us: Option<u32>) {
        if left_us.is_some_and(|left_us| lateness.is_due(left_us)) && self.looks < MOST_LOOKS {
            self.looks += 1;
            (0..PAUSES).for_each(|_| spin_loop());
            return;
        }
        let nap_us = self.next(if self.naps < SHORT { LONGEST_US } else { LONG_US });
        let begun_us = flight::now_us();
        sleep_us(nap_us);
        lateness.note(flight::now_us().wrapping_sub(begun_us).saturating_sub(nap_us));
    }

    /// How long to sleep, in microseconds, where nobody waits.
    pub(super) fn next_at_leisure(&mut self) -> u32 {
        self.next(IDLE_US)
    }

    fn next(&mut self, longest_us: u32) -> u32 {
        let nap_us = self.next_us;
        self.naps += 1;
        self.next_us = (nap_us * 2).min(longest_us);
        nap_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn after(each: impl IntoIterator<Item = u32>) -> Lateness {
        let lateness = Lateness::new();
        each.into_iter().for_each(|late_us| lateness.note(late_us));
        lateness
    }

    #[test]
    fn sleeps_that_end_late_end_sooner() {
        let prompt = after([2; 50]);
        assert!(!prompt.is_due(30) && prompt.is_due(20));
        let late = after([50; 50]);
        assert!(!late.is_due(80) && late.is_due(60));
    }

    #[test]
    fn naps_grow_to_the_longest_and_again_for_long_operations() {
        let (mut naps, lateness) = (Naps::new(), Lateness::new());
        for due in [5, 10, 20, 20] {
            assert_eq!(naps.next_us, due);
            naps.nap(&lateness, None);
        }
        (0..SHORT).for_each(|_| naps.nap(&lateness, None));
        assert_eq!(naps.next_us, LONG_US);
    }

    #[test]
    fn an_operation_that_never_ends_is_not_looked_at_without_sleeps_for_ever() {
        let (mut naps, lateness) = (Naps::new(), Lateness::new());
        (0..2 * MOST_LOOKS).for_each(|_| naps.nap(&lateness, Some(0)));
        assert_eq!((naps.looks, naps.naps), (MOST_LOOKS, MOST_LOOKS));
    }

    #[test]
    fn only_where_sleeps_end_late_are_they_long() {
        let overslept = Overslept::new();
        overslept.note(300);
        assert_eq!([None, Some(0), Some(900)].map(|left_us| overslept.nap_us(left_us)), [10; 3]);
        overslept.note(4_000);
        let naps = [None, Some(0), Some(900), Some(9_000)];
        assert_eq!(naps.map(|left_us| overslept.nap_us(left_us)), [10, 10, 450, 1_000]);
    }

    #[test]
    fn a_window_lasts_for_sleeps_that_end_late_and_not_for_a_stop() {
        let overslept = Overslept::new();
        assert_eq!(overslept.lasts_us(500), 500);
        overslept.note(75_000);
        assert_eq!(overslept.lasts_us(500), 500);
        overslept.note(800);
        assert_eq!(
            [250, 500, 1_000].map(|window_us| overslept.lasts_us(window_us)),
            [800, 800, 1_000]
        );
        (0..64).for_each(|_| overslept.note(0));
        assert_eq!(overslept.lasts_us(500), 500);
        overslept.note(9_000);
        assert_eq!(overslept.lasts_us(500), 4_000);
    }

    proptest! {
        #[test]
        fn no_host_makes_it_look_without_sleeps_for_long(
            each in prop::collection::vec(any::<u32>(), 0..100), left_us: u32,
        ) {
            let lateness = after(each);
            prop_assert!(lateness.is_due(left_us) <= (left_us <= DUE_US + MOST_LATE_US));
        }
    }
}
