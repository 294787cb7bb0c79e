//! Any sequence of what processes do, against a model that knows what should come of it.
//!
//! One thread plays all processes, so every answer is determined. Requests that only others' unsettled
//! reservations, or what is departing, keep from fitting would wait for those, so they are left out.

use proptest::prelude::*;

use super::tests::{Allocation, process};
use super::*;
use crate::usage::{Fate, SlotView, UsageFile};

const HOUR: Duration = Duration::from_secs(3600);
const KINDS: [Kind; 3] = [Kind::Plain, Kind::Vmm, Kind::Array];
/// Which shares each process has.
const SETS: [&[usize]; 4] = [&[0, 1, 2], &[0, 1], &[1, 2], &[0]];

#[derive(Clone, Debug)]
enum Step {
    Reserve(usize, u64),
    /// Settles the oldest reservation; more or less than was reserved, in percent.
    Commit(usize, u64),
    RollBack(usize),
    Release(usize, prop::sample::Index),
    Owe(usize, u64),
    Kill(usize),
    /// Somebody looks for dead processes.
    Recover,
    /// The driver has back what dead processes held, and somebody sees it.
    Departed,
    Limit(usize, u64),
    /// The plugin sees memory beyond the ledger.
    Overhead(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (process, share) = (0..SETS.len(), 0..3usize);
    prop_oneof![
        6 => (process.clone(), 0..700u64).prop_map(|(of, bytes)| Step::Reserve(of, bytes)),
        5 => (process.clone(), 0..200u64).prop_map(|(of, percent)| Step::Commit(of, percent)),
        1 => process.clone().prop_map(Step::RollBack),
        3 => (process.clone(), any::<prop::sample::Index>())
            .prop_map(|(of, which)| Step::Release(of, which)),
        1 => (process.clone(), 0..80u64).prop_map(|(of, bytes)| Step::Owe(of, bytes)),
        1 => process.prop_map(Step::Kill),
        1 => Just(Step::Recover),
        1 => Just(Step::Departed),
        1 => (share.clone(), 0..900u64).prop_map(|(of, bytes)| Step::Limit(of, bytes)),
        1 => (share, 0..700u64).prop_map(|(of, bytes)| Step::Overhead(of, bytes)),
    ]
}

/// What one process should hold.
struct Process {
    set: &'static [usize],
    account: Account,
    /// Reservations that the test has forgotten.
    reserved: Vec<u64>,
    granted: Vec<(u64, Kind)>,
}

impl Process {
    fn granted(&self) -> u64 {
        self.granted.iter().map(|(bytes, _)| bytes).sum()
    }

    fn charged(&self) -> u64 {
        self.granted() + self.reserved.iter().sum::<u64>()
    }

    /// Its slots' words: the share, granted bytes, and those reserved beside them.
    fn words(&self) -> impl Iterator<Item = (usize, u64, u64)> {
        self.account.shares().parts(0).iter().map(|&part| {
            let slot = self.account.slot(part);
            let granted = slot.granted[0].load(Ordering::Relaxed);
            let reserved = slot.charged[0].load(Ordering::Relaxed) - granted;
            (self.set[usize::from(part.share)], granted, reserved)
        })
    }

    fn kinds(&self) -> u64 {
        let words = self.account.slots.iter().flat_map(|slot| &slot.words().kinds);
        words.map(|word| word.load(Ordering::Relaxed)).sum()
    }

    /// The oldest reservation.
    fn next(&mut self) -> Option<Reservation<'_>> {
        let bytes = (!self.reserved.is_empty()).then(|| self.reserved.remove(0))?;
        Some(Reservation { account: &self.account, gpu: 0, bytes })
    }
}

struct Node {
    shares: [Allocation; 3],
    limits: [u64; 3],
    overheads: [u64; 3],
    processes: Vec<Process>,
}

impl Node {
    fn new() -> Self {
        let limits = [500, 300, 200];
        let shares = limits.map(|limit| Allocation::of(&[("GPU-0", limit)]));
        shares.iter().for_each(|share| share.quota.set_departure(HOUR));
        let mut node = Self { shares, limits, overheads: [0; 3], processes: Vec::new() };
        node.processes = SETS.iter().map(|set| node.start(set)).collect();
        node
    }

    fn start(&self, set: &'static [usize]) -> Process {
        let shares: Vec<_> = set.iter().map(|&share| &self.shares[share]).collect();
        Process { set, account: process(&shares), reserved: Vec::new(), granted: Vec::new() }
    }

    fn pages(&self) -> [UsageFile; 3] {
        self.shares.each_ref().map(|share| UsageFile::open(share.dir.path()).unwrap())
    }

    fn charged(&self) -> [u64; 3] {
        self.shares.each_ref().map(Allocation::charged)
    }

    /// What is granted to the living of each share.
    fn granted(&self) -> [u64; 3] {
        let mut all = [0; 3];
        for (share, granted, _) in self.processes.iter().flat_map(Process::words) {
            all[share] += granted;
        }
        all
    }

