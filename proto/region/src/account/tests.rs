use std::time::Instant;

use tempfile::TempDir;

use super::*;
use crate::quota::{self, GpuQuota, Policy, QuotaReader, QuotaSpec, QuotaWriter};
use crate::share::Share;
use crate::usage::{self, SlotView, Snapshot, UsageFile, UsageMap};

impl Account {
    /// Bytes that all processes of the tenant have charged on a GPU of one share, unsettled requests and what is
    /// departing included.
    pub(crate) fn charged_total(&self, gpu: usize) -> u64 {
        let of = |&part: &Part| self.shares.share(part).usage.charged_total(part.gpu.into());
        self.shares.parts(gpu).iter().map(of).sum()
    }

    /// Bytes that this process has been granted.
    fn granted_here(&self, gpu: usize) -> u64 {
        let granted = |&part: &Part| &self.slot(part).granted[usize::from(part.gpu)];
        self.shares.parts(gpu).iter().map(|part| granted(part).load(Ordering::Relaxed)).sum()
    }
}

/// One allocation.
pub(super) struct Allocation {
    pub dir: TempDir,
    pub quota: QuotaWriter,
}

impl Allocation {
    /// Of these GPUs with these limits.
    pub fn of(gpus: &[(&str, u64)]) -> Self {
        Self::with(gpus, Policy::None)
    }

    pub fn with(gpus: &[(&str, u64)], policy: Policy) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let gpu = |&(uuid, memory_limit_bytes): &(&str, u64)| GpuQuota {
            uuid: uuid.into(),
            memory_limit_bytes,
            context_overhead_bytes: 0,
            cores_millis: 500,
            policy,
        };
        let gpus = gpus.iter().map(gpu).collect();
        let spec = QuotaSpec { allocation: "a".into(), generation: 1, gpus };
        let quota = quota::create(dir.path(), &spec).unwrap();
        quota.set_departure(Duration::from_micros(1));
        usage::create(dir.path(), 1).unwrap();
        Self { dir, quota }
    }

    pub fn share(&self) -> Share {
        let quota = QuotaReader::attach(self.dir.path()).unwrap();
        Share { quota, usage: UsageMap::attach(self.dir.path()).unwrap() }
    }

    fn process(&self) -> Account {
        process(&[self])
    }

    /// What the plugin sees, after its own checks.
    pub fn seen(&self) -> Snapshot {
        UsageFile::open(self.dir.path()).unwrap().snapshot().unwrap()
    }

    /// Bytes of the first GPU, over all processes.
    pub fn charged(&self) -> u64 {
        self.seen().charged(0)
    }

    /// Bytes of all kinds.
    pub fn kinds(&self) -> u64 {
        self.seen().slots.iter().flat_map(|slot| slot.kinds).sum()
    }

    /// The slot's words.
    fn slot(&self, account: &Account) -> SlotView {
        self.seen().slots.into_iter().find(|slot| slot.index == account.slot_index()).unwrap()
    }
}

/// A process that has all of these.
pub(super) fn process(allocations: &[&Allocation]) -> Account {
    let shares = allocations.iter().map(|allocation| allocation.share()).collect();
    Account::claim(ShareSet::new(shares).unwrap()).unwrap()
}

/// One GPU with a limit of 1000 bytes, one with 10.
fn tenant() -> Allocation {
    Allocation::of(&[("GPU-0", 1000), ("GPU-1", 10)])
}

pub(super) fn take(account: &Account, gpu: usize, bytes: u64) -> Result<(), Reason> {
    let reservation = account.reserve(gpu, bytes).map_err(|refused| refused.reason)?;
    reservation.commit(bytes, Kind::Plain).map_err(|overrun| overrun.refused.reason)
}

#[test]
fn observed_overhead_takes_from_what_may_be_charged_and_gives_it_back() {
    let tenant = tenant();
    let account = tenant.process();
    take(&account, 0, 600).unwrap();
    tenant.quota.set_observed_overhead(0, 300);
    let refused = account.reserve(0, 101).unwrap_err();
    assert_eq!((refused.granted, refused.overhead, refused.used()), (600, 300, 900));
    take(&account, 0, 100).unwrap();
    // More is seen than is left: nothing is taken back, and nothing given.
    tenant.quota.set_observed_overhead(0, 5000);
    assert_eq!(take(&account, 0, 1), Err(Reason::OverQuota));
    account.release(0, 100, Kind::Plain);
    assert_eq!(take(&account, 0, 1), Err(Reason::OverQuota));
    tenant.quota.set_observed_overhead(0, 0);
    take(&account, 0, 400).unwrap();
    // The other GPU has its own.
    tenant.quota.set_observed_overhead(1, 4);
    assert_eq!(take(&account, 1, 7), Err(Reason::OverQuota));
    take(&account, 1, 6).unwrap();
}

