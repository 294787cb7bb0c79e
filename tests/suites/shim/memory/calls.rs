//! The memory quota as a tenant meets it, over every call that obtains device memory.

use crate::{OUT_OF_MEMORY, SUCCESS, both, held, quota, ready};
use tessera_harness::{
    CProgram, Conversation, GIB, MIB, Pages, Preloaded, Reply, SimGpu, compile_c,
};

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("calls", sim, pages)
}

/// The same program without shim or quota.
fn bare(sim: &SimGpu) -> Conversation {
    ready(Preloaded::bare(compile_c("calls")).sim(sim))
}

fn free_bytes(tenant: &mut Conversation) -> u64 {
    tenant.must("info")
}

/// Asks until the first refusal; the addresses that were granted, and the refusal.
fn until_refused(tenant: &mut Conversation, command: &str) -> (Vec<u64>, Reply) {
    let mut granted = Vec::new();
    loop {
        let reply = tenant.ask(command);
        if reply.result != SUCCESS {
            return (granted, reply);
        }
        granted.push(reply.ok());
        assert!(granted.len() < 10_000, "`{command}` is never refused");
    }
}

#[test]
fn every_call_that_obtains_memory_stops_at_the_limit() {
    let sim = SimGpu::start_default();
    // (obtain, release), 16 MiB each; the row of the pitched one is wide enough to need no padding.
    for (obtain, release) in [
        ("alloc 16777216", "free"),
        ("managed 16777216", "free"),
        ("async 16777216", "free_async"),
        ("pool 0 16777216", "free_async"),
        ("pitch 1048576 16 4", "free"),
    ] {
        let pages = Pages::create(&[(sim.uuid(0), 100 * MIB)]);
        let mut tenant = tenant(&sim, &pages);
        let (granted, refused) = until_refused(&mut tenant, obtain);
        assert_eq!((granted.len(), refused.result), (6, OUT_OF_MEMORY), "{obtain}");
        assert_eq!(free_bytes(&mut tenant), 4 * MIB, "{obtain}");
        // What fits still fits.
        let small = tenant.must("alloc 4194304");
        tenant.must(&format!("free {small}"));
        for pointer in granted {
            tenant.must(&format!("{release} {pointer}"));
        }
        tenant.must("sync");
        assert_eq!(free_bytes(&mut tenant), 100 * MIB, "{obtain}");
        assert_eq!(until_refused(&mut tenant, obtain).0.len(), 6, "{obtain} after a full round");
    }
}

/// The request in the application's own words, beside what is in use and may be, in sizes of one kind.
#[test]
fn a_refusal_names_what_was_asked_for() {
    let sim = SimGpu::start_default();
    for (ask, name, asked) in [
        ("alloc 41943040", "cuMemAlloc", "40 MiB"),
        ("alloc 41943041", "cuMemAlloc", "40.000 MiB"),
        ("managed 41943040", "cuMemAllocManaged", "40 MiB"),
        ("pitch 1048576 40 4", "cuMemAllocPitch", "40 MiB"),
        // The pool would grow by a chunk, or by part of it.
        ("async 4194304", "cuMemAllocAsync", "4 MiB, for which the driver would take 32 MiB"),
        ("pool 0 41943040", "cuMemAllocFromPoolAsync", "40 MiB"),
    ] {
        // A context that is charged nothing, and 26,214,401 bytes of it that whole pages round up.
        let pages = Pages::create(&[(sim.uuid(0), 56 * MIB)]);
        let mut tenant = tenant(&sim, &pages);
        tenant.must("alloc 26214401");
        assert_eq!(tenant.ask(ask).result, OUT_OF_MEMORY, "{ask}");
        let asked_bytes = pages.snapshot().slots[0].last_refused_bytes;
        let said = tenant.finish().stderr;
        let line = said.lines().find(|line| line.contains("out of memory")).expect(&said);
        let begin = format!("tessera: out of memory: {name} asks for {asked}");
        assert!(line.starts_with(&begin), "{ask}: {line}");
        assert!(line.contains("has 26 MiB of its 56 MiB"), "{ask}: {line}");
        assert!(line.ends_with("or ask for a larger share"), "it says what to do: {line}");
        let mebibytes = asked.split(['.', ' ']).next().and_then(|number| number.parse().ok());
        assert_eq!(Some(asked_bytes / MIB), mebibytes, "{ask}");
    }
}

