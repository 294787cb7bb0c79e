//! The gate when something ends, stops or falls silent: tenants in the middle of draining, forks, and
//! the arbiter itself.

use std::time::{Duration, Instant};

use tessera_harness::gate::{Stage, is_over};
use tessera_harness::{Arbiter, Conversation, stop};
use tessera_region::layout::{GATE_OPEN, GATE_SOLO, GATE_YIELD};

/// Time for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(60);

fn signal(tenant: &Conversation, signal: libc::c_int) {
    let pid = libc::pid_t::try_from(tenant.pid()).expect("pids are small");
    // SAFETY: a child of this test's that it has not reaped.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// A tenant with 150 ms of work in flight, draining.
fn draining(stage: &Stage, arbiter: &mut Arbiter) -> (Conversation, u32) {
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 150000");
    tenant.must("do fill own 0");
    (tenant, arbiter.shut())
}

#[test]
fn a_process_that_exits_while_it_drains_ends_at_once_and_without_a_word() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    for end in ["exit 0", "_exit 0"] {
        let (mut tenant, _) = draining(&stage, &mut arbiter);
        let pid = tenant.pid();
        let begun = Instant::now();
        tenant.send(end);
        let out = tenant.finish();
        assert!(out.success() && out.stderr.is_empty(), "{end}: {out}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{end}: {:?}", begun.elapsed());
        arbiter.await_left(pid);
    }
    // With a thread that waits at the gate, too.
    for end in ["exit 0", "_exit 0"] {
        let (mut tenant, epoch) = draining(&stage, &mut arbiter);
        let pid = tenant.pid();
        tenant.must("start 0 kernel legacy 500");
        arbiter.await_want(pid);
        arbiter.await_drained(pid, epoch);
        tenant.send(end);
        let out = tenant.finish();
        assert!(out.success() && out.stderr.is_empty(), "{end}: {out}");
        arbiter.await_left(pid);
    }
}

#[test]
fn a_process_killed_while_it_drains_or_waits_leaves_the_others_alone() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let (mut killed, _) = draining(&stage, &mut arbiter);
    let mut other = stage.tenant();
    other.must("start 0 kernel 1 500");
    arbiter.await_want(other.pid());
    killed.kill();
    arbiter.await_left(killed.pid());
    arbiter.open();
    assert_eq!(other.ask("join 0").result, 0);
    arbiter.close_and_drain(&[other.pid()]);
    // And one that waits.
    let mut waiting = stage.tenant();
    waiting.must("start 0 copy legacy 0");
    arbiter.await_want(waiting.pid());
    waiting.kill();
    arbiter.await_left(waiting.pid());
    arbiter.open();
    other.must("do kernel legacy 500");
    arbiter.close_and_drain(&[other.pid()]);
}

/// Between launch and marker, between marker and drained: wherever it is killed.
#[test]
fn processes_killed_at_any_time_leave_no_gate_behind_them() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    for round in 0..6u64 {
        let mut victim = stage.tenant();
        arbiter.open();
        victim.send("churn 8 1000");
        arbiter.await_hello(victim.pid());
        std::thread::sleep(Duration::from_millis(3 + 5 * round));
        arbiter.shut();
        std::thread::sleep(Duration::from_micros(300 * round));
        victim.kill();
        arbiter.await_left(victim.pid());
    }
    let mut after = stage.tenant();
    after.must("start 0 kernel legacy 500");
    arbiter.await_want(after.pid());
    arbiter.open();
    assert_eq!(after.ask("join 0").result, 0);
    arbiter.close_and_drain(&[after.pid()]);
}

#[test]
fn a_stopped_process_drains_once_it_goes_on() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 1000");
    stop(tenant.pid());
    let epoch = arbiter.shut();
    std::thread::sleep(A_WHILE);
    assert!(!arbiter.has_drained(tenant.pid(), epoch));
    // Meanwhile others are let in and out again: an epoch that it never sees.
    arbiter.open();
    let epoch = arbiter.shut();
    signal(&tenant, libc::SIGCONT);
    arbiter.await_drained(tenant.pid(), epoch);
    arbiter.open();
    tenant.must("do kernel 1 1000");
}

