//! When to look at a GPU next: at once after news, ever less often while nothing moves. Pure.
//!
//! NVML's lists of processes take some 4.5 ms each under a lock that allocations of all processes need, and a GPU's
//! memory figure takes 12 µs without it (driver 610.57, flightlessmango/MangoHud#2104). So a look first asks for that
//! figure, and for the lists only where it has moved beyond what the tenants' ledgers explain, after news, while the
//! last lists left something open, and every [`SLOW`].

use std::time::{Duration, Instant};

use super::overhead::{CONFIRM, Verdict};

/// The pause after the first look; doubles from look to look.
const FIRST: Duration = Duration::from_millis(10);
pub const SLOW: Duration = Duration::from_secs(10);
/// The longest pause while looks cannot tell, because the ledger moves all the time, and while kernels
/// are launched, which may load modules and grow local memory.
const RESTLESS: Duration = Duration::from_secs(1);

/// Between two looks while dead processes' memory may be with the driver.
const HURRY: Duration = Duration::from_millis(3);
/// The longest time between two lists meanwhile, and the part of the time since then that it grows to: a teardown
/// may take half a minute, under the lock that the lists take.
const HURRIED_LISTS: Duration = Duration::from_millis(50);
const HURRIED_PART: u32 = 8;
/// Bytes that a GPU's figure may move before the lists are asked what moved.
const MOVED: u64 = 16 << 20;

#[derive(Clone, Copy, Debug)]
pub struct LookSchedule {
    due: Instant,
    pause: Duration,
    looked: Option<Instant>,
    /// The next look asks for the lists, whatever the figure is.
    open: bool,
    /// When the lists were asked last, and the figure then.
    listed: Option<(Instant, Figure)>,
    figure: Figure,
    watched: Duration,
    /// Since when somebody may wait for dead processes' memory.
    hurried: Option<Instant>,
}

/// A GPU's memory in use beyond what its tenants' ledgers say, bytes; `None` where the driver does not tell.
pub type Figure = Option<i128>;

/// What a look with lists came to.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// Of the tenants there.
    pub verdicts: Vec<Verdict>,
    /// Somebody has launched something since the look before, or is to be looked at again.
    pub busy: bool,
    /// A second look must confirm what this one saw.
    pub open: bool,
    /// The next looks are to be no later than this after each other.
    pub watch: Option<Duration>,
    /// The driver may have memory of dead processes of tenants that are there.
    pub departing: bool,
    /// It lists dead processes, whosever they were.
    pub ending: bool,
}

impl LookSchedule {
    pub fn new(now: Instant) -> Self {
        LookSchedule {
            due: now,
            pause: FIRST,
            looked: None,
            open: true,
            listed: None,
            figure: None,
            watched: SLOW,
            hurried: None,
        }
    }

    pub fn due(&self) -> Instant {
        self.due
    }

    /// Something has happened: a process came, made a context, or went. With `wait`, there is so much
    /// news that it must wait, and brings no more than one look.
    pub fn news(&mut self, now: Instant, wait: Option<Duration>) {
        self.open = true;
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
        self.hurried.get_or_insert(now);
        self.due = self.due.min(self.looked.map_or(now, |looked| looked + HURRY));
    }

    /// The next looks are to be no later than this after each other, until the next with lists.
    fn watch(&mut self, now: Instant, within: Duration) {
        self.watched = within;
        self.due = self.due.min(now + within);
    }

    /// Whether a look at this figure must ask for the lists. `hurries`: as for [`Self::hurry`].
    pub fn wants_lists(&mut self, now: Instant, figure: Figure, hurries: bool) -> bool {
        self.hurried = self.hurried.filter(|_| hurries);
        let (Some((listed, then)), Some(figure)) = (self.listed, figure) else { return true };
        let (Some(then), false) = (then, self.open) else { return true };
        let passed = now.saturating_duration_since(listed);
        if hurries {
            // Memory comes back in pieces: the lists are asked when it rests.
            let since = self.hurried.map_or(Duration::ZERO, |since| now - since);
            return passed >= HURRIED_LISTS.max(since / HURRIED_PART)
                || figure != then && self.figure == Some(figure);
        }
        passed >= SLOW || figure.abs_diff(then) >= u128::from(MOVED)
    }

    pub fn polled(&mut self, now: Instant, figure: Figure) {
        (self.looked, self.figure) = (Some(now), figure);
        self.due = now + self.pause.min(self.watched);
        self.pause = (self.pause * 2).min(SLOW);
    }

