//! Any sequence of what processes do, against a model that knows what should come of it.
//!
//! One thread plays all processes, so every answer is determined. Requests that only another
//! process's unsettled reservation keeps from fitting would wait for it, so they are left out.

use std::mem::ManuallyDrop;
use std::time::Duration;

use proptest::prelude::*;
use tessera_region::account::{Account, Reason, Reservation};
use tessera_region::layout::Kind;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaReader, QuotaSpec};
use tessera_region::usage::{self, Fate, UsageFile, UsageMap};

const PROCESSES: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        process: usize,
        bytes: u64,
    },
    /// Settles the oldest reservation; more or less than was reserved, in percent.
    Commit {
        process: usize,
        percent: u64,
    },
    RollBack {
        process: usize,
    },
    Release {
        process: usize,
    },
    Kill {
        process: usize,
    },
    /// Somebody looks for dead processes.
    Recover,
    /// The driver has back what dead processes held, and somebody sees it.
    Departed,
    Limit {
        bytes: u64,
    },
    /// The plugin sees memory beyond the ledger.
    Overhead {
        bytes: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0..PROCESSES;
    prop_oneof![
        6 => (process.clone(), 0..700u64)
            .prop_map(|(process, bytes)| Step::Reserve { process, bytes }),
        5 => (process.clone(), 50..130u64)
            .prop_map(|(process, percent)| Step::Commit { process, percent }),
        1 => process.clone().prop_map(|process| Step::RollBack { process }),
        3 => process.clone().prop_map(|process| Step::Release { process }),
        1 => process.prop_map(|process| Step::Kill { process }),
        1 => Just(Step::Recover),
        1 => Just(Step::Departed),
        1 => (0..2000u64).prop_map(|bytes| Step::Limit { bytes }),
        1 => (0..1500u64).prop_map(|bytes| Step::Overhead { bytes }),
    ]
}

/// What one process should hold. Its account is leaked with the reservations that borrow it, and
/// dropped by hand when the process "dies".
struct Process {
    account: *mut Account,
    reserved: Vec<ManuallyDrop<Reservation<'static>>>,
    granted: Vec<u64>,
}

impl Process {
    fn start(dir: &std::path::Path) -> Self {
        let usage = UsageMap::attach(dir).unwrap();
        let slot = usage.claim().unwrap();
        let account = Account::new(QuotaReader::attach(dir).unwrap(), usage, slot);
        let account = Box::into_raw(Box::new(account));
        Self { account, reserved: Vec::new(), granted: Vec::new() }
    }

