//! Rounds in which all threads of all processes ask at once, and release at the end.
//!
//! Nothing is released within a round, so what is granted only grows, and a refusal was right if
//! and only if the request does not fit beside what is granted when all have their answers.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tessera_region::account::{Account, Reason};
use tessera_region::layout::Kind;

use crate::support::{Pages, Random, Tenant, account, shared, wait_until};

const PROCESSES: usize = 16;
const THREADS: usize = 4;
const LIMIT: u64 = 1 << 30;
const TIME: Duration = Duration::from_secs(5);
/// Rounds from one with kills to the next.
const KILLING: u32 = 5;

struct Control {
    /// Threads ask when it changes; `u32::MAX` ends.
    round: AtomicU32,
    /// Threads release when it reaches the round.
    release: AtomicU32,
    /// Bytes to ask for.
    ask: [AtomicU64; PROCESSES * THREADS],
    /// The round of the last answer.
    answered: [AtomicU32; PROCESSES * THREADS],
    /// One of the constants below.
    answer: [AtomicU32; PROCESSES * THREADS],
    /// The last round whose end the thread has reached.
    ended: [AtomicU32; PROCESSES * THREADS],
    ready: [AtomicU32; PROCESSES],
}

const GRANTED: u32 = 1;
const OVER_QUOTA: u32 = 2;
const CONTENDED: u32 = 3;

pub fn child(dir: &Path, process: usize) {
    let control: &Control = shared(dir);
    let account = account(dir);
    let first = control.round.load(SeqCst);
    std::thread::scope(|scope| {
        for id in process * THREADS..(process + 1) * THREADS {
            let account = &account;
            scope.spawn(move || ask(control, account, id, first));
        }
        control.ready[process].fetch_add(1, SeqCst);
    });
}

fn ask(control: &Control, account: &Account, id: usize, mut round: u32) {
    let mut random = Random::new(id);
    loop {
        while control.round.load(SeqCst) == round {
            std::thread::yield_now();
        }
        round = control.round.load(SeqCst);
        if round == u32::MAX {
            return;
        }
        let bytes = control.ask[id].load(SeqCst);
        let answer = match account.reserve(0, bytes) {
            Ok(reservation) => {
                // The driver's part.
                std::thread::sleep(Duration::from_micros(random.below(60)));
                reservation.commit(bytes, Kind::Plain).unwrap();
                GRANTED
            }
            Err(refused) if refused.reason == Reason::OverQuota => OVER_QUOTA,
            Err(_) => CONTENDED,
        };
        control.answer[id].store(answer, SeqCst);
        control.answered[id].store(round, SeqCst);
        while control.release.load(SeqCst) != round {
            std::thread::sleep(Duration::from_micros(50));
        }
        if answer == GRANTED {
            account.release(0, bytes, Kind::Plain);
        }
        control.ended[id].store(round, SeqCst);
    }
}

/// Requests of all threads: mixtures around the limit, some that all fit, some of which one does.
fn asks(random: &mut Random) -> [u64; PROCESSES * THREADS] {
    let threads = (PROCESSES * THREADS) as u64;
    let fair = LIMIT / threads;
    match random.below(4) {
        0 => [fair; PROCESSES * THREADS],
        1 => [LIMIT / 2 + 1; PROCESSES * THREADS],
        2 => std::array::from_fn(|_| 1 + random.below(fair * 2 + fair / 8)),
        _ => std::array::from_fn(|_| 1 + random.below(LIMIT / 8)),
    }
}

pub fn run() -> String {
    let pages = Pages::new(LIMIT);
    let control: &Control = shared(pages.dir.path());
    let spawn = |process: usize| {
        let before = control.ready[process].load(SeqCst);
        let tenant = pages.spawn("rounds", process);
        wait_until("it is ready", || control.ready[process].load(SeqCst) > before);
        tenant
    };
    let mut tenants: Vec<Tenant> = (0..PROCESSES).map(spawn).collect();
    let usage = pages.usage();
    let mut random = Random::new(4711);
    let (mut round, mut kills, mut granted_requests, mut refused_requests) = (0, 0, 0, 0);
    let start = Instant::now();
    // Fewer would mean too little, however long they take here.
    while start.elapsed() < TIME || round < 50 {
        round += 1;
        let asks = asks(&mut random);
        for (ask, bytes) in control.ask.iter().zip(asks) {
            ask.store(bytes, SeqCst);
        }
        control.round.store(round, SeqCst);
        let mut dead = [false; PROCESSES];
        if round % KILLING == 0 {
            for _ in 0..2 {
                std::thread::sleep(Duration::from_micros(random.below(400)));
                let victim = usize::try_from(random.below(PROCESSES as u64)).unwrap();
                if !dead[victim] {
                    tenants[victim].kill();
                    dead[victim] = true;
                    kills += 1;
                }
            }
        }
        let alive = |id: &usize| !dead[id / THREADS];
        let living: Vec<usize> = (0..PROCESSES * THREADS).filter(alive).collect();
        wait_until("all have an answer", || {
            living.iter().all(|&id| control.answered[id].load(SeqCst) == round)
        });
        let answer = |id: usize| control.answer[id].load(SeqCst);
        let of_living = |wanted| living.iter().filter(move |&&id| answer(id) == wanted);
        let granted: u64 = of_living(GRANTED).map(|&id| asks[id]).sum();
        assert!(granted <= LIMIT, "round {round}: {} bytes over", granted - LIMIT);
        // The killed may have been granted theirs before.
        let by_dead: u64 = (0..asks.len()).filter(|id| !alive(id)).map(|id| asks[id]).sum();
        for &id in of_living(OVER_QUOTA) {
            assert!(
                granted + by_dead + asks[id] > LIMIT,
                "round {round}: {} of {LIMIT} bytes refused with {granted} granted",
                asks[id]
            );
        }
        assert_eq!(of_living(CONTENDED).count(), 0, "round {round}");
        granted_requests += of_living(GRANTED).count();
        refused_requests += of_living(OVER_QUOTA).count();

        control.release.store(round, SeqCst);
        wait_until("all have released", || {
            living.iter().all(|&id| control.ended[id].load(SeqCst) == round)
        });
        usage.recover_dead().unwrap();
        assert_eq!(usage.snapshot().unwrap().charged(0), 0, "round {round}");
        for process in (0..PROCESSES).filter(|&process| dead[process]) {
            tenants[process] = spawn(process);
        }
    }
    control.round.store(u32::MAX, SeqCst);
    assert!(tenants.iter_mut().all(Tenant::succeeded));
    format!(
        "{round} rounds, {granted_requests} granted, {refused_requests} refused, {kills} killed: \
         0 bytes over, 0 false refusals"
    )
}
