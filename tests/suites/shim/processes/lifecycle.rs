//! Processes that begin, fork and end in every way, and what their slot does meanwhile.

use std::time::{Duration, Instant};

use tessera_harness::{
    Conversation, MIB, Output, Pages, Preloaded, SimGpu, compile_c, monotonic_ns, until,
};

use crate::{OUT_OF_MEMORY, held, quota, ready};

fn start(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("calls", sim, pages)
}

#[test]
fn every_way_to_end_gives_everything_back() {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), 256 * MIB)], 16 * MIB);
    for end in ["exit 0", "exit 3", "_exit 0", "abort"] {
        let mut tenant = start(&sim, &pages);
        tenant.must("alloc 209715200");
        assert_eq!(pages.charged(0), 216 * MIB, "{end}");
        tenant.send(end);
        let out = tenant.finish();
        assert_eq!(out.stderr, "", "{end}");
        assert_eq!(pages.charged(0), 0, "{end}");
        // At once usable by the next process, without anybody's help.
        let mut next = start(&sim, &pages);
        next.must("alloc 209715200");
    }
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), 256 * MIB)], 16 * MIB);
    let mut survivor = start(&sim, &pages);
    for _ in 0..10 {
        let mut victim = start(&sim, &pages);
        victim.must("alloc 209715200");
        assert_eq!(survivor.ask("alloc 104857600").result, OUT_OF_MEMORY);
        victim.kill();
        // No plugin runs here: the survivor's own request finds the dead slot.
        let pointer = survivor.must("alloc 209715200");
        survivor.must(&format!("free {pointer}"));
    }
    assert_eq!(pages.charged(0), 16 * MIB);
}