#[test]
fn every_way_of_reaching_the_driver_is_held_to_the_quota() {
    let sim = SimGpu::start_default();
    for (way, program) in [
        ("dlsym", CProgram::new("calls")),
        ("linked", CProgram::new("calls").flag("-DLINKED").links_driver()),
        ("cuGetProcAddress", CProgram::new("calls").flag("-DPROC_ADDRESS")),
        ("per-thread streams", CProgram::new("calls").flag("-DPROC_ADDRESS").flag("-DPER_THREAD")),
    ] {
        let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
        let mut tenant = ready(Preloaded::new(program.build()).sim(&sim).pages(&pages));
        assert_eq!(tenant.must("total 0"), 64 * MIB, "{way}");
        for obtain in ["alloc", "managed", "async", "pool 0"] {
            let refused = tenant.ask(&format!("{obtain} 67108865"));
            assert_eq!(refused.result, OUT_OF_MEMORY, "{way}: {refused}");
            let granted = tenant.must(&format!("{obtain} 67108864"));
            let release =
                if obtain == "alloc" || obtain == "managed" { "free" } else { "free_async" };
            tenant.must(&format!("{release} {granted}"));
            tenant.must("sync");
        }
        tenant.must("launch");
        tenant.must("sync");
        assert_eq!(free_bytes(&mut tenant), 64 * MIB, "{way}");
    }
}

#[test]
fn a_pitched_allocation_is_charged_what_the_driver_made_of_it() {
    let (_sim, _pages, mut tenant) = held("calls", 64 * MIB);
    let reply = tenant.ask("pitch 1000 1000 4");
    let (pointer, pitch) = (reply.ok(), reply.values[1]);
    assert!(pitch > 1000, "rows are padded: {pitch}");
    assert_eq!(free_bytes(&mut tenant), 64 * MIB - pitch * 1000);
    tenant.must(&format!("free {pointer}"));
    assert_eq!(free_bytes(&mut tenant), 64 * MIB);
    // Padded, it does not fit, though width times height would.
    let rows = 64 * MIB / 1000;
    assert_eq!(tenant.ask(&format!("pitch 1000 {rows} 4")).result, OUT_OF_MEMORY);
    assert_eq!(free_bytes(&mut tenant), 64 * MIB);
}

#[test]
fn sizes_that_overflow_are_refused_and_charge_nothing() {
    let (_sim, _pages, mut tenant) = held("calls", 64 * MIB);
    tenant.must("alloc 1048576");
    for command in [
        "alloc 18446744073709551615",
        "managed 18446744073709551615",
        "async 18446744073709551615",
        "alloc 9223372036854775808",
        "pitch 18446744073709551615 2 4",
        "pitch 4294967296 4294967296 4",
    ] {
        let reply = tenant.ask(command);
        assert_ne!(reply.result, SUCCESS, "{reply}");
        assert_eq!(free_bytes(&mut tenant), 63 * MIB, "after {reply}");
    }
}

#[test]
fn a_second_free_is_the_drivers_affair_and_gives_nothing_back() {
    let (sim, pages) = quota(64 * MIB);
    let (mut tenant, mut bare) = (tenant(&sim, &pages), bare(&sim));
    let twice = |process: &mut Conversation| {
        let kept = process.must("alloc 1048576");
        let pointer = process.must("alloc 1048576");
        process.must(&format!("free {pointer}"));
        let again = process.ask(&format!("free {pointer}")).result;
        process.must(&format!("free {kept}"));
        again
    };
    assert_eq!(twice(&mut tenant), twice(&mut bare));
    assert_eq!(free_bytes(&mut tenant), 64 * MIB);
}

