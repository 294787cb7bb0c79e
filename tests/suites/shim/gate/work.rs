//! The gate, from outside: an arbiter of the test's opens and closes it, tenants put work on the
//! simulated GPU, and the simulator's own account says what ran.

use std::time::Duration;

use tessera_harness::gate::{Stage, is_over};
use tessera_harness::{CProgram, Conversation, Preloaded};

/// Time for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(60);

/// What waits at a closed gate.
const HELD: &[&str] = &[
    "kernel",
    "kernel_ex",
    "graph",
    "fill",
    "fill32",
    "fill2d",
    "fill_sync",
    "fill_own",
    "copy",
    "copy_sync",
    "copy_any",
    "copy_any_sync",
    "copy_peer",
    "copy2d",
    "copy3d",
];

/// What does not: it touches host memory.
const FREE: &[&str] =
    &["up", "down", "up_sync", "up_any", "down_any", "up_any_sync", "up2d", "down3d"];

/// Starts each of these in a thread of its own; the threads' numbers begin at `first`.
fn start(tenant: &mut Conversation, first: usize, what: &[&str], stream: &str) {
    for (i, what) in what.iter().enumerate() {
        tenant.must(&format!("start {} {what} {stream} 500", first + i));
    }
}

fn join(tenant: &mut Conversation, first: usize, what: &[&str]) {
    for (i, what) in what.iter().enumerate() {
        let reply = tenant.ask(&format!("join {}", first + i));
        assert_eq!(reply.result, 0, "{what}: {reply}");
    }
}

/// All work of the GPU's waits, from every thread, whatever the stream; nothing runs while the gate
/// is closed, and all of it runs when it is opened.
fn holds_in(stream: &str, program: Preloaded) {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant_of(program);
    tenant.must("graph 500");
    // The legacy stream takes no batches.
    let mut held = HELD.to_vec();
    let mut free = FREE.to_vec();
    if stream != "legacy" {
        held.push("batch");
        free.push("up_batch");
    }
    start(&mut tenant, 0, &held, stream);
    arbiter.await_want(tenant.pid());
    start(&mut tenant, held.len(), &free, stream);
    join(&mut tenant, held.len(), &free);
    std::thread::sleep(A_WHILE);
    for (worker, what) in held.iter().enumerate() {
        assert!(!is_over(&mut tenant, worker), "{what} in {stream} passed a closed gate");
    }
    assert_eq!(stage.sim.worked(0, tenant.pid()).kernels, 0);
    assert_eq!(stage.worked_ns(&tenant), 0, "{stream}");

    arbiter.open();
    join(&mut tenant, 0, &held);
    arbiter.close_and_drain(&[tenant.pid()]);
    let worked = stage.worked_ns(&tenant);
    // In streams of their own they run at once.
    let kernels = stage.sim.worked(0, tenant.pid()).kernels;
    assert!(kernels >= 3 && worked >= 500_000, "{kernels} kernels, {worked} ns");
    start(&mut tenant, 0, &held, stream);
    std::thread::sleep(A_WHILE);
    assert_eq!(stage.worked_ns(&tenant), worked, "{stream}: after it was drained");
    arbiter.solo();
    join(&mut tenant, 0, &held);
    let out = tenant.finish();
    assert!(out.success() && out.stderr.is_empty(), "{out}");
}

