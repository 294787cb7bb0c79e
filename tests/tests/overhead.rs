//! Memory that no hook sees: published by the plugin, it counts against the quota and shows in
//! every view.

use tessera_tests::{Conversation, MIB, Pages, Preloaded, SimGpu, compile_c};

const OUT_OF_MEMORY: i64 = 2;

/// A tenant of `pages` with a context on GPU 0.
fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    let program = Preloaded::new(compile_c("calls")).sim(sim).pages(pages);
    let mut tenant = Conversation::start(program);
    tenant.must("init");
    tenant.must("retain 0");
    tenant
}

#[test]
fn observed_overhead_shows_in_every_view_and_leaves_the_total_alone() {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), 300 * MIB)]);
    let mut tenant = tenant(&sim, &pages);
    tenant.must("alloc 104857600");
    for overhead in [0, 60 * MIB, 20 * MIB, 250 * MIB] {
        pages.quota().set_observed_overhead(0, overhead);
        let free = (200 * MIB).saturating_sub(overhead);
        assert_eq!(tenant.ask("info").values, [free, 300 * MIB]);
        assert_eq!(tenant.must("total 0"), 300 * MIB);
        assert_eq!(tenant.ask("nvml 0").values, [300 * MIB, free, 300 * MIB - free]);
        assert_eq!(tenant.ask("nvml2 0").values, [300 * MIB, 0, free, 300 * MIB - free]);
    }
}

#[test]
fn observed_overhead_counts_against_the_quota_and_the_refusal_says_so() {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), 300 * MIB)]);
    let mut tenant = tenant(&sim, &pages);
    tenant.must("alloc 104857600");
    pages.quota().set_observed_overhead(0, 50 * MIB);
    assert_eq!(tenant.ask("alloc 157286401").result, OUT_OF_MEMORY);
    tenant.must("alloc 157286400");
    assert_eq!(tenant.must("info"), 0);
    let said = tenant.finish().stderr;
    assert!(said.contains("150 MiB of its 300 MiB"), "{said}");
    assert!(said.contains("50 MiB of it for contexts"), "{said}");
}

#[test]
fn a_refusal_shows_what_is_granted_and_not_what_racing_requests_ask_for() {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), 600 * MIB)]);
    let mut tenant = tenant(&sim, &pages);
    // 40 threads ask for 96 MiB each at once: six fit.
    assert_eq!(tenant.ask("race 40 100663296").values[0], 6);
    let said = tenant.finish().stderr;
    let used = said.split("container has ").nth(1).and_then(|rest| rest.split(" MiB").next());
    let used: u64 = used.and_then(|used| used.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    assert!(used <= 576 && used % 96 == 0, "{said}");
}
