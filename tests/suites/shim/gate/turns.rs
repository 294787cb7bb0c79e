//! A tenant at its gate, with an arbiter that does what the test says: nothing reaches the driver
//! between `drained` and the next opening, what is in flight is bounded while the gate is open, and
//! no launch waits without end when the arbiter falls silent.

use std::time::{Duration, Instant};

use tessera_harness::gate::Stage;
use tessera_harness::{Arbiter, Conversation, Pages, monotonic_ns};
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_SOLO, GATE_YIELD};
use tessera_region::quota::Policy;
use tessera_region::session::Message;

const QUIET: Duration = Duration::from_millis(300);

fn threads(tenant: &Conversation) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", tenant.pid())).expect("it lives").count()
}

fn is_hello(message: &Message) -> bool {
    matches!(message, Message::Hello { .. })
}

fn is_want(message: &Message) -> bool {
    matches!(message, Message::Want { gpu: 0 })
}

/// Launches made, waits, timeouts and full windows of the only process.
fn counters(pages: &Pages) -> (u64, u64, u64, u64) {
    let file = std::fs::read(pages.usage_file()).expect("the usage page");
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let slot = 4096;
    let launches = (0..8).map(|shard| word(slot + 512 + shard * 8)).sum();
    (launches, word(slot + 944), word(slot + 952), word(slot + 960))
}

#[test]
fn where_compute_is_not_limited_there_is_neither_thread_nor_connection() {
    let stage = Stage::new();
    let mut tenant = stage.tenant();
    let before = threads(&tenant);
    tenant.must("turns 100 kernel 1 1 1");
    tenant.must("sync");
    assert_eq!(threads(&tenant), before);
    // Nor beside an arbiter.
    stage.pages.quota.set_arbiter(monotonic_ns());
    tenant.must("turns 100 kernel 0 0 1");
    assert_eq!(threads(&tenant), before);
    assert!(tenant.finish().success());
}

#[test]
fn who_launched_before_there_was_an_arbiter_is_awaited_at_its_first_closing() {
    let stage = Stage::new();
    stage.pages.quota.set_cores(0, 500, Policy::Burst);
    let mut tenant = stage.tenant();
    tenant.must("turns 1 kernel 1 1 300000");
    // The two run at once: this one is over last.
    assert_eq!(tenant.must("stream"), 2);
    tenant.must("turns 1 kernel 2 2 600000");
    tenant.must("destroy 2");
    // It makes no further call.
    let arbiter = Arbiter::take_on(&stage.pages);
    assert!(is_hello(&arbiter.hears_in_time(|_| true)));
    // Nothing completes for a while: that is said first.
    let drained = arbiter.hears_in_time(|message| !matches!(message, Message::Idle { .. }));
    assert!(matches!(drained, Message::Drained { gpu: 0, epoch: 1, .. }), "{drained:?}");
    assert_eq!(tenant.must("query 1"), 0, "complete");
    assert!(stage.sim.worked(0, tenant.pid()).ns >= 600_000_000, "the stream that has ended, too");
    arbiter.set(GATE_SOLO);
    tenant.must("turns 1 kernel 1 1 1");
    arbiter.close();
    assert!(tenant.finish().success());
}

#[test]
fn a_launch_waits_at_a_closed_gate_says_so_once_and_goes_when_it_opens() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    let mut tenant = stage.tenant();
    assert!(arbiter.hears_nothing_for(Duration::from_millis(50)), "it has launched nothing");
    tenant.send("turns 1 kernel 1 1 1");
    assert!(is_hello(&arbiter.hears()), "first of all");
    let mut said = vec![arbiter.hears(), arbiter.hears()];
    said.sort_by_key(|message| !is_want(message));
    assert!(is_want(&said[0]), "{said:?}");
    assert!(matches!(said[1], Message::Drained { gpu: 0, epoch: 1, .. }), "{said:?}");
    assert!(arbiter.hears_nothing_for(QUIET), "once per closing");
    assert_eq!(counters(&stage.pages).0, 0, "launched at a closed gate");
    arbiter.set(GATE_OPEN);
    assert!(tenant.reply("turns").ok() >= 300_000, "microseconds waited");
    let (launches, waits, timeouts, _) = counters(&stage.pages);
    assert_eq!((launches, waits, timeouts), (1, 1, 0));
    assert!(tenant.finish().success());
}