macro_rules! holds {
    ($($(#[$doc:meta])* $name:ident: $stream:literal $($flag:literal)*,)*) => { $(
        $(#[$doc])*
        #[test]
        fn $name() {
            let program = CProgram::new("gate_work")$(.flag($flag))*;
            holds_in($stream, Preloaded::new(program.build()));
        }
    )* };
}

holds! {
    a_closed_gate_holds_all_work_in_the_legacy_stream: "legacy",
    a_closed_gate_holds_all_work_in_blocking_streams: "0",
    a_closed_gate_holds_all_work_in_non_blocking_streams: "1",
    /// Static TLS lies on each thread's stack, the helper's too (`ld.so`, "Static TLS block").
    a_program_with_large_static_tls_drains: "own" "-DSTATIC_TLS=(3<<20)",
    /// As libcudart asks for its functions when built with `--default-stream per-thread`.
    a_closed_gate_holds_what_comes_by_cu_get_proc_address: "own" "-DPROC_ADDRESS" "-DPER_THREAD",
}

#[test]
fn all_processes_of_a_tenant_wait_and_all_have_drained() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenants = [stage.tenant(), stage.tenant(), stage.tenant()];
    for tenant in &mut tenants {
        start(tenant, 0, &["kernel", "copy"], "1");
        arbiter.await_want(tenant.pid());
    }
    std::thread::sleep(A_WHILE);
    for tenant in &mut tenants {
        assert!(!is_over(tenant, 0) && !is_over(tenant, 1));
        assert_eq!(stage.worked_ns(tenant), 0);
    }
    arbiter.open();
    for tenant in &mut tenants {
        join(tenant, 0, &["kernel", "copy"]);
        tenant.must("do kernel legacy 20000");
    }
    let pids = tenants.each_ref().map(Conversation::pid);
    arbiter.close_and_drain(&pids);
    // All have run what they launched, and nothing more.
    let worked = tenants.each_ref().map(|tenant| stage.worked_ns(tenant));
    assert!(worked.iter().all(|ns| *ns >= 20_500_000), "{worked:?}");
    std::thread::sleep(A_WHILE);
    assert_eq!(tenants.each_ref().map(|tenant| stage.worked_ns(tenant)), worked);
}

/// Handle 2 is another stream in each thread (CUDA Driver API, "Stream synchronization behavior"): no other thread can mark
/// what goes into it.
#[test]
fn what_a_thread_has_in_its_own_stream_is_in_flight_until_it_is_done() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    for what in ["fill", "fill", "kernel"] {
        tenant.must(&format!("do {what} own 100000"));
    }
    // Another thread marks what there is.
    start(&mut tenant, 0, &["copy"], "own");
    join(&mut tenant, 0, &["copy"]);
    arbiter.close_and_drain(&[tenant.pid()]);
    let worked = stage.worked_ns(&tenant);
    assert!(worked >= 100_000_000, "{worked} ns when it had drained");
}

/// Closings that follow each other, each as soon as it is said that all stands still: the launch that is
/// waited for may be one of the process's own, behind what stands still.
#[test]
fn a_launch_behind_what_stands_still_passes_however_soon_the_gate_is_closed_again() {
    // One that passed by luck is no proof.
    (0..5).for_each(|_| passes_behind_what_stands_still(100));
}

fn passes_behind_what_stands_still(most: usize) {
    use tessera_region::session::Message;
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    for what in ["kernel", "hold", "kernel"] {
        tenant.must(&format!("do {what} 1 100"));
    }
    let mut epoch = arbiter.shut();
    start(&mut tenant, 0, &["kernel"], "1");
    arbiter.await_want(tenant.pid());
    let passed = (0..most).any(|_| {
        arbiter.await_heard(tenant.pid(), |heard| {
            use tessera_harness::Heard::Said;
            matches!(heard, Said(Message::Idle { epoch: of, .. }) if *of == epoch)
        });
        epoch = arbiter.shut();
        is_over(&mut tenant, 0)
    });
    assert!(passed, "not in {most} closings");
    tenant.must("unhold");
    arbiter.open();
    join(&mut tenant, 0, &["kernel"]);
}

/// What another process of the tenant has in flight waits for launches of this one: at most so many pass, and all of them
/// where its threads are on time.
#[test]
fn at_a_gate_closed_again_as_many_launches_pass_as_the_process_is_behind() {
    const BEHIND: u32 = 5;
    const STARTED: &[&str] = &["kernel"; 8];
    const KERNEL_NS: u64 = 500_000;
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    arbiter.quota.set_takes_flight(true);
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 500");
    let passed = [(); 5].map(|()| {
        arbiter.close_and_drain(&[tenant.pid()]);
        let before = stage.worked_ns(&tenant);
        start(&mut tenant, 0, STARTED, "1");
        arbiter.await_want(tenant.pid());
        std::thread::sleep(A_WHILE);
        let flight = super::ahead::flight_of(&tenant);
        flight.behind.store(BEHIND, std::sync::atomic::Ordering::Relaxed);
        arbiter.close_and_drain(&[tenant.pid()]);
        let passed = (stage.worked_ns(&tenant) - before) / KERNEL_NS;
        arbiter.open();
        join(&mut tenant, 0, STARTED);
        passed
    });
    assert_eq!(passed.iter().max(), Some(&u64::from(BEHIND)), "{passed:?}");
}

