//! What the accounting costs, in nanoseconds per operation, as medians over batches:
//!
//! - reserve + commit + release, alone and among 16 claimed slots;
//! - the sum that `cuMemGetInfo` needs;
//! - a refusal, which looks for dead processes;
//! - claiming a slot (attach and claim, as at a process's first driver call).
//!
//! `cargo bench -p tessera-region`

#![allow(missing_docs, reason = "a benchmark has no interface")]

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use tessera_region::account::Account;
use tessera_region::layout::Kind;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaReader, QuotaSpec};
use tessera_region::usage::{self, UsageMap};

const BATCHES: usize = 101;
const LIMIT: u64 = 1 << 34;

fn main() {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let gpu = GpuQuota {
        uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
        memory_limit_bytes: LIMIT,
        context_overhead_bytes: 0,
        cores_millis: 1000,
        policy: Policy::None,
    };
    let spec = QuotaSpec { allocation: "bench".into(), generation: 1, gpus: vec![gpu] };
    quota::create(dir.path(), &spec).unwrap();
    usage::create(dir.path(), 1).unwrap();

    let account = open(dir.path());
    let pair = || {
        let reservation = account.reserve(0, black_box(2 << 20)).unwrap();
        reservation.commit(2 << 20, Kind::Plain).unwrap();
        account.release(0, 2 << 20, Kind::Plain);
    };
    let info = || {
        black_box(account.charged_total(black_box(0)));
    };
    report("reserve + commit + release, 1 process", 1000, pair);
    report("charged_total, 1 process", 1000, info);
    report("attach + claim", 10, || drop(open(dir.path())));

    let others: Vec<Account> = (1..16).map(|_| open(dir.path())).collect();
    report("reserve + commit + release, 16 processes", 1000, pair);
    report("charged_total, 16 processes", 1000, info);
    for other in &others {
        other.reserve(0, 1).unwrap().commit(1, Kind::Plain).unwrap();
    }
    account.reserve(0, LIMIT / 2).unwrap().commit(LIMIT / 2, Kind::Plain).unwrap();
    report("refusal, 16 processes", 10, || {
        black_box(account.reserve(0, LIMIT / 2).is_err());
    });
}

fn open(dir: &Path) -> Account {
    let usage = UsageMap::attach(dir).unwrap();
    let slot = usage.claim().unwrap();
    Account::new(QuotaReader::attach(dir).unwrap(), usage, slot)
}

fn report(what: &str, batch: u32, operation: impl Fn()) {
    let mut times: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..batch {
                operation();
            }
            start.elapsed().as_secs_f64() * 1e9 / f64::from(batch)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{what:<44} {:>9.1} ns", times[BATCHES / 2]);
}