#[test]
fn calls_after_main_are_harmless() {
    let (_sim, pages, mut tenant) = held("calls", 64 * MIB);
    tenant.must("late");
    tenant.send("exit 0");
    let out = tenant.finish();
    assert!(out.success(), "{out}");
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn a_child_forked_after_initialisation_gets_the_drivers_answers() {
    let (sim, _pages, mut tenant) = held("calls", 64 * MIB);
    let mut bare = ready(Preloaded::bare(compile_c("calls")).sim(&sim));
    for command in ["forked alloc 1048576", "forked info", "forked init", "forked count"] {
        let (seen, expected) = (tenant.ask(command), bare.ask(command));
        assert_eq!(seen.result, expected.result, "{command}");
    }
}

#[test]
fn forked_children_do_not_touch_their_parents_slot() {
    let (sim, pages) = quota(64 * MIB);
    let mut parent = start(&sim, &pages);
    let held = parent.must("alloc 33554432");
    for command in [
        "forked alloc 1048576",
        "forked init; retain 0; alloc 1048576",
        &format!("forked free {held}"),
        "forked reset 0",
        "forked closefrom 3",
        "forked exit 0",
    ] {
        parent.ask(command);
        assert_eq!(pages.charged(0), 32 * MIB, "after {command}");
        assert_eq!(parent.ask("alloc 33554433").result, OUT_OF_MEMORY, "after {command}");
    }
    assert_eq!(parent.must("info"), 32 * MIB);
    parent.must(&format!("free {held}"));
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn a_parents_memory_stays_charged_while_a_forked_child_holds_it() {
    let (sim, pages) = quota(64 * MIB);
    let mut parent = start(&sim, &pages);
    parent.must("alloc 67108864");
    let child = parent.must("forksleeper");
    parent.kill();
    // The driver's memory lives until the last process that shares its files is gone; so does the slot.
    assert_eq!(pages.charged(0), 64 * MIB);
    let mut next = start(&sim, &pages);
    assert_eq!(next.ask("alloc 1").result, OUT_OF_MEMORY);
    // SAFETY: kill takes no memory; the number is that of the sleeper, a descendant that nobody else
    // reaps before the group it is in ends with this test.
    unsafe { libc::kill(i32::try_from(child).expect("a pid"), libc::SIGKILL) };
    until("the child's end gives the memory back", || pages.charged(0) == 0);
    next.must("alloc 67108864");
}

#[test]
fn closing_every_file_neither_loses_the_slot_nor_the_limit() {
    let (_sim, pages, mut tenant) = held("calls", 64 * MIB);
    let held = tenant.must("alloc 33554432");
    tenant.must("closefrom 3");
    // Still owned: nobody can recover it.
    assert_eq!(pages.charged(0), 32 * MIB);
    assert_eq!(tenant.ask("alloc 33554433").result, OUT_OF_MEMORY);
    tenant.must("alloc 33554432");
    tenant.must(&format!("free {held}"));
    assert_eq!(pages.charged(0), 32 * MIB);
}

#[test]
fn the_129th_process_is_refused_with_a_clear_line() {
    // The simulator, too, has room for that many processes; a dead one leaves it at once here.
    let sim = SimGpu::start(
        "[memory]\nteardown_ms = 0.0\n[[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"",
    );
    let pages = Pages::create(&[(sim.uuid(0), 512 * MIB)]);
    let tenant = || Conversation::tenant("calls", &sim, &pages);
    let mut tenants: Vec<_> = (0..tessera_region::layout::SLOTS).map(|_| tenant()).collect();
    tenants.iter_mut().for_each(|tenant| tenant.send("init"));
    for (index, tenant) in tenants.iter_mut().enumerate() {
        assert_eq!(tenant.reply("init").result, 0, "process {index}");
    }
    let mut late = tenant();
    assert_ne!(late.ask("init").result, 0);
    let out = late.finish();
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
    assert!(out.stderr.contains("tessera") && out.stderr.contains("128"), "{out}");
    // One ends, one may come.
    tenants.pop();
    let mut next = tenant();
    next.must("init");
}

// === threads that are in the driver while something happens to them or to the process ===

/// Runs `tests/programs/unruly.c` under a quota; afterwards nothing may be charged.
fn unruly(what: &str) -> Output {
    let (sim, pages) = quota(64 * MIB);
    let preloaded = Preloaded::new(compile_c("unruly")).sim(&sim).pages(&pages);
    let out = preloaded.arg(what).arg((64 * MIB).to_string()).run();
    assert!(out.success(), "{what}: {out}");
    assert_eq!(pages.charged(0), 0, "{what}");
    out
}

#[test]
fn a_process_may_end_while_its_threads_allocate() {
    for what in ["return", "exit", "_exit", "quick_exit"] {
        let out = unruly(what);
        assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("", ""), "{what}");
    }
}

#[test]
fn a_program_that_replaces_itself_leaves_nothing_charged() {
    assert_eq!(unruly("exec").number("probe"), 0);
}

#[test]
fn a_cancelled_thread_ends_after_a_refusal_and_not_within() {
    // A refusal writes to standard error and to the plugin, and both would be cancellation points.
    assert_eq!(unruly("cancel").value("refused"), "160 failures 0 usable 1");
}

/// Forks that exec, end or use the driver; spawned programs; threads that load the driver all at once and unload it;
/// every descriptor closed while threads allocate; thousands of threads at once.
#[test]
fn what_threads_do_to_their_process_loses_nothing() {
    for what in ["fork", "spawn", "late", "close", "many"] {
        let out = unruly(what);
        assert_eq!(out.value("failures"), "0 usable 1", "{what}");
        assert!(out.stderr.is_empty() || what == "close", "{what}: {out}");
    }
}

// The driver gives a killed process's memory back later than the kernel ends it. A request that the quota
// grants meanwhile waits for it, whosever it was; of those that the driver refuses for good only the first
// waits long.

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

#[test]
fn what_fits_waits_for_a_killed_processs_memory() {
    let (sim, pages) = machine();
    for recovered_by_the_plugin in [false, true] {
        let mut survivor = start(&sim, &pages);
        let mut victim = start(&sim, &pages);
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
    let mut survivor = start(&sim, &pages);
    for neighbour_is_looked_at in [false, true] {
        let mut victim = start(&sim, &other);
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
    let late = start(&sim, &pages);
    let mut neighbour = start(&sim, &other);
    neighbour.must("alloc 629145600");
    if dies {
        neighbour.kill();
    }
    pages.quota.set_departing(0, dies);
    // It lives for longer than the test.
    pages.quota.set_heartbeat(monotonic_ns() + 3_600_000_000_000);
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
    pages.quota.set_departure(departure);
    let mut victim = start(&sim, &pages);
    victim.must("alloc 629145600");
    victim.kill();
    let killed = Instant::now();
    let mut next = start(&sim, &pages);
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
    let mut neighbour = start(&sim, &other);
    neighbour.must("alloc 629145600");
    let mut late = start(&sim, &pages);
    let asked = Instant::now();
    assert_eq!(late.ask("alloc 629145600").result, OUT_OF_MEMORY);
    let first = asked.elapsed();
    assert!(first >= TEARDOWN);
    let again = Instant::now();
    assert_eq!(late.ask("alloc 629145600").result, OUT_OF_MEMORY);
    assert!(again.elapsed() < first);
    assert_eq!(pages.charged(0), 0);
}
