//! Allocation and release at random, processes killed at random, and a driver that counts.
//!
//! The stand-in for the driver takes a lock that the kernel releases at death, so that its sum is
//! exact. A process that is about to be killed is left out of it: the moment it is dead its bytes
//! may be anybody's.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tessera_region::account::{Account, Reason};
use tessera_region::layout::Kind;

use crate::support::{Pages, Random, Tenant, account, shared, wait_until};

const PROCESSES: usize = 16;
const THREADS: usize = 4;
const LIMIT: u64 = 1 << 30;
/// Allocations that a thread holds at most; half of them, with the sizes below, are more than fits.
const HELD: usize = 6;
const LARGEST: u64 = LIMIT / 80;
const TIME: Duration = Duration::from_secs(5);

struct Control {
    stop: AtomicU32,
    dying: [AtomicU32; PROCESSES],
    /// What the driver has given to each thread.
    given: [AtomicU64; PROCESSES * THREADS],
    most_given: AtomicU64,
    allocations: AtomicU64,
    refused: AtomicU64,
    contended: AtomicU64,
    stopped: [AtomicU32; PROCESSES],
}

pub fn child(dir: &Path, process: usize) {
    let control: &Control = shared(dir);
    let account = account(dir);
    std::thread::scope(|scope| {
        for id in process * THREADS..(process + 1) * THREADS {
            let account = &account;
            scope.spawn(move || churn(control, account, dir, id));
        }
    });
    // Its bytes are left to the process that recovers them, when nobody allocates any more: the driver's sum
    // would count them twice.
    control.stopped[process].store(1, SeqCst);
    wait_until("all have stopped", || control.stop.load(SeqCst) == 2);
}

fn churn(control: &Control, account: &Account, dir: &Path, id: usize) {
    let driver = File::open(dir.join("driver")).unwrap();
    let mut random = Random::new(id ^ usize::try_from(std::process::id()).unwrap() << 8);
    let mut held = Vec::with_capacity(HELD);
    while control.stop.load(SeqCst) == 0 {
        if held.len() == HELD || (!held.is_empty() && random.below(2) == 0) {
            let index = usize::try_from(random.below(held.len() as u64)).unwrap();
            let bytes = held.swap_remove(index);
            control.given[id].fetch_sub(bytes, SeqCst);
            account.release(0, bytes, Kind::Plain);
            continue;
        }
        // The driver takes less than was reserved, or as much, or more.
        let bytes = 1 + random.below(LARGEST);
        let actual = bytes - bytes / 10 + random.below(bytes / 5 + 1);
        match account.reserve(0, bytes) {
            Ok(reservation) => {
                if actual <= bytes {
                    give(control, &driver, id, actual);
                    reservation.commit(actual, Kind::Plain).unwrap();
                    held.push(actual);
                } else if reservation.commit(actual, Kind::Plain).is_ok() {
                    give(control, &driver, id, actual);
                    held.push(actual);
                }
            }
            Err(refused) => {
                let counter = match refused.reason {
                    Reason::OverQuota => &control.refused,
                    Reason::Contended | Reason::Departing => &control.contended,
                };
                counter.fetch_add(1, SeqCst);
            }
        }
    }
}

fn give(control: &Control, driver: &File, id: usize, bytes: u64) {
    driver.lock().unwrap();
    control.given[id].fetch_add(bytes, SeqCst);
    let alive = |id: &usize| control.dying[id / THREADS].load(SeqCst) == 0;
    let ids = (0..PROCESSES * THREADS).filter(alive);
    let total = ids.map(|id| control.given[id].load(SeqCst)).sum();
    control.most_given.fetch_max(total, SeqCst);
    driver.unlock().unwrap();
    control.allocations.fetch_add(1, SeqCst);
}

pub fn run() -> String {
    let pages = Pages::new(LIMIT);
    let driver = File::create_new(pages.dir.path().join("driver")).unwrap();
    let control: &Control = shared(pages.dir.path());
    let mut tenants: Vec<Tenant> =
        (0..PROCESSES).map(|process| pages.spawn("churn", process)).collect();
    let mut random = Random::new(1234);
    let usage = pages.usage();
    let (mut kills, start) = (0, Instant::now());
    while start.elapsed() < TIME {
        std::thread::sleep(Duration::from_micros(5_000 + random.below(30_000)));
        let victim = usize::try_from(random.below(PROCESSES as u64)).unwrap();
        control.dying[victim].store(1, SeqCst);
        tenants[victim].kill();
        kills += 1;
        driver.lock().unwrap();
        for given in &control.given[victim * THREADS..(victim + 1) * THREADS] {
            given.store(0, SeqCst);
        }
        control.dying[victim].store(0, SeqCst);
        driver.unlock().unwrap();
        tenants[victim] = pages.spawn("churn", victim);
        // Whatever moment it is, and wherever a process died, this is no tampering.
        usage.snapshot().unwrap();
    }
    control.stop.store(1, SeqCst);
    wait_until("all have stopped", || {
        control.stopped.iter().all(|stopped| stopped.load(SeqCst) == 1)
    });
    control.stop.store(2, SeqCst);
    assert!(tenants.iter_mut().all(Tenant::succeeded));

    let most = control.most_given.load(SeqCst);
    assert!(most <= LIMIT, "{} bytes over", most - LIMIT);
    assert!(most > LIMIT - LARGEST, "the limit was never near: {most} of {LIMIT}");
    assert_eq!(control.contended.load(SeqCst), 0);
    // All are dead, so all of the limit is free, to the byte.
    let survivor = pages.account();
    survivor.reserve(0, LIMIT).unwrap().commit(LIMIT, Kind::Plain).unwrap();
    format!(
        "{} granted, {} refused, {kills} killed, at most {} bytes short of the limit: 0 over, 0 lost",
        control.allocations.load(SeqCst),
        control.refused.load(SeqCst),
        LIMIT - most
    )
}