    /// Whether a process's request fits, beside what is granted; `None` where it would have to wait.
    fn fits(&self, process: usize, bytes: u64, granted: [u64; 3]) -> Option<bool> {
        let fits_beside = |used: [u64; 3]| {
            let limit = |share: usize| self.limits[share].saturating_sub(self.overheads[share]);
            let rooms = SETS[process].iter().map(|&share| limit(share).checked_sub(used[share]));
            rooms.flatten().reduce(|all, room| all + room).is_some_and(|room| bytes <= room)
        };
        match fits_beside(self.charged()) {
            true => Some(true),
            false => (!fits_beside(granted)).then_some(false),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_ends_as_the_model_says(steps in prop::collection::vec(step(), 1..80)) {
        let mut node = Node::new();
        let mut dead = 0;
        for step in steps {
            match step {
                Step::Reserve(at, bytes) => {
                    let Some(fits) = node.fits(at, bytes, node.granted()) else { continue };
                    let process = &mut node.processes[at];
                    match process.account.reserve(0, bytes) {
                        Ok(reservation) => {
                            prop_assert!(fits, "{bytes} granted");
                            core::mem::forget(reservation);
                            process.reserved.push(bytes);
                        }
                        Err(refused) => {
                            prop_assert!(!fits, "{refused:?}");
                            prop_assert_eq!(refused.reason, Reason::OverQuota);
                        }
                    }
                }
                Step::Commit(at, percent) => {
                    let Some(&reserved) = node.processes[at].reserved.first() else { continue };
                    let actual = reserved * percent / 100;
                    let (mut granted, mut left) = (node.granted(), reserved);
                    // It counts as granted while more is asked for.
                    for (share, _, reserved) in node.processes[at].words() {
                        let here = left.min(reserved);
                        granted[share] += here;
                        left -= here;
                    }
                    let fits = match actual.checked_sub(reserved) {
                        None | Some(0) => true,
                        Some(more) => match node.fits(at, more, granted) {
                            Some(fits) => fits,
                            None => continue,
                        },
                    };
                    let process = &mut node.processes[at];
                    let kind = KINDS[process.granted.len() % KINDS.len()];
                    let committed = process.next().unwrap().commit(actual, kind);
                    match committed.map_err(Refused::from) {
                        Ok(()) => {
                            prop_assert!(fits, "{actual} of {reserved} granted");
                            process.granted.push((actual, kind));
                        }
                        Err(refused) => prop_assert!(!fits, "{refused:?}"),
                    }
                }
                Step::RollBack(at) => drop(node.processes[at].next()),
                Step::Release(at, which) => {
                    let process = &mut node.processes[at];
                    if !process.granted.is_empty() {
                        let (bytes, kind) = process.granted.remove(which.index(process.granted.len()));
                        process.account.release(0, bytes, kind);
                    }
                }
                Step::Owe(at, bytes) => {
                    node.processes[at].account.owe(0, bytes, Kind::Async);
                    node.processes[at].granted.push((bytes, Kind::Async));
                }
                Step::Kill(at) => {
                    dead += node.processes[at].charged();
                    // Claims slots while its predecessor lives, so that those stay dead.
                    node.processes[at] = node.start(SETS[at]);
                }
                Step::Recover => {
                    for page in node.pages() {
                        prop_assert_eq!(page.bury(HOUR).unwrap().bytes[0], 0);
                    }
                }
                Step::Departed => {
                    for page in node.pages() {
                        page.bury(HOUR).unwrap();
                        let gone = |SlotView { index, claimed_ns, .. }| Fate {
                            slot: index, claimed_ns, gpu: 0, left: 0, seen: false,
                        };
                        let slots = page.snapshot().unwrap().slots.into_iter();
                        let fates: Vec<_> =
                            slots.filter(SlotView::is_departing).map(gone).collect();
                        dead -= page.settle(&fates).unwrap().bytes[0];
                    }
                    prop_assert_eq!(dead, 0);
                }
                Step::Limit(share, bytes) => {
                    node.limits[share] = bytes;
                    node.shares[share].quota.set_memory_limit(0, bytes);
                }
                Step::Overhead(share, bytes) => {
                    node.overheads[share] = bytes;
                    node.shares[share].quota.set_observed_overhead(0, bytes);
                }
            }
            let sum = |of: fn(&Process) -> u64| node.processes.iter().map(of).sum::<u64>();
            // The dead's bytes stay until the driver has them back, and no longer.
            prop_assert_eq!(node.charged().iter().sum::<u64>(), sum(Process::charged) + dead);
            prop_assert_eq!(node.granted().iter().sum::<u64>(), sum(Process::granted));
            prop_assert_eq!(sum(Process::kinds), sum(Process::granted));
        }
        node.processes.clear();
        for page in node.pages() {
            page.recover_dead().unwrap();
            prop_assert_eq!(page.snapshot().unwrap().slots.len(), 0);
        }
    }
}
