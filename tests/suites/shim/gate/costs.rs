//! What the gate puts on the GPU and asks of the driver, by the simulated driver's own account.

use std::time::{Duration, Instant};

use tessera_harness::gate::{SIM, Stage};
use tessera_harness::{Conversation, MIB, Pages, SimGpu};

/// A machine on which calls cost what this line says; without words that the GPU writes, markers are events.
fn costing(line: &str, has_words: bool) -> Stage {
    let sim = SimGpu::start(&SIM.replace("[costs]", &format!("[costs]\n{line}")));
    let sim = if has_words { sim.that_writes() } else { sim };
    let pages = Pages::create(&[(sim.uuid(0), 1024 * MIB)]);
    Stage { sim, pages }
}

/// How many markers a command costs.
fn marks(stage: &Stage, tenant: &mut Conversation, command: &str) -> u64 {
    let so_far = |tenant: &Conversation| stage.sim.worked(0, tenant.pid()).marks;
    let before = so_far(tenant);
    tenant.must(command);
    tenant.must("sync");
    so_far(tenant) - before
}

#[test]
fn whoever_alternates_between_streams_marks_hardly_more_often() {
    let stage = Stage::new();
    let arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    let one = marks(&stage, &mut tenant, "turns 1000 kernel 1 1 5");
    let two = marks(&stage, &mut tenant, "turns 1000 kernel 0 1 5");
    println!("{one} and {two} markers");
    assert!(
        two <= 2 * one + 16,
        "{two} markers for 1,000 launches into two streams, {one} into one"
    );
}

/// CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization": what is between the two parts them.
#[test]
fn markers_part_few_kernels_that_may_begin_with_the_one_before() {
    let stage = Stage::new();
    let arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    let apart = marks(&stage, &mut tenant, "turns 1000 kernel_ex 1 1 5");
    let chained = marks(&stage, &mut tenant, "turns 1000 chained 1 1 5");
    println!("{apart} and {chained} markers");
    assert!(
        chained * 3 <= apart * 2,
        "{chained} markers among chained kernels, {apart} among others"
    );
}

#[test]
fn a_host_function_asks_of_few_events_however_many_are_queued() {
    // Of all that are queued before them, 100 would ask for half a second.
    let stage = costing("query_cpu_ns = 100000", false);
    let arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 2000000");
    let took_us = tenant.must("turns 100 host 1 1 0");
    println!("{took_us} µs");
    assert!(took_us < 250_000, "{took_us} µs for 100 host functions behind a long kernel");
    tenant.must("sync");
}

/// Finding of meta-pytorch/torchcomms#2334: the first launch of a kernel loads its code, under the context's lock.
#[test]
fn a_closing_waits_for_no_code_that_is_being_loaded() {
    const LOADS: Duration = Duration::from_secs(3);
    let stage = costing(&format!("load_us = {}", LOADS.as_micros()), true);
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do fill 1 0");
    tenant.must("sync");
    let first = "do kernel 1 100";
    tenant.send(first);
    std::thread::sleep(LOADS / 10);
    let begun = Instant::now();
    arbiter.close_and_drain(&[tenant.pid()]);
    let took = begun.elapsed();
    println!("{took:?}");
    assert!(took < LOADS / 2, "{took:?}: as long as the code took to load");
    arbiter.await_want(tenant.pid());
    arbiter.open();
    tenant.reply(first).ok();
}
