//! When to look at a GPU next: at once after news, ever less often while nothing moves. Pure.

use std::time::{Duration, Instant};

use super::overhead::{CONFIRM, Verdict};

/// The pause after the first look; doubles from look to look.
const FIRST: Duration = Duration::from_millis(10);
/// The longest pause.
pub const SLOW: Duration = Duration::from_secs(10);
/// The longest pause while looks cannot tell, because the ledger moves all the time, and while kernels
/// are launched, which may load modules and grow local memory.
const RESTLESS: Duration = Duration::from_secs(1);

/// Between two looks while dead processes' memory may be with the driver.
const HURRY: Duration = Duration::from_millis(3);

/// One GPU's.
#[derive(Clone, Copy, Debug)]
pub struct LookSchedule {
    due: Instant,
    pause: Duration,
    /// When the last look was over.
    looked: Option<Instant>,
}

impl LookSchedule {
    /// Looks at once.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        LookSchedule { due: now, pause: FIRST, looked: None }
    }

    /// When to look.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Something has happened: a process came, made a context, or went. With `wait`, there is so much
    /// news that it must wait, and brings no more than one look.
    pub fn news(&mut self, now: Instant, wait: Option<Duration>) {
        match wait {
            None => {
                self.due = self.due.min(now);
                self.pause = FIRST;
            }
            Some(wait) => self.due = self.due.min(now + wait),
        }
    }

    /// Dead processes' memory may be with the driver: somebody may wait for it.
    pub fn hurry(&mut self, now: Instant) {
        self.due = self.due.min(self.looked.map_or(now, |looked| looked + HURRY));
    }

    /// The next look is to be no later than this after the last.
    pub fn watch(&mut self, now: Instant, within: Duration) {
        self.due = self.due.min(now + within);
    }

    /// A look is over, and came to these verdicts for the tenants there. `busy`: one of them has
    /// launched something since the look before.
    pub fn looked(&mut self, now: Instant, verdicts: &[Verdict], busy: bool) {
        self.looked = Some(now);
        let any = |wanted: fn(&Verdict) -> bool| verdicts.iter().any(wanted);
        if any(|v| matches!(v, Verdict::Confirm)) {
            self.due = now + 2 * CONFIRM;
            // A figure that never agrees with itself costs no more than the rest.
            self.pause = (self.pause * 2).min(SLOW);
            self.due = self.due.max(now + self.pause / 16);
            return;
        }
        let restless = busy || any(|v| matches!(v, Verdict::Unclear));
        let most = if restless { RESTLESS } else { SLOW };
        self.due = now + self.pause.min(most);
        self.pause = (self.pause * 2).min(SLOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks in the time after `news`, which all come to `verdict`.
    fn looks(verdict: Verdict, busy: bool, within: Duration) -> usize {
        let start = Instant::now();
        let mut schedule = LookSchedule::new(start);
        let mut count = 0;
        while schedule.due() <= start + within {
            let now = schedule.due();
            schedule.looked(now, &[verdict], busy);
            count += 1;
        }
        count
    }

    #[test]
    fn looks_are_frequent_after_news_and_rare_when_nothing_moves() {
        assert!(looks(Verdict::Steady, false, Duration::from_millis(100)) >= 4);
        let hour = looks(Verdict::Steady, false, Duration::from_secs(3600));
        assert!((350..400).contains(&hour), "{hour}");
    }

    #[test]
    fn a_ledger_that_never_rests_is_looked_at_every_second() {
        let minute = looks(Verdict::Unclear, false, Duration::from_secs(60));
        assert!((60..75).contains(&minute), "{minute}");
        let minute = looks(Verdict::Steady, true, Duration::from_secs(60));
        assert!((60..75).contains(&minute), "while kernels are launched: {minute}");
    }

    #[test]
    fn a_figure_to_confirm_is_looked_at_soon_and_one_that_never_agrees_is_not_forever() {
        assert!(looks(Verdict::Confirm, false, Duration::from_millis(25)) >= 2);
        let minute = looks(Verdict::Confirm, false, Duration::from_secs(60));
        assert!(minute < 150, "{minute}");
    }

    #[test]
    fn looks_come_soon_while_somebody_waits_for_the_dead() {
        let start = Instant::now();
        let mut schedule = LookSchedule::new(start);
        for _ in 0..20 {
            schedule.looked(schedule.due(), &[], false);
        }
        let looked = schedule.looked.unwrap();
        schedule.watch(looked, Duration::from_millis(350));
        assert_eq!(schedule.due(), looked + Duration::from_millis(350));
        schedule.hurry(looked + Duration::from_millis(1));
        assert_eq!(schedule.due(), looked + HURRY);
    }

    #[test]
    fn news_bring_the_next_look_forward() {
        let start = Instant::now();
        let mut schedule = LookSchedule::new(start);
        for _ in 0..20 {
            schedule.looked(schedule.due(), &[], false);
        }
        let later = schedule.due() - Duration::from_secs(5);
        schedule.news(later, None);
        assert_eq!(schedule.due(), later);
        schedule.looked(later, &[], false);
        assert_eq!(schedule.due(), later + FIRST);
        for _ in 0..20 {
            schedule.looked(schedule.due(), &[], false);
        }
        let before = schedule;
        let later = schedule.due() - Duration::from_secs(5);
        schedule.news(later, Some(Duration::from_secs(1)));
        assert_eq!(
            (schedule.due(), schedule.pause),
            (later + Duration::from_secs(1), before.pause)
        );
    }
}
