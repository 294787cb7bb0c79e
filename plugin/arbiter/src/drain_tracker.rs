//! Which processes of a tenant must have drained before its lease has ended. Pure.
//!
//! A process is *bound* from its hello on. Each closing of the gate makes every bound process owe a drain of
//! that epoch. A process that comes while the gate is closed owes nothing, because nothing passed since,
//! unless an earlier arbiter may have let it in. A report about another epoch is stale or a lie, and changes
//! nothing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::policy::Used;

/// The gate as it was set last, and its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Closed(u32),
    Open(u32),
}

#[derive(Clone, Copy, Debug, Default)]
struct Process {
    owes: bool,
    idle: bool,
    /// Nothing of what it owes has completed for a while.
    still: bool,
    /// It owes, and reports that the GPU does not work for it.
    waits: bool,
    /// It owes nothing more, as its flight page showed: its report may still come.
    landed: bool,
}

/// How many processes owe a drain; of those, how many stand still, and how many wait; and how many are idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    owe: usize,
    still: usize,
    wait: usize,
    idle: usize,
}

impl Counts {
    fn add(&mut self, process: Process) {
        self.owe += usize::from(process.owes);
        self.still += usize::from(process.owes && process.still);
        self.wait += usize::from(process.owes && process.waits);
        self.idle += usize::from(process.idle);
    }

    fn remove(&mut self, process: Process) {
        self.owe -= usize::from(process.owes);
        self.still -= usize::from(process.owes && process.still);
        self.wait -= usize::from(process.owes && process.waits);
        self.idle -= usize::from(process.idle);
    }
}

/// One tenant's processes, by a key that is never reused.
#[derive(Debug)]
pub(super) struct DrainTracker {
    processes: BTreeMap<u64, Process>,
    /// Whether unknown processes of an earlier arbiter may exist: together they owe one drain.
    inherited: bool,
    /// The first epoch: inherited processes owe its drain.
    first: u32,
    /// Of how many processes each holds: a report costs no look at the others.
    counts: Counts,
    /// GPU use that processes reported since the gate closed, nanoseconds: the longest, and the sum.
    used_ns: Option<(u64, u64)>,
    gate: Gate,
}

impl DrainTracker {
    /// No processes, and a gate that is closed in this epoch.
    pub fn new(epoch: u32) -> Self {
        let gate = Gate::Closed(epoch);
        DrainTracker {
            processes: BTreeMap::new(),
            inherited: false,
            first: epoch,
            counts: Counts::default(),
            used_ns: None,
            gate,
        }
    }

    /// A process said hello. It owes the drain of this closing if it may be an inherited one.
    pub fn process_came(&mut self, key: u64) {
        let owes = self.inherited && matches!(self.gate, Gate::Closed(_));
        if let Entry::Vacant(entry) = self.processes.entry(key) {
            self.counts.add(*entry.insert(Process { owes, ..Process::default() }));
        }
    }

    /// A process is dead, or has left.
    pub fn process_left(&mut self, key: u64) {
        if let Some(process) = self.processes.remove(&key) {
            self.counts.remove(process);
        }
    }

    fn set_all(&mut self, process: Process) {
        self.counts = Counts::default();
        for each in self.processes.values_mut() {
            *each = process;
            self.counts.add(process);
        }
    }

    /// The gate closed in a new epoch. All bound processes owe a drain.
    pub fn close(&mut self, epoch: u32) {
        self.gate = Gate::Closed(epoch);
        self.set_all(Process { owes: true, ..Process::default() });
        self.used_ns = None;
    }

    /// The gate opened, or is open in another state.
    pub fn open(&mut self, epoch: u32) {
        self.gate = Gate::Open(epoch);
        self.set_all(Process::default());
        self.inherited = false;
    }

    /// An earlier arbiter may have let processes in that are not bound yet and have work in flight.
    pub fn expect_inherited(&mut self) {
        self.inherited = true;
    }

    /// The grace period of inherited processes has expired.
    pub fn forget_inherited(&mut self) {
        self.inherited = false;
    }

    /// The grace period of inherited processes to drain has expired, too: no lease of this arbiter's waits
    /// for them.
    pub fn waive_inherited(&mut self) {
        if self.gate == Gate::Closed(self.first) {
            for process in self.processes.values_mut() {
                self.counts.remove(*process);
                process.owes = false;
                self.counts.add(*process);
            }
        }
    }

    /// Lets a bound process's report of this gate change what is known of it.
    fn report(
        &mut self,
        key: u64,
        gate: Gate,
        change: impl FnOnce(&mut Process) -> bool,
    ) -> Option<bool> {
        let process = self.processes.get_mut(&key).filter(|_| self.gate == gate)?;
        self.counts.remove(*process);
        let result = change(process);
        self.counts.add(*process);
        Some(result)
    }