#[test]
fn a_refusal_tells_what_is_granted_and_not_what_others_are_asking_for() {
    let tenant = tenant();
    let (one, two) = (tenant.process(), tenant.process());
    take(&one, 0, 600).unwrap();
    let under_way = one.reserve(0, 399).unwrap();
    let refused = two.reserve(0, 500).unwrap_err();
    assert_eq!((refused.granted, refused.used()), (600, 600));
    drop(under_way);
}

#[test]
fn what_the_driver_gave_over_the_quota_stays_charged_until_it_is_freed() {
    let tenant = tenant();
    let account = tenant.process();
    take(&account, 0, 800).unwrap();
    let overrun = account.reserve(0, 150).unwrap().commit(250, Kind::Plain).unwrap_err();
    assert_eq!((overrun.refused.reason, overrun.refused.bytes), (Reason::OverQuota, 100));
    assert_eq!((account.charged_total(0), account.granted_here(0)), (950, 800));
    // Here the caller frees.
    drop(overrun);
    assert_eq!((account.charged_total(0), account.granted_here(0)), (800, 800));
}

#[test]
fn absurd_requests_and_releases_do_no_harm() {
    let tenant = tenant();
    let account = tenant.process();
    take(&account, 0, 10).unwrap();
    for bytes in [1001, crate::layout::MAX_BYTES, u64::MAX - 9, u64::MAX] {
        assert_eq!(take(&account, 0, bytes), Err(Reason::OverQuota));
    }
    assert_eq!(account.charged_total(0), 10);
    account.release(0, u64::MAX, Kind::Plain);
    assert_eq!(account.charged_total(0), 0);
    take(&account, 0, 1000).unwrap();
}

#[test]
fn who_fits_waits_for_an_unsettled_request() {
    let tenant = tenant();
    let (one, two) = (tenant.process(), tenant.process());
    // The driver refuses the first: the second is granted.
    let unsettled = one.reserve(0, 600).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| take(&two, 0, 600));
        while two.charged_total(0) <= 600 && !waiting.is_finished() {
            std::thread::yield_now();
        }
        drop(unsettled);
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    two.release(0, 600, Kind::Plain);
    // The driver grants it: the second is refused.
    let unsettled = one.reserve(0, 600).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| take(&two, 0, 600));
        while two.charged_total(0) <= 600 && !waiting.is_finished() {
            std::thread::yield_now();
        }
        unsettled.commit(600, Kind::Plain).unwrap();
        assert_eq!(waiting.join().unwrap(), Err(Reason::OverQuota));
    });
}

#[test]
fn a_request_that_never_settles_is_waited_for_but_not_for_ever() {
    let tenant = tenant();
    let (stopped, other) = (tenant.process(), tenant.process());
    let _unsettled = stopped.reserve(0, 600).unwrap();
    let start = Instant::now();
    let refused = other.reserve(0, 600).unwrap_err();
    assert_eq!(refused.reason, Reason::Contended);
    assert!(start.elapsed() >= PATIENCE && start.elapsed() < PATIENCE * 3);
    assert_eq!(other.charged_total(0), 600);
    take(&other, 0, 400).unwrap();
}

#[test]
fn settling_up_at_the_same_time_is_no_deadlock() {
    let tenant = tenant();
    let (one, two) = (tenant.process(), tenant.process());
    let start = Instant::now();
    for _ in 0..50 {
        let both = [&one, &two].map(|account| (account, account.reserve(0, 490).unwrap()));
        // 980 are granted, and each asks for 15 more: room for one.
        let granted = std::thread::scope(|scope| {
            let threads = both.map(|(account, reservation)| {
                scope.spawn(move || match reservation.commit(505, Kind::Plain) {
                    Ok(()) => Some(account),
                    Err(overrun) => {
                        assert_eq!(overrun.refused.reason, Reason::OverQuota);
                        None
                    }
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let granted: Vec<&Account> = granted.into_iter().flatten().collect();
        // A refused request may have been so before the other's reservation was given back.
        assert!(!granted.is_empty());
        for account in granted {
            account.release(0, 505, Kind::Plain);
        }
        assert_eq!(one.charged_total(0), 0);
    }
    assert!(start.elapsed() < PATIENCE, "some waited for each other");
}

#[test]
fn statistics_reach_the_plugin() {
    let tenant = tenant();
    let account = tenant.process();
    account.count_driver_refusal(0);
    for shard in account.launches().iter().cycle().take(20) {
        shard.fetch_add(1, Ordering::Relaxed);
    }
    account.add_gate_wait(5);
    account.add_gpu_time(6);
    let slot = tenant.slot(&account);
    assert_eq!((slot.did.driver_refusals, slot.did.launches), (1, 20));
    assert_eq!((slot.did.gate_wait_ns, slot.did.gpu_time_ns), (5, 6));
}
