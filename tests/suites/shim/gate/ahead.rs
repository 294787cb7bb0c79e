//! Work that a tenant queues ahead of its turn, at a closed gate to which it is invited.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tessera_harness::gate::Stage;
use tessera_harness::{Arbiter, Conversation};
use tessera_region::flight::FlightReader;
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_SOLO, GATE_YIELD, gate_word};
use tessera_region::session::Message;

/// Nothing happens for so long.
const QUIET: Duration = Duration::from_millis(100);

/// The flight page of a tenant's process, as its arbiter has it.
pub(super) fn flight_of(tenant: &Conversation) -> FlightReader {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", tenant.pid())).expect("it lives");
    let is_flight = |fd: &std::path::PathBuf| {
        std::fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().contains("tessera-flight"))
    };
    let found = fds.flatten().map(|fd| fd.path()).find(is_flight).expect("it has a page");
    let file = std::fs::File::options().read(true).write(true).open(found).expect("ours to open");
    FlightReader::map(file.as_fd()).expect("a flight page")
}

/// A tenant at a gate that is closed, with nothing in flight, to which it is invited; and the closed gate's epoch.
fn invited(stage: &Stage) -> (Arbiter, Conversation, FlightReader, u32) {
    let arbiter = Arbiter::take_on(&stage.pages);
    arbiter.quota.set_takes_flight(true);
    let mut tenant = stage.tenant();
    arbiter.set(GATE_OPEN);
    tenant.must("turns 1 kernel 1 1 1");
    tenant.must("sync");
    let epoch = arbiter.close();
    let flight = flight_of(&tenant);
    flight.invited.store(gate_word(epoch, GATE_CLOSED), Ordering::SeqCst);
    (arbiter, tenant, flight, epoch)
}

fn signal(tenant: &Conversation, signal: libc::c_int) {
    // SAFETY: kill has no memory effects; the tenant was not waited for.
    unsafe { libc::kill(i32::try_from(tenant.pid()).expect("a pid"), signal) };
}

fn is_want(message: &Message) -> bool {
    matches!(message, Message::Want { .. })
}

#[test]
fn it_runs_when_the_gate_opens_though_every_thread_of_the_tenant_is_stopped() {
    let stage = Stage::new();
    let (arbiter, mut tenant, flight, _) = invited(&stage);
    let before = stage.worked_ns(&tenant);
    for _ in 0..2 {
        tenant.must("turns 1 kernel 1 1 2000");
    }
    arbiter.hears_in_time(is_want);
    std::thread::sleep(QUIET);
    assert_eq!(stage.worked_ns(&tenant), before, "the gate is closed");
    assert_eq!(flight.in_flight().operations, 2);
    signal(&tenant, libc::SIGSTOP);
    arbiter.open();
    flight.release();
    std::thread::sleep(QUIET);
    assert!(
        stage.worked_ns(&tenant) >= before + 4_000_000,
        "{} ns",
        stage.worked_ns(&tenant) - before
    );
    assert_eq!(flight.in_flight().operations, 0, "words show it");
    signal(&tenant, libc::SIGCONT);
    arbiter.close();
    assert!(tenant.finish().success());
}

#[test]
fn no_more_than_a_window_is_queued_ahead_and_the_rest_waits_at_the_gate() {
    let stage = Stage::new();
    let (arbiter, mut tenant, flight, _) = invited(&stage);
    tenant.send("turns 40 kernel 1 1 1000");
    arbiter.hears_in_time(is_want);
    std::thread::sleep(QUIET);
    let ahead = flight.in_flight().operations;
    assert!((1..=16).contains(&ahead), "{ahead} operations, in a window of 16");
    assert_eq!(flight.waiting.load(Ordering::SeqCst), 1);
    arbiter.open();
    flight.release();
    assert_eq!(tenant.reply("launch").result, 0);
    arbiter.close();
    assert!(stage.worked_ns(&tenant) >= 40_000_000);
    assert!(tenant.finish().success());
}