    /// A process reports that nothing of it is in flight. What it says of a drain that its page has shown before comes
    /// too late to count. False, and nothing else, of another epoch, an open gate or a process that is not bound, and
    /// where it has said so before.
    pub fn drained(&mut self, key: u64, epoch: u32, used_ns: u64) -> bool {
        let mut landed = false;
        let owed = |process: &mut Process| {
            landed = std::mem::take(&mut process.landed);
            std::mem::take(&mut process.owes)
        };
        let owed = self.report(key, Gate::Closed(epoch), owed) == Some(true);
        if owed {
            self.add_use(used_ns);
        }
        owed || landed
    }

    /// The same of a process whose flight page shows it, in the present closing.
    pub fn landed(&mut self, key: u64, used_ns: u64) {
        let owed = |process: &mut Process| {
            process.landed |= process.owes;
            std::mem::take(&mut process.owes)
        };
        if self.report(key, self.gate, owed) == Some(true) {
            self.add_use(used_ns);
        }
    }

    fn add_use(&mut self, used_ns: u64) {
        let (longest, sum) = self.used_ns.unwrap_or((0, 0));
        self.used_ns = Some((longest.max(used_ns), sum.saturating_add(used_ns)));
    }

    /// A process that has not drained reports whether the GPU works for it. The result for the tenant: the
    /// GPU works for it if it works for any process, and waits if all that owe a drain wait.
    pub fn late(&mut self, key: u64, epoch: u32, works: bool) -> Option<bool> {
        let said = |process: &mut Process| {
            process.waits = process.owes && !works;
            process.owes
        };
        if self.report(key, Gate::Closed(epoch), said) != Some(true) {
            return None;
        }
        let all_wait = self.counts.wait == self.counts.owe;
        (works || !self.inherited && all_wait).then_some(works)
    }

    /// A process reports that it has nothing to do. True if all processes of the tenant have.
    pub fn idle(&mut self, key: u64, epoch: u32) -> bool {
        let idle = |process: &mut Process| {
            process.idle = true;
            true
        };
        self.report(key, Gate::Open(epoch), idle) == Some(true)
            && self.counts.idle == self.processes.len()
    }

    /// A process reports, at the closed gate, that its work stands still. Whether it has drained, with help.
    pub fn stands_still(&mut self, key: u64, epoch: u32) -> bool {
        let still = |process: &mut Process| {
            process.still = process.owes;
            process.owes
        };
        self.report(key, Gate::Closed(epoch), still) == Some(false)
    }

    /// Whether at least one process owes a drain and all that do stand still: what they have in flight may
    /// wait for other processes of the tenant.
    pub fn is_stuck(&self) -> bool {
        let Counts { owe, still, .. } = self.counts;
        owe > 0 && !self.inherited && owe == still
    }

    /// How long the tenant reports that it used the GPU before this closing, and in how many processes at
    /// once. Processes that use it one after the other use it longer than any of them; the caller bounds the
    /// effect.
    pub fn used(&self) -> Option<Used> {
        let (longest, sum) = self.used_ns?;
        let processes = sum.saturating_add(longest / 2) / longest.max(1);
        Some(Used { ns: longest, processes: u32::try_from(processes).unwrap_or(u32::MAX) })
    }

    /// Processes that have not drained.
    pub fn owing(&self) -> usize {
        self.counts.owe + usize::from(self.inherited)
    }

