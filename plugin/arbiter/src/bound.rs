//! Which processes of a tenant must have drained before its lease has ended. Pure.
//!
//! A process is *bound* from its hello on. Each closing of the gate makes every bound process owe a
//! drain of that epoch; one that comes while the gate is closed owes nothing, because nothing passed
//! since, unless others than this arbiter may have let it in before. What a process says of another epoch is stale, or a lie, and changes nothing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::policy::Used;

/// What became of a `drained`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drain {
    /// It was owed.
    Counted,
    /// Of another epoch, of an open gate, from a process that is not bound, or said before.
    Ignored,
}

/// What became of a word that a process stands still at a closed gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Still {
    /// It owes a drain.
    Owes,
    /// It has drained, with help.
    Drained,
    /// Of another epoch, or from a process that is not bound.
    Ignored,
}

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
    /// It owes, and says that the GPU does not work for it.
    waits: bool,
}

/// One tenant's processes, by a key that is never used again.
#[derive(Debug)]
pub(super) struct Bound {
    processes: BTreeMap<u64, Process>,
    /// Processes nobody knows, from before this arbiter: they owe together.
    strangers: bool,
    /// The epoch that it began with: what is owed in it, strangers owe.
    first: u32,
    owing: usize,
    /// How long any says it used the GPU, of those who said so since the gate closed, nanoseconds: the
    /// longest, and the sum.
    used_ns: Option<(u64, u64)>,
    gate: Gate,
}

impl Bound {
    /// Nobody, at a gate that is closed in this epoch.
    pub fn new(epoch: u32) -> Self {
        let gate = Gate::Closed(epoch);
        Bound {
            processes: BTreeMap::new(),
            strangers: false,
            first: epoch,
            owing: 0,
            used_ns: None,
            gate,
        }
    }

    /// A process said hello. It owes this closing's drain where it may be one of the strangers.
    pub fn bind(&mut self, key: u64) {
        let owes = self.strangers && matches!(self.gate, Gate::Closed(_));
        if let Entry::Vacant(entry) = self.processes.entry(key) {
            entry.insert(Process { owes, ..Process::default() });
            self.owing += usize::from(owes);
        }
    }

    /// A process is dead, or has left.
    pub fn unbind(&mut self, key: u64) {
        if self.processes.remove(&key).is_some_and(|process| process.owes) {
            self.owing -= 1;
        }
    }

    /// The gate closed in a new epoch. All that are bound owe, until they say so.
    pub fn close(&mut self, epoch: u32) {
        self.gate = Gate::Closed(epoch);
        self.processes.values_mut().for_each(|p| *p = Process { owes: true, ..Process::default() });
        self.owing = self.processes.len() + usize::from(self.strangers);
        self.used_ns = None;
    }

    /// The gate opened, or is open in another way.
    pub fn open(&mut self, epoch: u32) {
        self.gate = Gate::Open(epoch);
        self.processes.values_mut().for_each(|p| *p = Process::default());
        self.strangers = false;
        self.owing = 0;
    }

    /// Somebody may still have work in flight who is not bound yet: another arbiter let it in.
    pub fn fear_strangers(&mut self) {
        self.owing += usize::from(!std::mem::replace(&mut self.strangers, true));
    }

    /// They had their time to come.
    pub fn forget_strangers(&mut self) {
        self.owing -= usize::from(std::mem::take(&mut self.strangers));
    }

    /// Strangers that came and have not drained had their time, too: nobody lent them what they use.
    pub fn forgive_strangers(&mut self) {
        if self.gate == Gate::Closed(self.first) {
            self.processes.values_mut().for_each(|process| process.owes = false);
            self.owing = usize::from(self.strangers);
        }
    }

    /// A process says that nothing of it is in flight.
    pub fn drained(&mut self, key: u64, epoch: u32, used_ns: u64) -> Drain {
        match self.processes.get_mut(&key) {
            Some(process) if process.owes && self.gate == Gate::Closed(epoch) => {
                process.owes = false;
                self.owing -= 1;
                let (longest, sum) = self.used_ns.unwrap_or((0, 0));
                self.used_ns = Some((longest.max(used_ns), sum.saturating_add(used_ns)));
                Drain::Counted
            }
            _ => Drain::Ignored,
        }
    }