    fn account(&self) -> &'static Account {
        // SAFETY: lives until `kill`, which consumes the only holder of such references.
        unsafe { &*self.account }
    }

    /// Ends it as SIGKILL does: nothing is given back, the lock goes with the mapping.
    fn kill(self) {
        // SAFETY: made by `Box::into_raw`; the reservations are never used or dropped again.
        drop(unsafe { Box::from_raw(self.account) });
    }

    fn granted(&self) -> u64 {
        self.granted.iter().sum()
    }

    fn charged(&self) -> u64 {
        self.granted() + self.reserved.iter().map(|reservation| reservation.bytes()).sum::<u64>()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_ends_as_the_model_says(steps in prop::collection::vec(step(), 1..80)) {
        let dir = tempfile::tempdir().unwrap();
        let gpu = GpuQuota {
            uuid: "GPU-0".into(),
            memory_limit_bytes: 1000,
            context_overhead_bytes: 0,
            cores_millis: 1000,
            policy: Policy::None,
        };
        let spec = QuotaSpec { allocation: "a".into(), generation: 1, gpus: vec![gpu] };
        let writer = quota::create(dir.path(), &spec).unwrap();
        usage::create(dir.path(), 1).unwrap();
        let page = UsageFile::open(dir.path()).unwrap();
        let (mut quota, mut overhead) = (1000u64, 0u64);
        let mut dead = 0;
        let mut processes: Vec<Process> =
            (0..PROCESSES).map(|_| Process::start(dir.path())).collect();

        for step in steps {
            let limit = quota.saturating_sub(overhead);
            // What the driver holds, or will have to, if all calls under way succeed.
            let charged: u64 = processes.iter().map(Process::charged).sum::<u64>() + dead;
            let granted: u64 = processes.iter().map(Process::granted).sum();
            match step {
                Step::Reserve { process, bytes } => {
                    let fits = charged + bytes <= limit;
                    if !fits && granted + bytes <= limit {
                        continue;
                    }
                    let process = &mut processes[process];
                    match process.account().reserve(0, bytes) {
                        Ok(reservation) => {
                            prop_assert!(fits, "{bytes} granted beside {charged} of {limit}");
                            process.reserved.push(ManuallyDrop::new(reservation));
                        }
                        Err(refused) => {
                            prop_assert!(!fits, "{refused}");
                            prop_assert_eq!(refused.reason, Reason::OverQuota);
                        }
                    }
                }
                Step::Commit { process, percent } => {
                    let process = &mut processes[process];
                    if process.reserved.is_empty() {
                        continue;
                    }
                    let reserved = process.reserved[0].bytes();
                    let actual = reserved * percent / 100;
                    let more = actual.saturating_sub(reserved);
                    let fits = charged + more <= limit;
                    if more > 0 && !fits && granted + reserved + more <= limit {
                        continue;
                    }
                    let reservation = ManuallyDrop::into_inner(process.reserved.remove(0));
                    match reservation.commit(actual, Kind::Plain) {
                        Ok(()) => {
                            prop_assert!(more == 0 || fits);
                            process.granted.push(actual);
                        }
                        Err(overrun) => prop_assert!(!fits, "{}", overrun.refused),
                    }
                }
                Step::RollBack { process } => {
                    if let Some(reservation) = processes[process].reserved.pop() {
                        drop(ManuallyDrop::into_inner(reservation));
                    }
                }
                Step::Release { process } => {
                    let process = &mut processes[process];
                    if let Some(bytes) = process.granted.pop() {
                        process.account().release(0, bytes, Kind::Plain);
                    }
                }
                Step::Kill { process } => {
                    dead += processes[process].charged();
                    // Claims a slot while its predecessor lives, so that one stays dead.
                    let next = Process::start(dir.path());
                    std::mem::replace(&mut processes[process], next).kill();
                }
                Step::Recover => {
                    prop_assert_eq!(page.bury(Duration::from_secs(3600)).unwrap().bytes[0], 0);
                }
                Step::Departed => {
                    page.bury(Duration::from_secs(3600)).unwrap();
                    let slots = page.snapshot().unwrap().slots;
                    let departing = slots.iter().filter(|slot| slot.is_departing());
                    let fates: Vec<_> = departing
                        .map(|slot| Fate {
                            slot: slot.index,
                            claimed_ns: slot.claimed_ns,
                            gpu: 0,
                            left: 0,
                            seen: false,
                        })
                        .collect();
                    prop_assert_eq!(page.settle(&fates).unwrap().bytes[0], dead);
                    dead = 0;
                }
                Step::Limit { bytes } => {
                    quota = bytes;
                    writer.set_memory_limit(0, bytes);
                }
                Step::Overhead { bytes } => {
                    overhead = bytes;
                    writer.set_observed_overhead(0, bytes);
                }
            }
            let snapshot = page.snapshot().unwrap();
            let charged: u64 = processes.iter().map(Process::charged).sum();
            let granted: u64 = processes.iter().map(Process::granted).sum();
            // The dead's bytes stay until the driver has them back, and no longer.
            prop_assert_eq!(snapshot.charged(0), charged + dead, "{:?}", snapshot);
            prop_assert!(snapshot.granted(0) - granted <= dead, "{snapshot:?}");
        }
        for process in processes {
            process.kill();
        }
        page.recover_dead().unwrap();
        prop_assert_eq!(page.snapshot().unwrap().slots.len(), 0);
    }
}
