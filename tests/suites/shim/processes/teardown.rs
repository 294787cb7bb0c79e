//! The driver gives a killed process's memory back later than the kernel ends it. A request that the quota
//! grants meanwhile waits for it, whosever it was; of those that the driver refuses for good only the first
//! waits long.

use crate::OUT_OF_MEMORY;
use std::time::{Duration, Instant};

use tessera_harness::{Conversation, MIB, Pages, SimGpu, monotonic_ns};

const TEARDOWN: Duration = Duration::from_millis(400);

/// A GPU of so many GiB whose driver takes its time for what died.
fn gpu(gib: u32, teardown_ms: u32) -> SimGpu {
    SimGpu::start(&format!(
        "[memory]\nreserved = \"0\"\ncontext_overhead = \"8Mi\"\nteardown_ms = {teardown_ms}.0\n\
         [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"\nmemory = \"{gib}Gi\"\n",
    ))
}

/// One on which one tenant can hold 600 MiB at a time, though its quota says 900.
fn machine() -> (SimGpu, Pages) {
    let sim = gpu(1, 400);
    let pages = Pages::create(&[(sim.uuid(0), 900 * MIB)]);
    (sim, pages)
}

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("calls", sim, pages)
}

#[test]
fn what_fits_waits_for_a_killed_processs_memory() {
    let (sim, pages) = machine();
    for recovered_by_the_plugin in [false, true] {
        let mut survivor = tenant(&sim, &pages);
        let mut victim = tenant(&sim, &pages);
        victim.must("alloc 629145600");
        victim.kill();
        let killed = Instant::now();
        if recovered_by_the_plugin {
            pages.usage().recover_dead().expect("a writable usage page");
        }
        survivor.must("alloc 629145600");
        assert!(killed.elapsed() >= TEARDOWN / 2, "the driver had it back at once");
        assert_eq!(pages.charged(0), 600 * MIB);
    }
}

#[test]
fn what_fits_waits_for_a_neighbours_killed_process() {
    let (sim, pages) = machine();
    let other = Pages::create(&[(sim.uuid(0), 900 * MIB)]);
    let mut survivor = tenant(&sim, &pages);
    for neighbour_is_looked_at in [false, true] {
        let mut victim = tenant(&sim, &other);
        victim.must("alloc 629145600");
        victim.kill();
        if neighbour_is_looked_at {
            other.usage().recover_dead().expect("a writable usage page");
        }
        let pointer = survivor.must("alloc 629145600");
        survivor.must(&format!("free {pointer}"));
    }
}

/// A GPU whose driver takes `teardown_ms` for what died, 900 MiB of it full, and the pages of one who needs 600.
fn full(teardown_ms: u32, dies: bool) -> (SimGpu, Pages, Conversation, Conversation) {
    let sim = gpu(1, teardown_ms);
    let [pages, other] = [(); 2].map(|()| Pages::create(&[(sim.uuid(0), 900 * MIB)]));
    let late = tenant(&sim, &pages);
    let mut neighbour = tenant(&sim, &other);
    neighbour.must("alloc 629145600");
    if dies {
        neighbour.kill();
    }
    pages.quota().set_departing(0, dies);
    // It lives for longer than the test.
    pages.quota().set_heartbeat(monotonic_ns() + 3_600_000_000_000);
    (sim, pages, late, neighbour)
}

/// The driver takes up to 26 s (sgl-project/sglang#32829).
#[test]
fn what_the_plugin_sees_departing_is_waited_for_as_long_as_it_sees_it() {
    let (_sim, _pages, mut late, _neighbour) = full(4_000, true);
    late.must("alloc 629145600");
}

#[test]
fn where_nothing_departs_nobody_retries_for_seconds() {
    let took = || {
        let (_sim, _pages, mut late, _neighbour) = full(400, false);
        let asked = Instant::now();
        assert_eq!(late.ask("alloc 629145600").result, OUT_OF_MEMORY);
        asked.elapsed()
    };
    // A busy machine may be slow once.
    assert!((0..9).any(|_| took() < Duration::from_secs(2)));
}

#[test]
fn where_nobody_looks_a_successor_waits_as_long_as_the_page_says() {
    let sim = gpu(4, 400);
    let pages = Pages::create(&[(sim.uuid(0), 900 * MIB)]);
    let departure = Duration::from_secs(3);
    pages.quota().set_departure(departure);
    let mut victim = tenant(&sim, &pages);
    victim.must("alloc 629145600");
    victim.kill();
    let killed = Instant::now();
    let mut next = tenant(&sim, &pages);
    assert_eq!(next.must("info"), 900 * MIB, "as free as it will be");
    // What fits beside it is granted, what fits no quota refused, and neither waits.
    next.must("alloc 104857600");
    assert_eq!(next.ask("alloc 1048576000").result, OUT_OF_MEMORY);
    assert!(pages.snapshot().charged(0) == 700 * MIB, "it departs still");
    next.must("alloc 629145600");
    assert!(killed.elapsed() >= departure);
}

#[test]
fn of_what_the_driver_refuses_for_good_only_the_first_waits_long() {
    let (sim, pages) = machine();
    let other = Pages::create(&[(sim.uuid(0), 900 * MIB)]);
    let mut neighbour = tenant(&sim, &other);
    neighbour.must("alloc 629145600");
    let mut late = tenant(&sim, &pages);
    let asked = Instant::now();
    assert_eq!(late.ask("alloc 629145600").result, OUT_OF_MEMORY);
    let first = asked.elapsed();
    assert!(first >= TEARDOWN);
    let again = Instant::now();
    assert_eq!(late.ask("alloc 629145600").result, OUT_OF_MEMORY);
    assert!(again.elapsed() < first);
    assert_eq!(pages.charged(0), 0);
}