    /// A process that has not drained says whether the GPU works for it. What that means for the tenant:
    /// it works for all if for any, and waits if all do who have not drained.
    pub fn late(&mut self, key: u64, epoch: u32, works: bool) -> Option<bool> {
        let process = self.processes.get_mut(&key)?;
        if !process.owes || self.gate != Gate::Closed(epoch) {
            return None;
        }
        process.waits = !works;
        let all_wait = || self.processes.values().all(|process| !process.owes || process.waits);
        (works || !self.strangers && all_wait()).then_some(works)
    }

    /// A process says that it has nothing to do. True if that holds for all of them now.
    pub fn idle(&mut self, key: u64, epoch: u32) -> bool {
        let Some(process) = self.processes.get_mut(&key) else { return false };
        process.idle = self.gate == Gate::Open(epoch);
        process.idle && self.processes.values().all(|process| process.idle)
    }

    /// A process says, at the closed gate, that nothing of it goes on.
    pub fn stands_still(&mut self, key: u64, epoch: u32) -> Still {
        match self.processes.get_mut(&key) {
            Some(process) if self.gate == Gate::Closed(epoch) => {
                process.still = process.owes;
                if process.owes { Still::Owes } else { Still::Drained }
            }
            _ => Still::Ignored,
        }
    }

    /// Whether somebody owes a drain, and all who do stand still: what they have in flight may wait for
    /// others of the tenant.
    pub fn is_stuck(&self) -> bool {
        let mut owing = self.processes.values().filter(|process| process.owes).peekable();
        owing.peek().is_some() && !self.strangers && owing.all(|process| process.still)
    }

    /// How long the tenant says it used the GPU before this closing, and in how many processes at once.
    /// Processes that use it one after the other use it longer than any of them: what is made of it is
    /// bounded.
    pub fn used(&self) -> Option<Used> {
        let (longest, sum) = self.used_ns?;
        let processes = sum.saturating_add(longest / 2) / longest.max(1);
        Some(Used { ns: longest, processes: u32::try_from(processes).unwrap_or(u32::MAX) })
    }