    /// Processes bound.
    pub fn len(&self) -> usize {
        self.processes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn two() -> DrainTracker {
        let mut drains = DrainTracker::new(1);
        drains.process_came(1);
        drains.process_came(2);
        drains
    }

    #[test]
    fn a_lease_ends_when_the_last_process_has_drained() {
        let mut drains = two();
        drains.close(5);
        assert_eq!(drains.owing(), 2);
        assert!(drains.drained(1, 5, 0) && !drains.drained(1, 5, 0), "once");
        assert_eq!(drains.owing(), 1);
        drains.process_left(2);
        assert_eq!(drains.owing(), 0, "the dead owe nothing");
    }

    #[test]
    fn a_tenant_used_the_gpu_as_long_as_the_longest_of_its_processes() {
        let mut drains = two();
        drains.close(5);
        assert_eq!(drains.used(), None);
        drains.drained(1, 5, 700);
        drains.drained(2, 4, 900);
        drains.drained(2, 5, 300);
        drains.drained(2, 5, 900);
        let used = |ns, processes| Some(Used { ns, processes });
        assert_eq!(drains.used(), used(700, 1), "what is ignored does not count");
        drains.close(6);
        assert_eq!(drains.used(), None);
        drains.drained(1, 6, 0);
        assert_eq!(drains.used(), used(0, 0));
        drains.drained(2, 6, 500);
        assert_eq!(drains.used(), used(500, 1));
        drains.close(7);
        drains.drained(1, 7, 700);
        drains.drained(2, 7, 600);
        assert_eq!(drains.used(), used(700, 2));
    }

    #[test]
    fn a_tenant_is_stuck_when_all_who_owe_stand_still() {
        let mut drains = two();
        drains.close(5);
        assert!(!drains.is_stuck());
        assert!(!drains.stands_still(1, 5) && !drains.is_stuck(), "the other may go on");
        assert!(!drains.stands_still(2, 4) && !drains.stands_still(3, 5));
        drains.drained(2, 5, 0);
        assert!(drains.is_stuck());
        assert!(drains.stands_still(2, 5), "it has drained");
        drains.close(6);
        assert!(!drains.is_stuck(), "another closing");
        drains.stands_still(1, 6);
        drains.stands_still(2, 6);
        assert!(drains.is_stuck());
        drains.drained(1, 6, 0);
        drains.drained(2, 6, 0);
        assert!(!drains.is_stuck(), "nobody owes");
    }

    #[test]
    fn a_tenant_waits_when_all_of_it_do_that_have_not_drained() {
        let mut drains = two();
        drains.close(5);
        assert_eq!(drains.late(1, 4, true), None, "of another epoch");
        assert_eq!(drains.late(9, 5, true), None, "not bound");
        assert_eq!(drains.late(1, 5, false), None, "the other may work");
        assert_eq!(drains.late(2, 5, true), Some(true));
        assert_eq!(drains.late(2, 5, false), Some(false));
        drains.drained(2, 5, 0);
        assert_eq!(drains.late(2, 5, true), None, "it has drained");
        assert_eq!(drains.late(1, 5, false), Some(false));
        drains.open(6);
        assert_eq!(drains.late(1, 6, true), None);
    }

    #[test]
    fn whoever_comes_to_a_closed_gate_owes_nothing() {
        let mut drains = DrainTracker::new(5);
        drains.process_came(1);
        assert_eq!(drains.owing(), 0);
        drains.close(6);
        assert_eq!(drains.owing(), 1);
    }

    #[test]
    fn a_tenant_is_idle_when_all_its_processes_are() {
        let mut drains = two();
        drains.open(7);
        assert!(!drains.idle(1, 7));
        assert!(!drains.idle(2, 6), "of an open gate before");
        assert!(drains.idle(2, 7));
        drains.open(8);
        assert!(!drains.idle(2, 8), "again in every epoch");
    }

    #[test]
    fn a_stranger_that_comes_owes_what_it_has_in_flight() {
        let mut drains = DrainTracker::new(1);
        drains.expect_inherited();
        drains.process_came(1);
        drains.process_came(1);
        assert_eq!(drains.owing(), 2, "itself, and those who may still come");
        drains.forget_inherited();
        assert_eq!(drains.owing(), 1);
        assert!(drains.drained(1, 1, 0));
        drains.process_came(2);
        assert_eq!(drains.owing(), 0, "nobody is a stranger any more");
    }

    #[test]
    fn a_stranger_that_never_drains_is_forgiven_but_no_lease_is() {
        let mut drains = DrainTracker::new(1);
        drains.expect_inherited();
        drains.process_came(1);
        drains.forget_inherited();
        drains.waive_inherited();
        assert_eq!(drains.owing(), 0);
        drains.open(2);
        drains.close(3);
        drains.waive_inherited();
        assert_eq!(drains.owing(), 1);
    }

    proptest! {
        #[test]
        fn the_count_is_that_of_the_processes(
            steps in prop::collection::vec((0u8..11, 0u64..4, 0u32..3), 0..200),
        ) {
            let mut drains = DrainTracker::new(0);
            for (what, key, epoch) in steps {
                match what {
                    0 => drains.process_came(key),
                    1 => drains.process_left(key),
                    2 => drains.close(epoch),
                    3 => drains.open(epoch),
                    4 => drains.expect_inherited(),
                    5 => drains.forget_inherited(),
                    6 if epoch == 0 => drains.waive_inherited(),
                    6 | 7 => _ = drains.idle(key, epoch),
                    8 => _ = drains.stands_still(key, epoch),
                    9 => _ = drains.late(key, epoch, key % 2 == 0),
                    _ => _ = drains.drained(key, epoch, 0),
                }
                let mut counts = Counts::default();
                drains.processes.values().for_each(|process| counts.add(*process));
                prop_assert_eq!(drains.counts, counts);
                let owing = drains.processes.values().filter(|process| process.owes).count();
                prop_assert_eq!(drains.owing(), owing + usize::from(drains.inherited));
            }
        }
    }
}
