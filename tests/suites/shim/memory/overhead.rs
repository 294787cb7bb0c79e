//! Memory that no hook sees: published by the plugin, it counts against the quota and shows in
//! every view.

use crate::{OUT_OF_MEMORY, held, observed, until_free};
use std::time::{Duration, Instant};

use tessera_harness::{Conversation, MIB, Output, Pages, Preloaded, SimGpu, compile_c};

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("calls", sim, pages)
}

#[test]
fn observed_overhead_shows_in_every_view_and_leaves_the_total_alone() {
    let (_sim, pages, mut tenant) = held("calls", 300 * MIB);
    tenant.must("alloc 104857600");
    for overhead in [0, 60 * MIB, 20 * MIB, 250 * MIB] {
        pages.quota.set_observed_overhead(0, overhead);
        let free = (200 * MIB).saturating_sub(overhead);
        assert_eq!(tenant.ask("info").values, [free, 300 * MIB]);
        assert_eq!(tenant.must("total 0"), 300 * MIB);
        assert_eq!(tenant.ask("nvml 0").values, [300 * MIB, free, 300 * MIB - free]);
        assert_eq!(tenant.ask("nvml2 0").values, [300 * MIB, 0, free, 300 * MIB - free]);
    }
}

#[test]
fn observed_overhead_counts_against_the_quota_and_the_refusal_says_so() {
    let (_sim, pages, mut tenant) = held("calls", 300 * MIB);
    tenant.must("alloc 104857600");
    pages.quota.set_observed_overhead(0, 50 * MIB);
    assert_eq!(tenant.ask("alloc 157286401").result, OUT_OF_MEMORY);
    tenant.must("alloc 157286400");
    assert_eq!(tenant.must("info"), 0);
    let said = tenant.finish().stderr;
    assert!(said.contains("150 MiB of its 300 MiB"), "{said}");
    assert!(said.contains("50 MiB of it for contexts"), "{said}");
}

#[test]
fn a_refusal_shows_what_is_granted_and_not_what_racing_requests_ask_for() {
    let (_sim, _pages, mut tenant) = held("calls", 600 * MIB);
    // 40 threads ask for 96 MiB each at once: six fit.
    assert_eq!(tenant.ask("race 40 100663296").values[0], 6);
    let said = tenant.finish().stderr;
    let used = said.split("container has ").nth(1).and_then(|rest| rest.split(" MiB").next());
    let used: u64 = used.and_then(|used| used.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    assert!(used <= 576 && used.is_multiple_of(96), "{said}");
}

/// What `processes.c` prints for one form of the list: result, count, then pids and bytes.
fn listed(out: &str, form: &str) -> Vec<u64> {
    let line = out.lines().find_map(|line| line.strip_prefix(&format!("{form} ")));
    let line = line.unwrap_or_else(|| panic!("no {form} in\n{out}"));
    line.split(' ').map(|word| word.parse().expect("a number")).collect()
}

#[test]
fn nvml_lists_the_tenants_own_processes_and_nobody_elses() {
    const SIZE: u64 = 7; // NVML_ERROR_INSUFFICIENT_SIZE
    let sim = SimGpu::start_default();
    let one = Pages::with_overhead(&[(sim.uuid(0), 600 * MIB)], 64 * MIB);
    let other = Pages::with_overhead(&[(sim.uuid(0), 600 * MIB)], 64 * MIB);
    let (mut first, mut second) = (tenant(&sim, &one), tenant(&sim, &one));
    let mut neighbour = tenant(&sim, &other);
    first.must("alloc 104857600");
    neighbour.must("alloc 209715200");
    // An even share each of what is seen beyond the charges.
    one.quota.set_observed_overhead(0, 20 * MIB);
    let mut own = vec![
        (u64::from(first.pid()), (64 + 100 + 10) * MIB),
        (u64::from(second.pid()), (64 + 10) * MIB),
    ];
    own.sort_unstable();
    let program = compile_c("processes");
    let out = Preloaded::new(&program).sim(&sim).pages(&one).run();
    assert!(out.success(), "{out}");
    let compute = "nvmlDeviceGetComputeRunningProcesses";
    for form in
        [compute, &format!("{compute}_v2"), &format!("{compute}_v3"), "details0", "details3"]
    {
        assert_eq!(listed(&out.stdout, &format!("{form}.size")), [SIZE, 2], "{form}");
        let found = listed(&out.stdout, form);
        assert_eq!(found[..2], [0, 2], "{form}");
        let mut found: Vec<_> = found[2..].chunks(2).map(|entry| (entry[0], entry[1])).collect();
        found.sort_unstable();
        assert_eq!(found, own, "{form}");
    }
    for form in [
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "details1",
        "details2",
    ] {
        assert_eq!(listed(&out.stdout, &format!("{form}.size")), [0, 0], "{form}");
        assert_eq!(listed(&out.stdout, form), [0, 0], "{form}");
    }
    assert_eq!(listed(&out.stdout, "details4")[0], 2, "NVML's own word on an impossible mode");
    assert_eq!(listed(&out.stdout, "utilization"), [6, 0], "none that could be distinguished");
    // The list adds up to what is used.
    let used: u64 = own.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(first.ask("nvml 0").values[2], used);
    // The dead are not listed, even before anybody takes their bytes back.
    second.kill();
    let out = Preloaded::new(&program).sim(&sim).pages(&one).run();
    let last = [0, 1, u64::from(first.pid()), (64 + 100 + 20) * MIB];
    assert_eq!(listed(&out.stdout, &format!("{compute}_v3")), last);
    // Bare, both tenants' processes are there, and the dead one's no longer than the driver has its memory.
    std::thread::sleep(Duration::from_millis(100));
    let out = Preloaded::bare(&program).sim(&sim).run();
    assert_eq!(listed(&out.stdout, &format!("{compute}_v3"))[1], 2);
}

/// GPUs whose modules cost far more than a context is charged.
const HEAVY_MODULES: &str = r#"
[memory]
context_overhead = "64MiB"
module_overhead = "100MiB"
teardown_ms = 1.0

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000002"
memory = "4GiB"
"#;

#[test]
fn a_quota_holds_with_what_modules_take_once_that_is_seen() {
    let sim = SimGpu::start(HEAVY_MODULES);
    let mut tenant = observed("calls", &sim, &[]);
    assert_eq!(tenant.must("info"), (600 - 64) * MIB, "the context's constant is charged at once");
    tenant.must("launch");
    tenant.must("sync");
    // 100 MiB of a module beyond the charges, in steps of 16.
    until_free(&mut tenant, (600 - 64 - 112) * MIB);
    assert_eq!(tenant.must("total 0"), 600 * MIB);
    assert_eq!(tenant.ask("nvml 0").values[1..], [424 * MIB, 176 * MIB]);
    let mut held = 0;
    while tenant.ask("alloc 8388608").result == 0 {
        held += 8 * MIB;
    }
    assert_eq!(held, 424 * MIB);
    // By NVML, without any shim: what the process holds is within its quota.
    let out = Preloaded::bare(compile_c("processes")).sim(&sim).run();
    let used = listed(&out.stdout, "nvmlDeviceGetComputeRunningProcesses_v3")[3];
    assert_eq!(used, (64 + 100 + 424) * MIB);
    assert!(used <= 600 * MIB);
}

#[test]
fn free_memory_is_the_same_before_and_after_while_the_observer_looks() {
    let sim = SimGpu::start(HEAVY_MODULES);
    let mut tenant = observed("calls", &sim, &[]);
    tenant.must("launch");
    tenant.must("sync");
    until_free(&mut tenant, 424 * MIB);
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        let before = tenant.must("info");
        // Small ones share a page, which the driver shows whole; large ones come and go.
        let (small, large) = (tenant.must("alloc 1000"), tenant.must("alloc 104857600"));
        assert_eq!(tenant.must("info"), before - 1024 - 100 * MIB);
        tenant.must("churn 20 33554432");
        tenant.must(&format!("free {small}"));
        tenant.must(&format!("free {large}"));
        assert_eq!(tenant.must("info"), before);
    }
}

