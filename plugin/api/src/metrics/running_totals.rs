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

/// Totals of an allocation, from the first look of this plugin on; of a container that runs since before
/// the plugin's start, what happened since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub refusals: u64,
    pub driver_refusals: u64,
    pub launches: u64,
    pub gate_waits: u64,
    pub gate_timeouts: u64,
    pub leased_us: u64,
    pub used_us: u64,
    pub waited_us: u64,
    pub leases: u64,
    pub overlaps: u64,
    pub tamperings: u64,
    pub unaccounted: u64,
    /// How long it has had no work: since the look that last saw some, or the first look.
    pub idle: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    generation: u64,
    looked: Instant,
    /// The look that last saw work.
    worked: Instant,
    reported: [Counter; 5],
    counted: [Counter; 7],
}

impl Account {
    /// What grows as long as there is work.
    fn work(&self) -> [u64; 3] {
        let Totals { launches, used_us, waited_us, .. } = self.totals(self.worked);
        [launches, used_us, waited_us]
    }

    fn totals(&self, now: Instant) -> Totals {
        let [refusals, driver_refusals, launches, gate_waits, gate_timeouts] =
            self.reported.map(|counter| counter.total);
        let [leased_us, used_us, waited_us, leases, overlaps, tamperings, unaccounted] =
            self.counted.map(|counter| counter.total);
        Totals {
            refusals,
            driver_refusals,
            launches,
            gate_waits,
            gate_timeouts,
            leased_us,
            used_us,
            waited_us,
            leases,
            overlaps,
            tamperings,
            unaccounted,
            idle: now.saturating_duration_since(self.worked),
        }
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
        let reported = [
            allocation.refusals,
            allocation.driver_refusals,
            allocation.launches,
            allocation.gate_waits,
            allocation.gate_timeouts,
        ];
        // Where the arbiter did not answer, its counts are not known, and the totals stay.
        let compute = allocation.compute.as_ref();
        let counts = [
            compute.map(|compute| compute.leased_us),
            compute.map(|compute| compute.used_us),
            compute.map(|compute| compute.waited_us),
            compute.map(|compute| compute.leases),
            compute.map(|compute| compute.overlaps),
            Some(allocation.tamperings),
            Some(allocation.unaccounted),
        ];
        let known = self.accounts.get_mut(&allocation.id);
        let known = known.filter(|account| account.generation == allocation.generation);
        let account = match known {
            Some(account) => account,
            // Without its page the base of an older one is not known yet.
            None if adopted && !readable => return Totals::default(),
            None => {
                let base = |seen: u64| Counter { seen: if adopted { seen } else { 0 }, total: 0 };
                let new = Account {
                    generation: allocation.generation,
                    looked: self.started,
                    worked: now,
                    reported: reported.map(base),
                    // These have begun with this plugin.
                    counted: Default::default(),
                };
                self.accounts.insert(allocation.id.clone(), new);
                let Some(account) = self.accounts.get_mut(&allocation.id) else {
                    return Totals::default();
                };
                account
            }
        };
        let before = account.work();
        if readable {
            let most = most(now.saturating_duration_since(account.looked));
            account
                .reported
                .iter_mut()
                .zip(reported)
                .for_each(|(counter, now)| counter.add_reported(now, most));
            account.looked = now;
        }
        for (counter, now) in account.counted.iter_mut().zip(counts) {
            if let Some(now) = now {
                counter.add_counted(now);
            }
        }
        if account.work() != before {
            account.worked = now;
        }
        account.totals(now)
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
            (totals.launches, totals.leased_us)
        };
        assert_eq!(see(1, 100, 50), (100, 50));
        assert_eq!(see(2, 130, 60), (130, 60));
        // The process ended; its slot was zeroed by the next one. The arbiter's count restarted.
        assert_eq!(see(3, 5, 4), (130, 64));
        assert_eq!(see(4, 9, 10), (134, 70));
    }

    #[test]
    fn absurd_figures_count_as_what_could_have_been() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut see = |n: u32, launches| {
            running_totals
                .update(&allocation("a", 1, launches, 0), true, false, start + n * SECOND)
                .launches
        };
        assert_eq!(see(1, 10), 10);
        assert_eq!(see(2, u64::MAX), 10 + most(SECOND));
        assert_eq!(see(3, 0), 10 + most(SECOND));
        assert_eq!(see(4, u64::MAX), 10 + 2 * most(SECOND));
    }

    #[test]
    fn what_an_earlier_plugin_has_reported_is_not_reported_again() {
        let start = Instant::now();
        let mut running_totals = RunningTotals::new(start);
        let mut now = start;
        let mut see = |said, launches| {
            now += SECOND;
            running_totals.update(&allocation("a", 1, launches, 0), said, true, now).launches
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
            (totals.leased_us, totals.idle)
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
        assert_eq!(running_totals.update(&next, true, false, start + SECOND).launches, 7);
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
                prop_assert!(totals.launches >= before.launches && totals.leased_us >= before.leased_us);
                prop_assert!(totals.launches - before.launches <= most(Duration::from_millis(250)));
                before = totals;
            }
        }
    }
}