#[test]
fn either_free_releases_either_kind() {
    let (_sim, _pages, mut tenant) = held("calls", 64 * MIB);
    for (obtain, release) in [("alloc 67108864", "free_async"), ("async 67108864", "free")] {
        for _ in 0..3 {
            let pointer = tenant.must(obtain);
            tenant.must(&format!("{release} {pointer}"));
            tenant.must("sync");
            assert_eq!(free_bytes(&mut tenant), 64 * MIB, "{obtain}, {release}");
        }
    }
}

#[test]
fn host_memory_is_not_charged() {
    let (_sim, _pages, mut tenant) = held("calls", 16 * MIB);
    let host = tenant.must("host 67108864");
    assert_eq!(free_bytes(&mut tenant), 16 * MIB);
    tenant.must(&format!("host_free {host}"));
    assert_eq!(free_bytes(&mut tenant), 16 * MIB);
}

#[test]
fn the_functions_of_cuda_2_are_held_to_the_quota_and_saturate() {
    let (sim, pages) = both(64 * MIB, 6 * GIB);
    let mut tenant = tenant(&sim, &pages);
    assert_eq!(tenant.ask("alloc1 67108865").result, OUT_OF_MEMORY);
    assert_eq!(tenant.ask("info1").values, [64 * MIB, 64 * MIB]);
    assert_eq!(tenant.must("total1 0"), 64 * MIB);
    // 6 GiB does not fit into 32 bits.
    assert_eq!(tenant.must("total1 1"), u64::from(u32::MAX));
}

#[test]
fn without_a_context_calls_fail_as_on_the_bare_driver() {
    let (sim, pages) = both(64 * MIB, 64 * MIB);
    let program = compile_c("calls");
    let mut tenant = Conversation::start(Preloaded::new(&program).sim(&sim).pages(&pages));
    let mut bare = Conversation::start(Preloaded::bare(&program).sim(&sim));
    // Before and after cuInit, with no context current.
    for prepare in ["count", "init"] {
        assert_eq!(tenant.ask(prepare).result, bare.ask(prepare).result, "{prepare}");
        for command in [
            "alloc 1",
            "managed 1",
            "pitch 16 16 4",
            "async 1",
            "free 0",
            "info",
            "total 0",
            "sync",
        ] {
            let (seen, expected) = (tenant.ask(command), bare.ask(command));
            assert_eq!(seen.result, expected.result, "after {prepare}: {command}");
        }
    }
    assert_eq!(pages.charged(0) + pages.charged(1), 0);
}

#[test]
fn nvml_alone_shows_the_quota() {
    let (sim, pages) = both(300 * MIB, 200 * MIB);
    // As `nvidia-smi` does: no driver call before, or at all.
    let program = CProgram::new("calls").build();
    let mut monitor = Conversation::start(Preloaded::new(program).sim(&sim).pages(&pages));
    assert_eq!(monitor.ask("nvml 0").values, [300 * MIB, 300 * MIB, 0]);
    let mut tenant = tenant(&sim, &pages);
    tenant.must("alloc 104857600");
    assert_eq!(monitor.ask("nvml 0").values, [300 * MIB, 200 * MIB, 100 * MIB]);
}

#[test]
fn gpus_are_matched_by_uuid_and_limited_each() {
    let sim = SimGpu::start_default();
    // The page lists them in the other order.
    let pages = Pages::create(&[(sim.uuid(1), 32 * MIB), (sim.uuid(0), 64 * MIB)]);
    let mut tenant = tenant(&sim, &pages);
    assert_eq!((tenant.must("total 0"), tenant.must("total 1")), (64 * MIB, 32 * MIB));
    tenant.must("alloc 67108864");
    assert_eq!(tenant.ask("alloc 1").result, OUT_OF_MEMORY);
    tenant.must("retain 1");
    assert_eq!(tenant.ask("alloc 33554433").result, OUT_OF_MEMORY);
    tenant.must("alloc 33554432");
    assert_eq!((pages.charged(0), pages.charged(1)), (32 * MIB, 64 * MIB));
}

