//! Counters that never fall and never jump, from figures that may.
//!
//! What a container did is its own word, and is zeroed with its slot when a process ends or another takes
//! it; the arbiter's counts restart with a page. So totals are kept here, one account for each
//! allocation, and grow by what was added since the last look: of a tenant's word no more than any
//! process could do in that time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tessera_view::status::Allocation;

/// Nanoseconds that a launch or a refusal takes at least, of all threads of a container together.
const LEAST_NS: u64 = 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counter {
    seen: u64,
    total: u64,
}

impl Counter {
    /// A tenant's word: what is less than before tells nothing, and what is added is at most `most`.
    fn add_reported(&mut self, now: u64, most: u64) {
        let added = now.saturating_sub(self.seen).min(most);
        *self = Counter { seen: now, total: self.total.saturating_add(added) };
    }

    /// The plugin's own count, which may have restarted.
    fn add_counted(&mut self, now: u64) {
        let added = now.checked_sub(self.seen).unwrap_or(now);
        *self = Counter { seen: now, total: self.total.saturating_add(added) };
    }
}

/// What is added up of each allocation. The first [`REPORTED`] are its containers' own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    Refusals,
    DriverRefusals,
    Launches,
    GateWaits,
    GateTimeouts,
    /// Microseconds, as the next two.
    Leased,
    Used,
    Waited,
    Leases,
    Overlaps,
    Tamperings,
    Unaccounted,
}

const REPORTED: usize = 5;
const FIGURES: usize = Figure::Unaccounted as usize + 1;

/// As they are now, by [`Figure`]; `None` where that is not known: the page cannot be read, or the arbiter did not answer.
fn figures(one: &Allocation, readable: bool) -> [Option<u64>; FIGURES] {
    let reported = |figure: u64| readable.then_some(figure);
    let compute = one.compute.as_ref();
    [
        reported(one.refusals),
        reported(one.driver_refusals),
        reported(one.launches),
        reported(one.gate_waits),
        reported(one.gate_timeouts),
        compute.map(|compute| compute.leased_us),
        compute.map(|compute| compute.used_us),
        compute.map(|compute| compute.waited_us),
        compute.map(|compute| compute.leases),
        compute.map(|compute| compute.overlaps),
        Some(one.tamperings),
        Some(one.unaccounted),
    ]
}

/// Totals of an allocation, from the first look of this plugin on; of a container that runs since before
/// the plugin's start, what happened since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    figures: [u64; FIGURES],
    /// How long it has had no work: since the look that last saw some, or the first look.
    pub idle: Duration,
}

impl Totals {
    pub fn of(&self, figure: Figure) -> u64 {
        self.figures[figure as usize]
    }
}

#[derive(Clone, Copy, Debug)]
struct Account {
    generation: u64,
    looked: Instant,
    /// The look that last saw work.
    worked: Instant,
    counters: [Counter; FIGURES],
}

impl Account {
    /// What grows as long as there is work.
    fn work(&self) -> [u64; 3] {
        [Figure::Launches, Figure::Used, Figure::Waited]
            .map(|one| self.counters[one as usize].total)
    }
}

/// One for each allocation there is.
#[derive(Debug)]
pub(super) struct RunningTotals {
    started: Instant,
    accounts: HashMap<String, Account>,
}

impl RunningTotals {
    /// Of a plugin that starts at `now`.
    pub fn new(now: Instant) -> Self {
        RunningTotals { started: now, accounts: HashMap::new() }
    }

    /// Adds what was seen of `allocation` at `now`. `readable`: its usage page could be read. `adopted`: the
    /// allocation is older than this plugin, whose predecessor has reported the time before.
    pub fn update(
        &mut self,
        allocation: &Allocation,
        readable: bool,
        adopted: bool,
        now: Instant,
    ) -> Totals {
        let figures = figures(allocation, readable);
        let known = self.accounts.get(&allocation.id);
        let known = known.filter(|account| account.generation == allocation.generation);
        let mut account = match known {
            Some(account) => *account,
            // Without its page the base of an older one is not known yet.
            None if adopted && !readable => return Totals::default(),
            None => {
                let mut counters = [Counter::default(); FIGURES];
                // The others have begun with this plugin.
                for (counter, figure) in counters[..REPORTED].iter_mut().zip(figures) {
                    counter.seen = figure.filter(|_| adopted).unwrap_or(0);
                }
                let generation = allocation.generation;
                Account { generation, looked: self.started, worked: now, counters }
            }
        };
        let before = account.work();
        let most = most(now.saturating_duration_since(account.looked));
        for (at, (counter, figure)) in account.counters.iter_mut().zip(figures).enumerate() {
            match figure {
                Some(figure) if at < REPORTED => counter.add_reported(figure, most),
                Some(figure) => counter.add_counted(figure),
                None => {}
            }
        }
        if readable {
            account.looked = now;
        }
        if account.work() != before {
            account.worked = now;
        }
        self.accounts.insert(allocation.id.clone(), account);
        Totals {
            figures: account.counters.map(|counter| counter.total),
            idle: now.saturating_duration_since(account.worked),
        }
    }