#[test]
fn who_is_not_invited_at_this_closing_waits_at_the_gate() {
    let stage = Stage::new();
    let (arbiter, mut tenant, flight, _) = invited(&stage);
    arbiter.open();
    flight.release();
    arbiter.close();
    tenant.send("turns 1 kernel 1 1 1");
    arbiter.hears_in_time(is_want);
    std::thread::sleep(QUIET);
    assert_eq!(flight.in_flight().operations, 0);
    arbiter.open();
    assert_eq!(tenant.reply("launch").result, 0);
    assert!(tenant.finish().success());
}

#[test]
fn a_launch_into_several_streams_waits_at_the_gate_and_one_into_the_legacy_stream_does_not() {
    let Stage { sim, pages } = Stage::new();
    let arbiter = Arbiter::take_on(&pages);
    arbiter.quota.set_takes_flight(true);
    let mut tenant = Conversation::with_context("limits", &sim, &pages);
    let kernel = tenant.must("kernel 0");
    arbiter.set(GATE_OPEN);
    tenant.must(&format!("launch {kernel}"));
    tenant.must("sync");
    let epoch = arbiter.close();
    let flight = flight_of(&tenant);
    flight.invited.store(gate_word(epoch, GATE_CLOSED), Ordering::SeqCst);
    tenant.must(&format!("launch {kernel}"));
    assert_eq!(flight.in_flight().operations, 1);
    // `cuLaunchCooperativeKernelMultiDevice`: the other streams would not wait.
    tenant.send(&format!("launch {kernel} 3"));
    std::thread::sleep(QUIET);
    assert_eq!((flight.in_flight().operations, flight.waiting.load(Ordering::SeqCst)), (1, 1));
    arbiter.open();
    flight.release();
    assert_eq!(tenant.reply("launch").result, 0);
    assert!(tenant.finish().success());
}

#[test]
fn it_runs_in_the_tenants_part_of_the_cycle_when_the_arbiter_is_dead() {
    let stage = Stage::new();
    let (arbiter, mut tenant, _, _) = invited(&stage);
    tenant.must("turns 1 kernel 1 1 1000");
    arbiter.dies();
    // It ends only when it has run.
    tenant.must("sync");
    assert!(tenant.finish().success());
}

/// That one closes the gate before it has the page in which it ends a wait for the turn.
#[test]
fn the_next_arbiter_hears_of_a_process_at_whatever_the_last_one_left_it() {
    const WORK: Duration = Duration::from_secs(2);
    for left_at in [None, Some(GATE_CLOSED), Some(GATE_OPEN), Some(GATE_YIELD), Some(GATE_SOLO)] {
        let stage = Stage::new();
        let (arbiter, mut tenant, flight, _) = invited(&stage);
        if left_at.is_some() {
            arbiter.open();
            flight.release();
        }
        // Behind a wait for the turn, or running.
        tenant.must(&format!("turns 1 kernel 1 1 {}", WORK.as_micros()));
        left_at.map(|state| arbiter.set(state));
        let begun = Instant::now();
        arbiter.dies();
        let next = Arbiter::take_on(&stage.pages);
        next.quota.set_takes_flight(true);
        let epoch = next.shut();
        next.hears_in_time(|m| matches!(m, Message::Hello { .. }));
        assert!(begun.elapsed() < WORK / 2, "{left_at:?}: after {:?}", begun.elapsed());
        flight.release();
        next.hears_in_time(|m| matches!(m, Message::Drained { epoch: of, .. } if *of == epoch));
        tenant.must("sync");
        assert!(tenant.finish().success());
    }
}

#[test]
fn a_gate_that_is_closed_again_is_drained_of_it() {
    let stage = Stage::new();
    let (arbiter, mut tenant, flight, _) = invited(&stage);
    tenant.must("turns 1 kernel 1 1 1000");
    let again = arbiter.shut();
    flight.release();
    arbiter.hears_in_time(|m| matches!(m, Message::Drained { epoch, .. } if *epoch == again));
    assert!(stage.worked_ns(&tenant) >= 1_000_000, "not before it has run");
    tenant.must("sync");
    assert!(tenant.finish().success());
}
