//! Which observations count, and what to publish: a state machine per tenant and GPU, pure.
//!
//! What is published moves every view of free memory in the container, so it must be right and it
//! must rest. Only quiet looks count ([`Sample::overhead`]). Then:
//!
//! - **Up** at once when all looks of at least [`CONFIRM`], two or more, show more than is published:
//!   to the least of them, rounded up to [`STEP`]. So what is published covers what was seen, and
//!   pages that small allocations fill and leave do not move it.
//! - **Down** when a process or a context has gone since and two consecutive looks show less, to the
//!   larger of the two.
//! - **Down** otherwise only when all looks of [`PERSISTENT`], at least [`LOOKS`], showed less: to
//!   the most they showed. So overhead that is gone is gone within a second, with [`WATCH`] between two
//!   looks. Looks during which the ledger grew count here, too: what they show is an upper bound of overhead.
//!   Looks during which something was given back are no bound: the driver may have been asked between a free and
//!   the next allocation. They count only when [`FREEING`] in a row show less.

use std::time::{Duration, Instant};

use super::sample::Sample;

/// Published figures are multiples of this, bytes: eight of the driver's pages.
pub const STEP: u64 = 16 << 20;
/// Least time between two looks that confirm each other.
pub const CONFIRM: Duration = Duration::from_millis(5);
/// How long less must show, without a reason, before less is published.
pub const PERSISTENT: Duration = Duration::from_millis(300);
/// The longest time between two looks while overhead is published, and while it falls.
pub const WATCH: Duration = Duration::from_millis(350);
pub const WATCH_FALL: Duration = Duration::from_millis(90);
pub const LOOKS: u32 = 3;
/// How many looks in a row must show less where something was given back during each of them. Of one such look in
/// seven at most the ledger was fuller before and after than while the driver was asked.
pub const FREEING: u32 = 32;

