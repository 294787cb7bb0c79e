//! Green contexts under a quota: they are other handles of the primary context, which is charged once,
//! owns what is obtained in them, and ends with the last that retains it.

use tessera_harness::{MIB, Output, Pages, Preloaded, SimGpu, compile_c};

const OVERHEAD: u64 = 64 * MIB;

fn green(what: &str, quota_mib: u64, last_mib: u64) -> (Output, Pages) {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), quota_mib * MIB)], OVERHEAD);
    let program = Preloaded::new(compile_c("green")).sim(&sim).pages(&pages);
    (program.arg(what).arg(last_mib.to_string()).run(), pages)
}

#[test]
fn four_green_contexts_are_charged_as_one_context() {
    // Four allocations of 16 MiB and one context fill the quota; afterwards all but a context is free.
    let (out, pages) = green("many", 128, 64);
    assert!(out.success(), "{out}");
    assert_eq!((out.value("used"), out.value("again")), ("128", "0"), "{out}");
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn green_contexts_that_come_and_go_beside_the_primary_one_leave_nothing() {
    let (out, pages) = green("beside", 128, 64);
    assert!(out.success(), "{out}");
    assert_eq!((out.value("used"), out.value("again")), ("128", "0"), "{out}");
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn a_green_context_whose_primary_context_does_not_fit_is_refused() {
    let (out, pages) = green("refused", 63, 0);
    assert!(out.success(), "{out}");
    assert_eq!(out.number("create"), 2, "CUDA_ERROR_OUT_OF_MEMORY: {out}");
    assert_eq!(pages.charged(0), 0);
}
