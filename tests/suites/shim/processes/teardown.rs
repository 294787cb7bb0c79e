//! The driver gives a killed process's memory back later than the kernel ends it. A request that the quota
//! grants meanwhile waits for it, whosever it was; of those that the driver refuses for good only the first
//! waits long.

use std::time::{Duration, Instant};

use tessera_harness::{Conversation, Pages, Preloaded, SimGpu, compile_c};

const MIB: u64 = 1 << 20;
const OUT_OF_MEMORY: i64 = 2;
const TEARDOWN: Duration = Duration::from_millis(400);

/// A GPU on which one tenant can hold 600 MiB at a time, though its quota says 900.
fn machine() -> (SimGpu, Pages) {
    let sim = SimGpu::start(
        "[memory]\nreserved = \"0\"\ncontext_overhead = \"8Mi\"\nteardown_ms = 400.0\n\
         [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"\nmemory = \"1Gi\"\n",
    );
    let pages = Pages::create(&[(sim.uuid(0), 900 * MIB)]);
    (sim, pages)
}

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    let mut tenant = Conversation::start(Preloaded::new(compile_c("calls")).sim(sim).pages(pages));
    tenant.must("init");
    tenant.must("retain 0");
    tenant
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

#[test]
fn where_nobody_looks_a_successor_waits_as_long_as_the_page_says() {
    let sim = SimGpu::start(
        "[memory]\nreserved = \"0\"\ncontext_overhead = \"8Mi\"\nteardown_ms = 400.0\n\
         [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"\nmemory = \"4Gi\"\n",
    );
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