#[test]
fn a_fork_neither_waits_for_its_parents_gate_nor_disturbs_it() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 1000");
    // Open: the child's launch is refused by the driver, which does not live in forked children.
    assert_eq!(tenant.must("fork 1"), 3, "CUDA_ERROR_NOT_INITIALIZED");
    tenant.must("do kernel 1 1000");
    let epoch = arbiter.shut();
    arbiter.await_drained(tenant.pid(), epoch);
    // Closed, with a thread that waits: a child that execs is a tenant of its own.
    tenant.must("start 0 kernel 1 1000");
    tenant.must("spawned /bin/true");
    assert!(!is_over(&mut tenant, 0));
    arbiter.open();
    assert_eq!(tenant.ask("join 0").result, 0);
    // The child that forked while it was open said nothing in its parent's name.
    arbiter.close_and_drain(&[tenant.pid()]);
}

#[test]
fn thousands_of_short_threads_launch_through_a_gate_that_opens_and_closes() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel legacy 1");
    tenant.send("churn 32 64");
    let ran = |tenant: &Conversation| stage.sim.worked(0, tenant.pid()).kernels;
    for state in [GATE_SOLO, GATE_OPEN, GATE_YIELD].into_iter().cycle().take(42) {
        arbiter.close_and_drain(&[tenant.pid()]);
        let before = ran(&tenant);
        std::thread::sleep(Duration::from_millis(3));
        assert_eq!(ran(&tenant), before, "launched between drained and the next opening");
        arbiter.set(state);
        std::thread::sleep(Duration::from_millis(4));
    }
    arbiter.solo();
    let reply = tenant.reply("churn 32 64");
    assert_eq!((reply.result, reply.ok()), (0, 0), "no launch failed");
    assert_eq!(tenant.ask("sync").result, 0);
    let worked = stage.sim.worked(0, tenant.pid());
    assert_eq!(worked.kernels, 32 * 64 + 1, "each ran once");
}

/// "each process rations itself" (docs/internals/compute.md), and goes back to the arbiter when there is one.
#[test]
fn without_an_arbiter_work_goes_on_by_the_cycle_and_with_it_again_by_the_gate() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    stage.pages.quota.set_cores(0, 300, tessera_region::quota::Policy::Burst);
    stage.pages.quota.set_window(0, 16, 1000);
    let mut tenant = stage.tenant();
    tenant.must("start 0 kernel 1 1000");
    arbiter.await_want(tenant.pid());
    // It ends in order, with the gate closed.
    drop(arbiter);
    assert_eq!(tenant.ask("join 0").result, 0, "nobody waits for an arbiter that is gone");
    let (begun, before) = (Instant::now(), stage.worked_ns(&tenant));
    while begun.elapsed() < Duration::from_millis(600) {
        tenant.must("do kernel 1 1000");
    }
    let share = (stage.worked_ns(&tenant) - before) as f64 / begun.elapsed().as_nanos() as f64;
    assert!((0.05..0.6).contains(&share), "{share} of a GPU, of which it has three tenths");

    // Back again, and closed: it drains and waits.
    let mut arbiter = Arbiter::again(&stage.pages.dir);
    let epoch = arbiter.shut();
    arbiter.await_drained(tenant.pid(), epoch);
    tenant.must("start 0 kernel 1 1000");
    arbiter.await_want(tenant.pid());
    std::thread::sleep(A_WHILE);
    assert!(!is_over(&mut tenant, 0));
    arbiter.open();
    assert_eq!(tenant.ask("join 0").result, 0);

    // Killed, with the gate closed: nothing is said, its time stands still.
    let epoch = arbiter.shut();
    arbiter.await_drained(tenant.pid(), epoch);
    arbiter.dies();
    tenant.must("start 0 kernel 1 1000");
    let begun = Instant::now();
    assert_eq!(tenant.ask("join 0").result, 0);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let mut arbiter = Arbiter::again(&stage.pages.dir);
    arbiter.await_hello(tenant.pid());
    arbiter.open();
    tenant.must("do kernel 1 1000");
    arbiter.close_and_drain(&[tenant.pid()]);
}