#[test]
fn a_visible_gpu_that_the_page_does_not_name_has_no_memory() {
    let (sim, pages) = quota(64 * MIB);
    let mut tenant = Conversation::tenant("calls", &sim, &pages);
    tenant.must("init");
    assert_eq!(tenant.must("total 1"), 0);
    // Refused with the context or, at the latest, with the allocation.
    if tenant.ask("retain 1").result == SUCCESS {
        assert_eq!(tenant.must("info"), 0);
        assert_eq!(tenant.ask("alloc 1").result, OUT_OF_MEMORY);
    }
    // The other GPU is as it should be.
    tenant.must("retain 0");
    tenant.must("alloc 67108864");
}

#[test]
fn a_limit_that_changes_counts_at_once() {
    let (_sim, pages, mut tenant) = held("calls", 256 * MIB);
    let held = tenant.must("alloc 134217728");
    pages.quota.set_memory_limit(0, 64 * MIB);
    // Below what is held: nothing is taken away, nothing more is given, nothing wraps round.
    assert_eq!(tenant.ask("info").values, [0, 64 * MIB]);
    assert_eq!(tenant.ask("nvml 0").values[1], 0);
    assert_eq!(tenant.ask("alloc 1").result, OUT_OF_MEMORY);
    tenant.must(&format!("fill {held} 1048576 7"));
    pages.quota.set_memory_limit(0, GIB);
    tenant.must("alloc 536870912");
    assert_eq!(free_bytes(&mut tenant), 384 * MIB);
}

#[test]
fn what_the_driver_refuses_within_the_limit_is_rolled_back() {
    let sim = SimGpu::start_default();
    // More than the GPU has.
    let pages = Pages::create(&[(sim.uuid(0), 64 * GIB)]);
    let mut tenant = tenant(&sim, &pages);
    assert_eq!(tenant.ask(&format!("alloc {}", 32 * GIB)).result, OUT_OF_MEMORY);
    assert_eq!(pages.charged(0), 0);
    assert_eq!(pages.snapshot().slots.iter().map(|slot| slot.did.driver_refusals).sum::<u64>(), 1);
    let said = tenant.finish().stderr;
    let line = said.lines().find(|line| line.starts_with("tessera: ")).expect(&said);
    assert!(
        line.contains("the driver refuses 32 GiB") && line.contains("the GPU itself is full"),
        "{line}"
    );
    assert!(line.ends_with("ask those who run the node"), "it says what to do: {line}");
}

#[test]
fn contexts_are_charged_and_give_back() {
    let sim = SimGpu::start_default();
    let overhead = 64 * MIB;
    let pages = Pages::with_overhead(&[(sim.uuid(0), 512 * MIB)], overhead);
    let mut tenant = Conversation::tenant("calls", &sim, &pages);
    tenant.must("init");
    assert_eq!(pages.charged(0), 0, "no context, no charge");

    tenant.must("retain 0");
    assert_eq!(tenant.ask("info").values, [448 * MIB, 512 * MIB]);
    tenant.must("retain 0");
    assert_eq!(free_bytes(&mut tenant), 448 * MIB, "one primary context, however often retained");
    tenant.must("release 0");
    assert_eq!(free_bytes(&mut tenant), 448 * MIB, "still retained once");

    let own = tenant.must("ctx 0");
    assert_eq!(free_bytes(&mut tenant), 384 * MIB);
    tenant.must("alloc 67108864");
    tenant.must(&format!("destroy {own}"));
    assert_eq!(pages.charged(0), overhead, "a context takes its allocations with it");

    tenant.must("release 0");
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn resetting_the_primary_context_gives_back_all_of_its_memory() {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), 512 * MIB)], 64 * MIB);
    let mut tenant = tenant(&sim, &pages);
    for obtain in ["alloc 1048576", "managed 1048576", "pitch 1000 10 4"] {
        tenant.must(obtain);
    }
    assert!(pages.charged(0) > 66 * MIB);
    tenant.must("reset 0");
    assert_eq!(pages.charged(0), 0);
    tenant.must("retain 0");
    tenant.must(&format!("alloc {}", 448 * MIB));
}