#[test]
fn what_is_in_flight_is_bounded_while_the_gate_is_open() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    let mut tenant = stage.tenant();
    arbiter.set(GATE_OPEN);
    // 5 ms each, two may be in flight: the thirtieth is launched when the twenty-eighth is complete.
    let took_us = tenant.must("turns 30 kernel 1 1 5000");
    assert!(took_us >= 27 * 5_000, "{took_us} µs");
    // By count: whatever has run since the last was launched makes it less.
    let complete = stage.sim.worked(0, tenant.pid()).kernels;
    assert!(complete >= 26, "{complete} of 30 were complete when the last was launched");
    arbiter.close();
    // Short ones: the window of operations counts, and they go on without a gap.
    arbiter.set(GATE_OPEN);
    let took_us = tenant.must("turns 5000 kernel 1 1 20");
    assert!(took_us >= 90_000, "5000 kernels of 20 µs were let out in {took_us} µs");
    assert!(counters(&stage.pages).3 > 0, "no full window was counted");
    assert!(tenant.finish().success());
}

#[test]
fn a_holder_for_whom_others_wait_says_once_that_it_is_idle() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    let mut tenant = stage.tenant();
    arbiter.set(GATE_OPEN);
    tenant.must("turns 3 kernel 1 1 1");
    arbiter.hears_in_time(is_hello);
    let epoch = arbiter.set(GATE_YIELD);
    let said = arbiter.hears_in_time(|m| !matches!(m, Message::Drained { .. }));
    assert_eq!(said, Message::Idle { gpu: 0, epoch });
    assert!(arbiter.hears_nothing_for(QUIET), "once per lease");
    // Not while something is in flight.
    arbiter.close();
    arbiter.set(GATE_OPEN);
    tenant.must("turns 1 kernel 1 1 80000");
    let begun = Instant::now();
    let epoch = arbiter.set(GATE_YIELD);
    assert_eq!(arbiter.hears(), Message::Idle { gpu: 0, epoch });
    assert!(begun.elapsed() >= Duration::from_millis(75), "{:?}", begun.elapsed());
    assert!(tenant.finish().success());
}

/// How much of `time` the tenant's kernels of 100 µs ran.
fn share_of(tenant: &mut Conversation, kernels: u32) -> f64 {
    let took_us = tenant.must(&format!("turns {kernels} kernel 1 1 100"));
    f64::from(kernels) * 100.0 / f64::from(u32::try_from(took_us).unwrap())
}

#[test]
fn without_a_sign_of_the_arbiter_a_tenant_keeps_to_its_part_of_the_cycle() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    arbiter.quota.set_cores(0, 300, Policy::Burst);
    let mut tenant = stage.tenant();
    arbiter.set(GATE_SOLO);
    tenant.must("turns 10 kernel 1 1 1");
    // Killed: the gate stays as it was, the time no longer moves.
    arbiter.dies();
    std::thread::sleep(Duration::from_millis(1_300));
    let share = share_of(&mut tenant, 2_000);
    // How much less depends on how busy this machine is.
    assert!(share < 0.36, "{share} of the GPU instead of 0.3");
    assert_eq!(counters(&stage.pages).2, 1, "an episode is counted once");
    // Closed for ever is no different: a launch at a closed gate goes on, too.
    stage.pages.quota.set_gate(0, GATE_CLOSED);
    tenant.must("turns 500 kernel 1 1 100");
    // Back: bound again, and held.
    let arbiter = Arbiter::take_on(&stage.pages);
    arbiter.hears_in_time(is_hello);
    arbiter.hears_in_time(|message| matches!(message, Message::Drained { .. }));
    tenant.send("turns 1 kernel 1 1 1");
    arbiter.hears_in_time(is_want);
    assert!(arbiter.hears_nothing_for(QUIET));
    arbiter.set(GATE_OPEN);
    tenant.reply("turns").ok();
    assert!(tenant.finish().success());
}

#[test]
fn a_forked_child_is_bound_by_itself() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    arbiter.set(GATE_OPEN);
    let mut tenant = Conversation::tenant("gate_work", &stage.sim, &stage.pages);
    // Of a parent that has not used the driver, and of one that is bound: there the driver refuses.
    for result in [0, 3] {
        tenant.send("fork 50");
        arbiter.hears_in_time(is_hello);
        assert_eq!(tenant.reply("fork").ok(), result, "the child's exit status");
        if result == 0 {
            tenant.must("init");
            tenant.must("turns 3 kernel 1 1 1");
            arbiter.hears_in_time(is_hello);
        }
    }
    arbiter.close();
    arbiter.set(GATE_OPEN);
    tenant.must("turns 3 kernel 1 1 1");
    assert!(tenant.finish().success());
}

#[test]
fn a_tenant_without_a_connection_rations_itself_alone() {
    let stage = Stage::new();
    let arbiter = Arbiter::take_on(&stage.pages);
    let socket = stage.pages.dir.join(tessera_region::layout::GATE_SOCKET);
    std::fs::remove_file(socket).expect("the socket");
    let mut tenant = stage.tenant();
    let took_us = tenant.must("turns 20 kernel 1 1 1");
    assert!((900_000..8_000_000).contains(&took_us), "{took_us} µs");
    drop(arbiter);
    assert!(tenant.finish().success());
}