    /// Processes that have not drained.
    pub fn owing(&self) -> usize {
        self.owing
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

    fn two() -> Bound {
        let mut bound = Bound::new(1);
        bound.bind(1);
        bound.bind(2);
        bound
    }

    #[test]
    fn a_lease_ends_when_the_last_process_has_drained() {
        let mut bound = two();
        bound.close(5);
        assert_eq!(bound.owing(), 2);
        assert_eq!(bound.drained(1, 5, 0), Drain::Counted);
        assert_eq!(bound.drained(1, 5, 0), Drain::Ignored, "once");
        assert_eq!(bound.owing(), 1);
        bound.unbind(2);
        assert_eq!(bound.owing(), 0, "the dead owe nothing");
    }

    #[test]
    fn a_tenant_used_the_gpu_as_long_as_the_longest_of_its_processes() {
        let mut bound = two();
        bound.close(5);
        assert_eq!(bound.used(), None);
        bound.drained(1, 5, 700);
        bound.drained(2, 4, 900);
        bound.drained(2, 5, 300);
        bound.drained(2, 5, 900);
        let used = |ns, processes| Some(Used { ns, processes });
        assert_eq!(bound.used(), used(700, 1), "what is ignored does not count");
        bound.close(6);
        assert_eq!(bound.used(), None);
        bound.drained(1, 6, 0);
        assert_eq!(bound.used(), used(0, 0));
        bound.drained(2, 6, 500);
        assert_eq!(bound.used(), used(500, 1));
        bound.close(7);
        bound.drained(1, 7, 700);
        bound.drained(2, 7, 600);
        assert_eq!(bound.used(), used(700, 2));
    }

    #[test]
    fn a_tenant_is_stuck_when_all_who_owe_stand_still() {
        let mut bound = two();
        bound.close(5);
        assert!(!bound.is_stuck());
        assert_eq!(bound.stands_still(1, 5), Still::Owes);
        assert!(!bound.is_stuck(), "the other may go on");
        assert_eq!(bound.stands_still(2, 4), Still::Ignored);
        assert_eq!(bound.stands_still(3, 5), Still::Ignored);
        bound.drained(2, 5, 0);
        assert!(bound.is_stuck());
        assert_eq!(bound.stands_still(2, 5), Still::Drained);
        bound.close(6);
        assert!(!bound.is_stuck(), "another closing");
        bound.stands_still(1, 6);
        bound.stands_still(2, 6);
        assert!(bound.is_stuck());
        bound.drained(1, 6, 0);
        bound.drained(2, 6, 0);
        assert!(!bound.is_stuck(), "nobody owes");
    }

    #[test]
    fn lies_change_nothing() {
        let mut bound = two();
        bound.open(4);
        assert_eq!(bound.drained(1, 4, 0), Drain::Ignored, "the gate is not closed");
        bound.close(5);
        for (key, epoch) in [(1, 4), (1, 6), (9, 5)] {
            assert_eq!(bound.drained(key, epoch, 0), Drain::Ignored);
        }
        assert_eq!(bound.owing(), 2);
        assert!(!bound.idle(1, 5), "closed is not idle");
    }

    #[test]
    fn a_tenant_waits_when_all_of_it_do_that_have_not_drained() {
        let mut bound = two();
        bound.close(5);
        assert_eq!(bound.late(1, 4, true), None, "of another epoch");
        assert_eq!(bound.late(9, 5, true), None, "not bound");
        assert_eq!(bound.late(1, 5, false), None, "the other may work");
        assert_eq!(bound.late(2, 5, true), Some(true));
        assert_eq!(bound.late(2, 5, false), Some(false));
        bound.drained(2, 5, 0);
        assert_eq!(bound.late(2, 5, true), None, "it has drained");
        assert_eq!(bound.late(1, 5, false), Some(false));
        bound.open(6);
        assert_eq!(bound.late(1, 6, true), None);
    }

    #[test]
    fn whoever_comes_to_a_closed_gate_owes_nothing() {
        let mut bound = Bound::new(5);
        bound.bind(1);
        assert_eq!(bound.owing(), 0);
        bound.close(6);
        assert_eq!(bound.owing(), 1);
    }

    #[test]
    fn a_tenant_is_idle_when_all_its_processes_are() {
        let mut bound = two();
        bound.open(7);
        assert!(!bound.idle(1, 7));
        assert!(!bound.idle(2, 6), "of an open gate before");
        assert!(bound.idle(2, 7));
        bound.open(8);
        assert!(!bound.idle(2, 8), "anew in every epoch");
    }

    #[test]
    fn strangers_are_waited_for_until_they_are_forgotten() {
        let mut bound = Bound::new(1);
        bound.fear_strangers();
        bound.fear_strangers();
        assert_eq!(bound.owing(), 1);
        bound.forget_strangers();
        bound.forget_strangers();
        assert_eq!(bound.owing(), 0);
    }

    #[test]
    fn a_stranger_that_comes_owes_what_it_has_in_flight() {
        let mut bound = Bound::new(1);
        bound.fear_strangers();
        bound.bind(1);
        bound.bind(1);
        assert_eq!(bound.owing(), 2, "itself, and those who may still come");
        bound.forget_strangers();
        assert_eq!(bound.owing(), 1);
        assert_eq!(bound.drained(1, 1, 0), Drain::Counted);
        bound.bind(2);
        assert_eq!(bound.owing(), 0, "nobody is a stranger any more");
    }

    #[test]
    fn a_stranger_that_never_drains_is_forgiven_but_no_lease_is() {
        let mut bound = Bound::new(1);
        bound.fear_strangers();
        bound.bind(1);
        bound.forget_strangers();
        bound.forgive_strangers();
        assert_eq!(bound.owing(), 0);
        bound.open(2);
        bound.close(3);
        bound.forgive_strangers();
        assert_eq!(bound.owing(), 1);
    }

    proptest! {
        #[test]
        fn the_count_is_that_of_the_processes(
            steps in prop::collection::vec((0u8..8, 0u64..4, 0u32..3), 0..200),
        ) {
            let mut bound = Bound::new(0);
            for (what, key, epoch) in steps {
                match what {
                    0 => bound.bind(key),
                    1 => bound.unbind(key),
                    2 => bound.close(epoch),
                    3 => bound.open(epoch),
                    4 => bound.fear_strangers(),
                    5 => bound.forget_strangers(),
                    6 if epoch == 0 => bound.forgive_strangers(),
                    6 => drop(bound.idle(key, epoch)),
                    _ => drop(bound.drained(key, epoch, 0)),
                }
                let owing = bound.processes.values().filter(|process| process.owes).count();
                prop_assert_eq!(bound.owing(), owing + usize::from(bound.strangers));
            }
        }
    }
}