/// Whether the driver counts imported memory for the importer, too, is not public.
#[test]
fn what_is_imported_is_no_overhead_whoever_it_counts_for() {
    for imports in ["maker", "both"] {
        let keys = format!("teardown_ms = 1.0\nimports = {imports:?}");
        let heavy = HEAVY_MODULES.replace("64MiB", "164MiB").replace("teardown_ms = 1.0", &keys);
        let sim = SimGpu::start(&heavy);
        let [mut exporter, mut importer] = [(); 2].map(|()| observed("vmm", &sim, &[]));
        let pointer = exporter.must("alloc 314572800");
        let name = exporter.ask(&format!("getipc {pointer}"));
        let words: Vec<String> = name.values.iter().map(u64::to_string).collect();
        let open = importer.must(&format!("openipc {}", words.join(" ")));
        // A second context is a reason to look; both take 164 MiB, of which 64 are charged.
        importer.must("ctx 0");
        let settled = (600 - 2 * 64 - 208) * MIB;
        let deadline = Instant::now() + Duration::from_secs(20);
        while importer.must("info") != settled {
            assert!(Instant::now() < deadline, "{imports}: {}", importer.must("info"));
            std::thread::sleep(Duration::from_millis(5));
        }
        // It stays, as looks go by.
        std::thread::sleep(Duration::from_millis(800));
        assert_eq!(importer.must("info"), settled, "{imports}");
        importer.must(&format!("closeipc {open}"));
        assert_eq!(importer.must("info"), settled, "{imports}");
    }
}

// === green contexts: other handles of the primary context, which is charged once, owns what is obtained in them, and
// ends with the last that retains it ===

const OVERHEAD: u64 = 64 * MIB;

fn green(what: &str, quota_mib: u64, last_mib: u64) -> (Output, Pages) {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), quota_mib * MIB)], OVERHEAD);
    let program = Preloaded::new(compile_c("green")).sim(&sim).pages(&pages);
    (program.arg(what).arg(last_mib.to_string()).run(), pages)
}

#[test]
fn green_contexts_are_charged_as_one_context_and_leave_nothing() {
    // Four allocations of 16 MiB and one context fill the quota; afterwards all but a context is free.
    for what in ["many", "beside"] {
        let (out, pages) = green(what, 128, 64);
        assert!(out.success(), "{out}");
        assert_eq!((out.value("used"), out.value("again")), ("128", "0"), "{out}");
        assert_eq!(pages.charged(0), 0, "{what}");
    }
}

#[test]
fn a_green_context_whose_primary_context_does_not_fit_is_refused() {
    let (out, pages) = green("refused", 63, 0);
    assert!(out.success(), "{out}");
    assert_eq!(out.number("create"), 2, "CUDA_ERROR_OUT_OF_MEMORY: {out}");
    assert_eq!(pages.charged(0), 0);
}