#[derive(Clone, Debug)]
pub struct OverheadEstimator {
    published: u64,
    rising: Option<(Instant, u64)>,
    falling: Option<Falling>,
    /// The processes when last nothing was pending: pid, start, bytes of contexts.
    members: Vec<(u32, u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Falling {
    since: Instant,
    most: u64,
    looks: u32,
    /// Looks in a row that show less and are no bound.
    freeing: u32,
    gone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Publish(u64),
    Steady,
    /// Another look should follow, no sooner than [`CONFIRM`].
    Confirm,
    Unclear,
}

impl OverheadEstimator {
    /// Begins with what is published already, by this plugin or the one before it.
    pub fn new(published: u64) -> Self {
        OverheadEstimator { published, rising: None, falling: None, members: Vec::new() }
    }

    pub fn published(&self) -> u64 {
        self.published
    }

    /// Takes a look. Looks come in the order of time.
    pub fn see(&mut self, now: Instant, sample: &Sample) -> Verdict {
        let Some(overhead) = sample.overhead() else { return self.see_moving(now, sample) };
        let here: Vec<_> = sample.members.iter().map(|(m, c)| (m.pid, m.start, *c)).collect();
        let target = overhead.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        let gone = self.has_gone(&here);
        let verdict = if overhead > self.published {
            self.falling = None;
            self.rise(now, overhead)
        } else if target < self.published {
            self.rising = None;
            self.fall(now, target, gone, false)
        } else {
            (self.rising, self.falling) = (None, None);
            Verdict::Steady
        };
        self.members = here;
        verdict
    }

    /// A look during which the ledger moved: it can show less, and not more.
    fn see_moving(&mut self, now: Instant, sample: &Sample) -> Verdict {
        let target = sample.most().and_then(|most| most.checked_next_multiple_of(STEP));
        let Some(target) = target.filter(|target| *target < self.published) else {
            if let Some(falling) = &mut self.falling {
                falling.freeing = 0;
            }
            return Verdict::Unclear;
        };
        // What may have moved is whose members are whose, too.
        let gone = false;
        match self.fall(now, target, gone, sample.freed) {
            Verdict::Publish(bytes) => Verdict::Publish(bytes),
            _ => Verdict::Unclear,
        }
    }

    pub fn watch(&self) -> Option<Duration> {
        match (self.published, self.falling) {
            (0, _) => None,
            (_, None) => Some(WATCH),
            (_, Some(_)) => Some(WATCH_FALL),
        }
    }

    /// Whether less shows than is published, and more looks must say so.
    pub fn is_falling(&self) -> bool {
        self.falling.is_some()
    }

    fn rise(&mut self, now: Instant, overhead: u64) -> Verdict {
        let Some((since, first)) = self.rising else {
            self.rising = Some((now, overhead));
            return Verdict::Confirm;
        };
        if now.saturating_duration_since(since) < CONFIRM {
            // Too soon to confirm, but not to deny.
            self.rising = Some((since, first.min(overhead)));
            return Verdict::Confirm;
        }
        self.publish(first.min(overhead).checked_next_multiple_of(STEP).unwrap_or(u64::MAX));
        // It may be rising still.
        self.rising = (overhead > self.published).then_some((now, overhead));
        Verdict::Publish(self.published)
    }

    fn fall(&mut self, now: Instant, target: u64, gone: bool, freed: bool) -> Verdict {
        let new = Falling { since: now, most: target, looks: 0, freeing: 0, gone };
        let falling = self.falling.get_or_insert(new);
        if gone && !falling.gone {
            // What showed before may have been theirs.
            *falling = new;
        }
        if freed {
            falling.freeing += 1;
        } else {
            falling.looks += 1;
        }
        falling.most = falling.most.max(target);
        let lasted = now.saturating_duration_since(falling.since);
        let sure = if falling.gone {
            lasted >= CONFIRM && falling.looks >= 2
        } else {
            lasted >= PERSISTENT && (falling.looks >= LOOKS || falling.freeing >= FREEING)
        };
        match (sure, falling.gone) {
            (true, _) => {
                let most = falling.most;
                self.publish(most);
                Verdict::Publish(most)
            }
            (false, true) => Verdict::Confirm,
            (false, false) => Verdict::Steady,
        }
    }

    fn publish(&mut self, bytes: u64) {
        self.published = bytes;
        (self.rising, self.falling) = (None, None);
    }

    /// Whether somebody who was there is not, or has fewer contexts.
    fn has_gone(&self, here: &[(u32, u64, u64)]) -> bool {
        self.members.iter().any(|(pid, start, contexts)| {
            !here.iter().any(|(p, s, c)| (p, s) == (pid, start) && c >= contexts)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe::sample::Member;

    const MIB: u64 = 1 << 20;

    fn members(pids: &[u32]) -> Vec<(Member, u64)> {
        let member = |&pid| (Member { pid, start: 1, used_bytes: Some(0), slot: None }, 7);
        pids.iter().map(member).collect()
    }

    /// A quiet look at `overhead` bytes beyond a ledger of 100 MiB.
    fn look(overhead: u64, pids: &[u32]) -> Sample {
        let granted = 100 * MIB;
        Sample {
            quiet: true,
            freed: false,
            granted,
            used: Some(granted + overhead),
            members: members(pids),
            ..Sample::default()
        }
    }

    /// A gauge and its clock; looks are a second apart.
    struct Bench {
        estimator: OverheadEstimator,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Self { estimator: OverheadEstimator::new(0), now: Instant::now() }
        }

        fn see(&mut self, sample: &Sample) -> Verdict {
            self.now += Duration::from_secs(1);
            self.estimator.see(self.now, sample)
        }

        /// Looks that show the same until something is published.
        fn settle(&mut self, sample: &Sample) -> u64 {
            for _ in 0..100 {
                if let Verdict::Publish(_) = self.see(sample) {
                    break;
                }
            }
            self.estimator.published()
        }
    }

    #[test]
    fn a_look_too_soon_confirms_nothing() {
        let mut estimator = OverheadEstimator::new(0);
        let start = Instant::now();
        assert_eq!(estimator.see(start, &look(MIB, &[1])), Verdict::Confirm);
        assert_eq!(estimator.see(start + CONFIRM / 2, &look(MIB, &[1])), Verdict::Confirm);
        assert_eq!(estimator.see(start + CONFIRM, &look(MIB, &[1])), Verdict::Publish(STEP));
    }

    #[test]
    fn whoever_goes_takes_its_overhead_along_at_the_second_look() {
        let mut fewer = look(160 * MIB, &[1, 2]);
        fewer.members[0].1 -= 1;
        let mut namesake = look(160 * MIB, &[1, 2]);
        namesake.members[0].0.start = 2;
        // A process that exits, a context that is destroyed, and a namesake of a dead process, who is somebody else.
        for after in [look(160 * MIB, &[2]), fewer, namesake] {
            let mut bench = Bench::new();
            assert_eq!(bench.settle(&look(320 * MIB, &[1, 2])), 320 * MIB);
            assert_eq!(bench.see(&after), Verdict::Confirm, "{after:?}");
            assert_eq!(bench.see(&after), Verdict::Publish(160 * MIB));
            assert_eq!(bench.see(&look(0, &[])), Verdict::Confirm);
            assert_eq!(bench.see(&look(0, &[])), Verdict::Publish(0));
        }
    }

    /// Looks that come when the rhythm says, from when the overhead has gone; for how long it is published.
    fn decay(sample: &Sample) -> Duration {
        let mut bench = Bench::new();
        bench.settle(&look(800 * MIB, &[1]));
        let gone = bench.now;
        let mut now = gone;
        while bench.estimator.published() > STEP {
            now += bench.estimator.watch().expect("somebody looks while there is overhead");
            bench.estimator.see(now, sample);
            assert!(now - gone < Duration::from_secs(60));
        }
        now - gone
    }

    #[test]
    fn overhead_that_is_gone_is_gone_within_a_second() {
        let moving = Sample { quiet: false, ..look(MIB, &[1]) };
        let freeing = Sample { freed: true, ..moving.clone() };
        for (sample, limit_ms) in [(look(MIB, &[1]), 900), (moving, 900), (freeing, 3500)] {
            let decay = decay(&sample);
            assert!(decay < Duration::from_millis(limit_ms), "{decay:?}");
        }
        assert_eq!(OverheadEstimator::new(0).watch(), None, "no overhead, no reason");
    }

    #[test]
    fn without_a_reason_less_is_believed_only_when_it_lasts() {
        let mut bench = Bench::new();
        bench.settle(&look(320 * MIB, &[1]));
        let start = bench.now;
        assert_eq!(bench.settle(&look(MIB, &[1])), STEP);
        assert!(bench.now - start >= PERSISTENT);
        // What shows up in between starts it again.
        let mut bench = Bench::new();
        bench.settle(&look(320 * MIB, &[1]));
        for _ in 0..10 {
            for _ in 1..LOOKS {
                bench.see(&look(MIB, &[1]));
            }
            bench.see(&look(320 * MIB, &[1]));
        }
        assert_eq!(bench.estimator.published(), 320 * MIB);
    }

    #[test]
    fn what_was_published_before_a_restart_stands_until_it_is_seen_to_be_wrong() {
        let mut estimator = OverheadEstimator::new(320 * MIB);
        let start = Instant::now();
        assert_eq!(estimator.see(start, &look(310 * MIB, &[1])), Verdict::Steady);
        let unquiet = Sample { quiet: false, ..look(0, &[]) };
        assert_eq!(estimator.see(start, &unquiet), Verdict::Unclear);
        assert_eq!(estimator.published(), 320 * MIB);
    }

    /// A tenant that allocates and gives back all the time, in the order of the shim: an allocation is charged, made by
    /// the driver, granted; a free is done by the driver before the ledger says so. Its overhead is always the same.
    struct Busy {
        /// Bytes of the driver, granted bytes, charged bytes, frees, allocations: each word as it stands after each step.
        steps: Vec<[u64; 5]>,
    }

    impl Busy {
        /// `held`: what it has for good, MiB; then it goes up and down by each of `sizes`, held for as many steps.
        fn new(held: u64, overhead: u64, sizes: &[(u64, usize)]) -> Self {
            let [mut driver, mut granted, mut charged, mut frees, mut allocations] =
                [held + overhead, held, held, 0, 0];
            let mut steps = Vec::new();
            for (size, lasts) in sizes {
                charged += size;
                steps.push([driver, granted, charged, frees, allocations]);
                driver += size;
                steps.push([driver, granted, charged, frees, allocations]);
                (granted, allocations) = (granted + size, allocations + 1);
                steps.extend(vec![[driver, granted, charged, frees, allocations]; *lasts]);
                driver -= size;
                steps.push([driver, granted, charged, frees, allocations]);
                (granted, charged, frees) = (granted - size, charged - size, frees + 1);
                steps.extend(vec![[driver, granted, charged, frees, allocations]; *lasts]);
            }
            Busy { steps }
        }

        /// Whether the driver has freed at this step what the ledger still has.
        fn is_between(&self, step: usize) -> bool {
            let [this, next] = [step, step + 1].map(|step| self.steps[step % self.steps.len()]);
            next[3] > this[3]
                && self.steps[(step + self.steps.len() - 1) % self.steps.len()][0] > this[0]
        }

        /// What a look sees that reads the ledger at one step, asks the driver at another, and reads again at a third.
        fn look(&self, mut at: [usize; 3]) -> Sample {
            // That moment is shorter than a look.
            if at[1] == at[2] && self.is_between(at[1]) {
                at[2] += 1;
            }
            let [before, driver, after] = at.map(|step| self.steps[step % self.steps.len()]);
            // Steps that come round again are other frees.
            let rounds = |step: usize| step / self.steps.len();
            let freed = before[3] != after[3] || rounds(at[0]) != rounds(at[2]);
            Sample {
                quiet: !freed && before == after && before[1] == before[2],
                freed,
                granted: before[1].min(after[1]) * MIB,
                used: Some(driver[0] * MIB),
                members: members(&[1]),
                ..Sample::default()
            }
        }
    }

    /// A look: milliseconds after the one before, overhead in MiB, whether it is quiet, who is there.
    fn any_look() -> impl Strategy<Value = (u64, Sample)> {
        let pids = prop::sample::subsequence(vec![1u32, 2, 3], 0..=3);
        (0..20_000u64, 0..200u64, prop::bool::weighted(0.8), pids).prop_map(
            |(pause, overhead, quiet, pids)| {
                (pause, Sample { quiet, ..look(overhead * MIB, &pids) })
            },
        )
    }

    proptest! {
        /// Whatever is seen: what is raised was there at both of the last two quiet looks, what is
        /// lowered still covers the last, and looks that are not quiet raise nothing.
        #[test]
        fn nothing_is_published_that_was_not_seen_twice(
            looks in prop::collection::vec(any_look(), 1..200),
        ) {
            let mut estimator = OverheadEstimator::new(0);
            let mut now = Instant::now();
            let mut last: Option<u64> = None;
            for (pause, sample) in looks {
                now += Duration::from_millis(pause);
                let before = estimator.published();
                let verdict = estimator.see(now, &sample);
                let Some(overhead) = sample.overhead() else {
                    let now = estimator.published();
                    match verdict {
                        Verdict::Publish(bytes) => {
                            prop_assert!(bytes == now && bytes < before && bytes % STEP == 0);
                            prop_assert!(Some(bytes) >= sample.most());
                        }
                        _ => prop_assert_eq!((verdict, now), (Verdict::Unclear, before)),
                    }
                    continue;
                };
                if let Verdict::Publish(bytes) = verdict {
                    prop_assert_ne!(bytes, before);
                    prop_assert_eq!(bytes % STEP, 0);
                    let seen = last.map_or(0, |last| last.min(overhead));
                    if bytes > before {
                        prop_assert!(bytes < seen + STEP, "{} published, {} seen", bytes, seen);
                    } else {
                        prop_assert!(bytes >= overhead);
                    }
                }
                last = Some(overhead);
            }
        }

        /// After any past, a tenant at rest is covered after few looks, and then nothing moves.
        #[test]
        fn a_tenant_at_rest_is_left_at_rest(
            looks in prop::collection::vec(any_look(), 0..50),
            overhead in 0..200u64,
        ) {
            let mut bench = Bench::new();
            for (_, sample) in &looks {
                bench.see(sample);
            }
            let rest = look(overhead * MIB, &[1, 2]);
            for _ in 0..3 {
                bench.see(&rest);
            }
            prop_assert!(bench.estimator.published() >= overhead * MIB);
            for _ in 0..60 {
                bench.see(&rest);
            }
            let settled = bench.estimator.published();
            prop_assert_eq!(settled, (overhead * MIB).next_multiple_of(STEP));
            for _ in 0..100 {
                prop_assert_eq!(bench.see(&rest), Verdict::Steady);
            }
        }

        /// However slow the looks, and whatever the tenant allocates and gives back between and during them: overhead
        /// that is there is covered, once it was seen.
        #[test]
        fn a_busy_tenants_overhead_is_never_believed_gone(
            overhead in 1..200u64,
            sizes in prop::collection::vec((1..500u64, 1..6usize), 1..6),
            looks in prop::collection::vec((0..100usize, 0..12usize, 0..12usize, 5..400u64), 1..300),
        ) {
            let tenant = Busy::new(700, overhead, &sizes);
            let covers = (overhead * MIB).next_multiple_of(STEP);
            let mut estimator = OverheadEstimator::new(covers);
            let mut now = Instant::now();
            for (at, asks, reads, pause) in looks {
                now += Duration::from_millis(pause);
                let sample = tenant.look([at, at + asks, at + asks + reads]);
                estimator.see(now, &sample);
                prop_assert_eq!(estimator.published(), covers, "{:?}", sample);
            }
        }

        /// Pages that small allocations fill and leave do not move it.
        #[test]
        fn noise_within_a_step_moves_nothing(
            base in 1..20u64,
            noise in prop::collection::vec(1..=16u64, 1..100),
        ) {
            let mut bench = Bench::new();
            let settled = bench.settle(&look(base * STEP, &[1]));
            for noise in noise {
                let sample = look(base * STEP - 16 * MIB + noise * MIB, &[1]);
                prop_assert_eq!(bench.see(&sample), Verdict::Steady);
            }
            prop_assert_eq!(bench.estimator.published(), settled);
        }
    }
}