#[test]
fn launches_into_a_capture_pass_a_closed_gate_and_draining_leaves_no_trace_in_it() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    for mode in [0, 1, 2] {
        tenant.must("do kernel 0 10000");
        tenant.must("do kernel 1 10000");
        // A stream that has been worked in is captured, with another one that joins it.
        tenant.must(&format!("begin 1 {mode}"));
        let joining = tenant.must("stream");
        tenant.must(&format!("do kernel {joining} 1000"));
        let epoch = arbiter.shut();
        for what in ["kernel", "fill", "copy", "kernel"] {
            tenant.must(&format!("do {what} 1 1000"));
        }
        tenant.must(&format!("fork_capture 1 {joining}"));
        assert_eq!(tenant.ask(&format!("capturing {joining}")).values, [1], "mode {mode}");
        std::thread::sleep(A_WHILE);
        assert_eq!(tenant.ask("capturing 1").values, [1], "mode {mode}: still, and valid");
        // 4 in the stream, 1 in the one that joined.
        assert_eq!(tenant.must("end 1"), 5, "mode {mode}: the application's own nodes");
        arbiter.await_drained(tenant.pid(), epoch);
        assert_eq!(tenant.ask("capturing 1").values, [0]);
        arbiter.open();
        assert_eq!(tenant.ask("sync").result, 0, "no error is left behind");
        tenant.must("do kernel 1 1000");
        tenant.must(&format!("destroy {joining}"));
    }
    arbiter.close_and_drain(&[tenant.pid()]);
}

/// What went into a stream before it was destroyed still runs, and is waited for.
#[test]
fn a_stream_destroyed_while_it_drains_is_drained() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    for round in 0..4 {
        arbiter.open();
        let stream = tenant.must("stream");
        let before = stage.worked_ns(&tenant);
        tenant.must(&format!("do kernel {stream} 40000"));
        let epoch = if round % 2 == 0 {
            let epoch = arbiter.shut();
            tenant.must(&format!("destroy {stream}"));
            epoch
        } else {
            tenant.must(&format!("destroy {stream}"));
            arbiter.shut()
        };
        arbiter.await_drained(tenant.pid(), epoch);
        let worked = stage.worked_ns(&tenant) - before;
        assert!(worked >= 40_000_000, "round {round}: {worked} ns");
    }
    arbiter.open();
    assert_eq!(tenant.ask("sync").result, 0);
}

#[test]
fn a_context_destroyed_or_reset_while_it_drains_does_no_harm() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    tenant.must("do kernel 1 1000");
    for _ in 0..4 {
        tenant.must("context");
        // A fill needs no module of the new context's.
        tenant.must("do fill legacy 0");
        let epoch = arbiter.shut();
        tenant.must("leave");
        arbiter.await_drained(tenant.pid(), epoch);
        arbiter.open();
        tenant.must("do kernel 1 1000");
    }
    tenant.must("do kernel 1 20000");
    let epoch = arbiter.shut();
    tenant.must("reset");
    arbiter.await_drained(tenant.pid(), epoch);
    let out = tenant.finish();
    assert!(out.success() && out.stderr.is_empty(), "{out}");
}

/// Another user gives its reference up; the context and its work live on.
#[test]
fn what_runs_in_a_primary_context_is_awaited_after_one_of_its_users_has_released_it() {
    let stage = Stage::new();
    let mut arbiter = stage.arbiter();
    let mut tenant = stage.tenant();
    arbiter.open();
    for stream in ["1", "legacy"] {
        let before = stage.worked_ns(&tenant);
        tenant.must("retain");
        tenant.must(&format!("do kernel {stream} 60000"));
        tenant.must("release");
        arbiter.close_and_drain(&[tenant.pid()]);
        let worked = stage.worked_ns(&tenant) - before;
        assert!(worked >= 60_000_000, "stream {stream}: {worked} ns");
        arbiter.open();
    }
    // The last one's release ends it, and what is in flight with it.
    tenant.must("do kernel 1 20000");
    tenant.must("release");
    arbiter.close_and_drain(&[tenant.pid()]);
    let out = tenant.finish();
    assert!(out.success() && out.stderr.is_empty(), "{out}");
}