#[test]
fn a_context_that_does_not_fit_is_refused() {
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), 100 * MIB)], 64 * MIB);
    let mut first = tenant(&sim, &pages);
    let mut second = Conversation::tenant("calls", &sim, &pages);
    second.must("init");
    assert_eq!(second.ask("retain 0").result, OUT_OF_MEMORY);
    assert_eq!(second.ask("ctx 0").result, OUT_OF_MEMORY);
    first.must("release 0");
    second.must("retain 0");
}

/// The driver hands out whole 2 MiB pages for what is larger than half of one. Charged by what was
/// asked for, a loop of 2 MiB + 1 byte took 1.87 GiB of device memory under a quota of 1 GiB.
#[test]
fn awkward_sizes_take_no_more_device_memory_than_the_quota() {
    for bytes in [1, 513, MIB + 1, 2 * MIB + 1, 3 * MIB] {
        for call in ["alloc", "managed"] {
            // One each: a predecessor's memory would come back meanwhile.
            let (sim, pages) = quota(4 * MIB);
            let mut witness = bare(&sim);
            let mut tenant = tenant(&sim, &pages);
            let before = free_bytes(&mut witness);
            let (granted, refused) = until_refused(&mut tenant, &format!("{call} {bytes}"));
            assert_eq!(refused.result, OUT_OF_MEMORY);
            assert!(!granted.is_empty(), "{call} {bytes}");
            let taken = before - free_bytes(&mut witness);
            assert!(taken <= 4 * MIB, "{call} {bytes}: {taken} bytes of device memory");
        }
    }
}

#[test]
fn racing_processes_are_granted_exactly_what_fits() {
    let (sim, pages) = quota(512 * MIB);
    let mut tenants: Vec<_> = (0..8).map(|_| tenant(&sim, &pages)).collect();
    let command = format!("race 8 {}", 16 * MIB);
    tenants.iter_mut().for_each(|tenant| tenant.send(&command));
    let replies: Vec<_> = tenants.iter_mut().map(|tenant| tenant.reply(&command)).collect();
    let granted: u64 = replies.iter().map(Reply::ok).sum();
    assert_eq!(granted, 32, "{replies:?}");
    assert_eq!(pages.charged(0), 512 * MIB);
}

#[test]
fn the_plugin_sees_kinds_peaks_and_refusals() {
    let (_sim, pages, mut tenant) = held("calls", 128 * MIB);
    // The context is charged too, if only with nothing here.
    let before = pages.snapshot().slots[0].clone();
    let plain = tenant.must("alloc 33554432");
    tenant.must("managed 1048576");
    tenant.must("async 2097152"); // a chunk of 32 MiB
    tenant.must(&format!("free {plain}"));
    assert_eq!(tenant.ask("alloc 671088640").result, OUT_OF_MEMORY);
    tenant.must("launch");
    let snapshot = pages.snapshot();
    let [slot] = &snapshot.slots[..] else { panic!("{snapshot:?}") };
    assert_eq!(slot.pid_hint, tenant.pid());
    assert_eq!((slot.charged[0], slot.granted[0]), (33 * MIB, 33 * MIB));
    assert_eq!(slot.did.peak[0], 65 * MIB);
    assert_eq!((slot.allocations - before.allocations, slot.frees, slot.did.refusals), (3, 1, 1));
    assert_eq!(slot.last_refused_bytes, 640 * MIB);
    assert_eq!(slot.did.launches, 1);
    use tessera_region::layout::Kind;
    assert_eq!(slot.kinds[Kind::Plain as usize], 0);
    assert_eq!(slot.kinds[Kind::Managed as usize], MIB);
    assert_eq!(slot.kinds[Kind::Async as usize], 32 * MIB);
}
