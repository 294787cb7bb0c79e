//! Memory while pods come and go: what is kept of each that went.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use tessera_history::{History, Options};
use tessera_view::status::{Allocation, Holder, Status};
use tessera_view::tenant::{Compute, Use};

const T0: i64 = 1_750_032_000;
/// Pods at any time; all are others a minute later.
const PODS: u64 = 16;
/// Minutes before memory is first looked at: until the file's cache is full, and the buckets that wait are as many as
/// may.
const WARM_UP: usize = 200;
/// And after that: rounds of 480 pods.
const ROUNDS: usize = 5;
const MINUTES: usize = 30;
/// A round in which more is held than at the end of the one before: 8 bytes for each of its pods. A name alone is
/// several times that.
const GROWTH: usize = 4 << 10;
/// Rounds that may have grown. A hash table that entries come to and go from takes its next size once, at a moment that
/// depends on its seed; what is kept of pods that went grows in every round.
const STEPS: usize = 2;

/// Bytes that are allocated.
static HELD: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: `System` does it all; counting changes nothing about that.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn status(second: i64) -> Status {
    let generation = second.cast_unsigned() / 60;
    let one = |n: u64| Allocation {
        id: format!("{:032x}", generation * PODS + n),
        generation: 1,
        holder: Some(Holder {
            namespace: "team".into(),
            pod: format!("batch-{generation}-{n}"),
            container: "main".into(),
        }),
        gpus: vec![Use {
            gpu_uuid: "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28".into(),
            memory_used_bytes: (second.cast_unsigned() % 97 + n) << 20,
            memory_limit_bytes: 1 << 30,
            cores_millis: 250,
            ..Use::default()
        }],
        compute: Some(Compute::default()),
        ..Allocation::default()
    };
    Status {
        at_unix_ms: (T0 + second) * 1000,
        allocations: (0..PODS).map(one).collect(),
        ..Status::default()
    }
}

/// By how many bytes memory grows in each round.
fn growth(path: &Path, can_store: bool) -> Vec<usize> {
    // A file that is full early: more pods than it has room for.
    let keep = [1800, 3600, 7200];
    let history =
        History::new(Options { path: path.to_owned(), bound: 4 << 20, keep, sync: false });
    let mut held = Vec::new();
    for minute in 0..(WARM_UP + ROUNDS * MINUTES) as i64 {
        for second in (minute * 60..(minute + 1) * 60).step_by(10) {
            history.look(&status(second), &HashSet::new(), second.cast_unsigned() * 1000);
        }
        let stored = history.flush(false);
        assert_eq!(stored.is_ok(), can_store, "{stored:?}");
        held.push(HELD.load(Ordering::Relaxed));
    }
    // The least of several looks at the end of each round: what is held for a moment is no growth.
    let ends = (0..=ROUNDS).map(|round| WARM_UP + round * MINUTES);
    let least: Vec<usize> =
        ends.filter_map(|end| held[end - 10..end].iter().min().copied()).collect();
    println!("stored {can_store}: {least:?} bytes");
    least.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect()
}

#[test]
fn pods_that_come_and_go_leave_nothing_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("directory");
    std::fs::create_dir(&directory).unwrap();
    for (path, can_store) in [(dir.path().join("history.redb"), true), (directory, false)] {
        let rounds = growth(&path, can_store);
        let grown = rounds.iter().filter(|bytes| **bytes > GROWTH).count();
        assert!(grown <= STEPS, "grows by {rounds:?} bytes; stored: {can_store}");
    }
}