    pub fn looked(&mut self, now: Instant, figure: Figure, look: &Look) {
        (self.looked, self.figure) = (Some(now), figure);
        (self.listed, self.watched) = (Some((now, figure)), SLOW);
        let any = |wanted: fn(&Verdict) -> bool| look.verdicts.iter().any(wanted);
        self.open = look.open || any(|verdict| *verdict != Verdict::Steady);
        if any(|v| matches!(v, Verdict::Confirm)) {
            // A figure that never agrees with itself costs no more than the rest.
            self.pause = (self.pause * 2).min(SLOW);
            self.due = now + (2 * CONFIRM).max(self.pause / 16);
        } else {
            let restless = look.busy || any(|v| matches!(v, Verdict::Unclear));
            let most = if restless { RESTLESS } else { SLOW };
            self.due = now + self.pause.min(most);
            self.pause = (self.pause * 2).min(SLOW);
        }
        if let Some(within) = look.watch {
            self.watch(now, within);
        }
        if look.departing || look.ending {
            self.hurry(now);
        }
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
            schedule.looked(now, None, &Look { verdicts: vec![verdict], busy, ..Look::default() });
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
            schedule.looked(schedule.due(), None, &Look::default());
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
            schedule.looked(schedule.due(), None, &Look::default());
        }
        let later = schedule.due() - Duration::from_secs(5);
        schedule.news(later, None);
        assert_eq!(schedule.due(), later);
        schedule.looked(later, None, &Look::default());
        assert_eq!(schedule.due(), later + FIRST);
        for _ in 0..20 {
            schedule.looked(schedule.due(), None, &Look::default());
        }
        let before = schedule;
        let later = schedule.due() - Duration::from_secs(5);
        schedule.news(later, Some(Duration::from_secs(1)));
        assert_eq!(
            (schedule.due(), schedule.pause),
            (later + Duration::from_secs(1), before.pause)
        );
    }

    /// A GPU whose figure is `figure(ms)`; how often the lists are asked in `within`, and when.
    fn lists(mut figure: impl FnMut(u64) -> i128, hurries: bool, within: Duration) -> Vec<u64> {
        let start = Instant::now();
        let (mut schedule, mut all) = (LookSchedule::new(start), Vec::new());
        while schedule.due() <= start + within {
            let now = schedule.due();
            let ms = u64::try_from(now.duration_since(start).as_millis()).unwrap();
            let figure = Some(figure(ms));
            if schedule.wants_lists(now, figure, hurries) {
                all.push(ms);
                schedule.looked(now, figure, &Look { busy: true, ..Look::default() });
            } else {
                schedule.polled(now, figure);
            }
            schedule.watch(now, Duration::from_millis(350));
            if hurries {
                schedule.hurry(now);
            }
        }
        all
    }

    #[test]
    fn a_gpu_on_which_nothing_moves_is_asked_for_its_processes_every_ten_seconds() {
        let hour = lists(|_| 1 << 30, false, Duration::from_secs(3600)).len();
        assert!((340..=361).contains(&hour), "{hour}");
        // Less than a published step is not worth the lists.
        let minute = lists(|ms| i128::from(ms % 1000), false, Duration::from_secs(60)).len();
        assert!(minute <= 7, "{minute}");
    }

    #[test]
    fn memory_that_nobody_explains_is_looked_into_at_the_next_look() {
        let appears = |ms| if ms < 5000 { 0 } else { 20 << 20 };
        let all = lists(appears, false, Duration::from_secs(9));
        assert_eq!(all.len(), 2, "{all:?}");
        assert!((5000..5400).contains(&all[1]), "{all:?}");
    }

    #[test]
    fn a_teardown_of_half_a_minute_is_not_slowed_by_the_one_who_waits() {
        let comes_back = |ms: u64| if ms < 26_000 { 60 << 30 } else { 0 };
        let all = lists(comes_back, true, Duration::from_secs(27));
        assert!(all.len() < 60, "{} lists", all.len());
        assert!(all.iter().any(|ms| (26_000..=26_009).contains(ms)), "{all:?}");
    }

    #[test]
    fn while_a_dead_process_s_memory_comes_back_its_end_is_waited_for() {
        // 0.4 s of falling, and then rest.
        let falls = |ms: u64| i128::from(400u64.saturating_sub(ms)) << 20;
        let all = lists(falls, true, Duration::from_millis(430));
        assert!(all.len() <= 11, "{} lists", all.len());
        assert!(all.iter().any(|ms| (400..=409).contains(ms)), "{all:?}");
    }
}