    /// Forgets allocations that are no more.
    pub fn retain(&mut self, allocations: &[Allocation]) {
        if self.accounts.len() > allocations.len() {
            let ids: std::collections::HashSet<&str> =
                allocations.iter().map(|allocation| allocation.id.as_str()).collect();
            self.accounts.retain(|id, _| ids.contains(id.as_str()));
            self.accounts.shrink_to(2 * allocations.len());
        }
    }
}

fn most(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX) / LEAST_NS + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_view::tenant::Compute;

    use super::Figure::{Launches, Leased};
    use super::*;

    fn allocation(id: &str, generation: u64, launches: u64, leased_us: u64) -> Allocation {
        let compute = Some(Compute { leased_us, used_us: leased_us, ..Compute::default() });
        Allocation { id: id.to_owned(), generation, launches, compute, ..Allocation::default() }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_recycled_slot_takes_nothing_away() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut see = |n: u32, launches, leased| {
            let totals = running_totals.update(
                &allocation("a", 1, launches, leased),
                true,
                false,
                start + n * SECOND,
            );
            (totals.of(Launches), totals.of(Leased))
        };
        assert_eq!(see(1, 100, 50), (100, 50));
        assert_eq!(see(2, 130, 60), (130, 60));
        // The process ended; its slot was zeroed by the next one. The arbiter's count restarted.
        assert_eq!(see(3, 5, 4), (130, 64));
        assert_eq!(see(4, 9, 10), (134, 70));
    }

    #[test]
    fn what_an_earlier_plugin_has_reported_is_not_reported_again() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut now = start;
        let mut see = |said, launches| {
            now += SECOND;
            running_totals.update(&allocation("a", 1, launches, 0), said, true, now).of(Launches)
        };
        // A page that cannot be read for now says nothing.
        assert_eq!(see(false, 0), 0);
        assert_eq!(see(true, 1000), 0);
        assert_eq!(see(true, 1003), 3);
        assert_eq!(see(false, 0), 3);
        assert_eq!(see(true, 1004), 4);
    }

    #[test]
    fn an_arbiter_that_did_not_answer_has_not_restarted() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut see = |n: u32, compute: Option<u64>| {
            let compute = compute.map(|leased_us| Compute {
                leased_us,
                used_us: leased_us,
                ..Default::default()
            });
            let one = Allocation { compute, ..allocation("a", 1, 0, 0) };
            let totals = running_totals.update(&one, true, false, start + n * SECOND);
            (totals.of(Leased), totals.idle)
        };
        assert_eq!(see(1, Some(50)), (50, Duration::ZERO));
        assert_eq!(see(2, None), (50, SECOND));
        assert_eq!(see(3, Some(50)), (50, 2 * SECOND));
        assert_eq!(see(4, Some(51)), (51, Duration::ZERO));
    }

    #[test]
    fn idleness_is_time_without_work_on_a_gpu() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut see = |n: u32, launches, leased| {
            let one = allocation("a", 1, launches, leased);
            running_totals.update(&one, true, false, start + n * SECOND).idle
        };
        assert_eq!(see(1, 0, 0), Duration::ZERO);
        assert_eq!(see(5, 0, 0), 4 * SECOND);
        assert_eq!(see(6, 1, 0), Duration::ZERO);
        assert_eq!(see(9, 1, 0), 3 * SECOND);
        assert_eq!(see(10, 1, 7), Duration::ZERO);
        // A process that ended did nothing by that.
        assert_eq!(see(12, 0, 7), 2 * SECOND);
    }

    #[test]
    fn accounts_end_with_their_allocations() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let all: Vec<Allocation> = (0..100).map(|n| allocation(&n.to_string(), 1, 1, 1)).collect();
        for one in &all {
            running_totals.update(one, true, false, start);
        }
        running_totals.retain(&all[..3]);
        assert_eq!(running_totals.accounts.len(), 3);
        // The next holder of the same replicas begins at zero.
        let next = allocation("0", 2, 7, 7);
        assert_eq!(running_totals.update(&next, true, false, start + SECOND).of(Launches), 7);
    }

    proptest! {
        #[test]
        fn no_total_ever_falls_or_outruns_the_clock(words in prop::collection::vec(any::<(u64, u64)>(), 1..50)) {
            let start = Instant::now();
            let mut running_totals = RunningTotals::new(start);
            let (mut before, mut now) = (Totals::default(), start);
            for (launches, leased) in words {
                now += Duration::from_millis(250);
                let leased = leased >> 8;
                let totals = running_totals.update(&allocation("a", 1, launches, leased), true, false, now);
                let grown = totals.of(Launches).checked_sub(before.of(Launches));
                prop_assert!(totals.of(Leased) >= before.of(Leased));
                prop_assert!(grown.is_some_and(|grown| grown <= most(Duration::from_millis(250))));
                before = totals;
            }
        }
    }
}
