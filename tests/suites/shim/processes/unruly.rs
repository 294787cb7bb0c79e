//! Programs whose threads are in the driver while something happens to them or to the process.

use tessera_harness::{CProgram, MIB, Output, Pages, Preloaded, SimGpu, compile_c};

/// Runs `tests/programs/unruly.c` under a quota; afterwards nothing may be charged.
fn unruly(what: &str) -> Output {
    unruly_as(&compile_c("unruly"), what)
}

fn unruly_as(program: &std::path::Path, what: &str) -> Output {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
    let preloaded = Preloaded::new(program).sim(&sim).pages(&pages);
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

#[test]
fn forks_in_threads_that_exec_end_or_use_the_driver_go_unnoticed() {
    let out = unruly("fork");
    assert_eq!((out.value("failures"), out.stderr.as_str()), ("0 usable 1", ""));
}

#[test]
fn spawned_programs_go_unnoticed() {
    let out = unruly("spawn");
    assert_eq!((out.value("failures"), out.stderr.as_str()), ("0 usable 1", ""));
}

#[test]
fn threads_may_load_the_driver_all_at_once_and_unload_it() {
    let out = unruly("late");
    assert_eq!((out.value("failures"), out.stderr.as_str()), ("0 usable 1", ""));
}

#[test]
fn closing_every_descriptor_while_threads_allocate_loses_nothing() {
    let out = unruly("close");
    assert_eq!(out.value("failures"), "0 usable 1");
}

#[test]
fn a_program_linked_statically_is_left_alone() {
    let program = CProgram::new("plain").flag("-static").build();
    let (bare, shim) = (Preloaded::bare(&program).run(), Preloaded::new(&program).run());
    assert!(bare.success(), "{bare}");
    assert_eq!((shim.status, shim.stdout, shim.stderr), (bare.status, bare.stdout, bare.stderr));
}
