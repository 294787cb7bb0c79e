//! Virtual memory management, held to the quota: CUDA Driver API, "Virtual Memory Management" and
//! "Multicast Object Management".

use crate::{OUT_OF_MEMORY, SUCCESS, both, held, quota};
use tessera_harness::{Conversation, MIB, Pages, SimGpu};
use tessera_region::layout::Kind;

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("vmm", sim, pages)
}

/// "The memory allocation will be freed when all outstanding mappings to the memory are unmapped and
/// when all outstanding references to the handle are also released" (`cuMemRelease`).
#[test]
fn memory_is_charged_until_its_last_mapping_and_its_last_reference_are_gone() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let range = tenant.must(&format!("reserve {}", 128 * MIB));
    assert_eq!(pages.charged(0), 0, "addresses are no memory");
    let handle = tenant.must(&format!("create 0 {}", 32 * MIB));
    assert_eq!(pages.charged(0), 32 * MIB);
    tenant.must(&format!("map {range} {} {handle}", 32 * MIB));
    tenant.must(&format!("fill {range} {}", 32 * MIB));
    tenant.must(&format!("release {handle}"));
    assert_eq!(pages.charged(0), 32 * MIB, "mapped");
    let again = tenant.must(&format!("retained {}", range + MIB));
    tenant.must(&format!("unmap {range} {}", 32 * MIB));
    assert_eq!(pages.charged(0), 32 * MIB, "retained");
    tenant.must(&format!("release {again}"));
    assert_eq!(pages.charged(0), 0);
    assert_eq!(pages.snapshot().slots[0].kinds[Kind::Vmm as usize], 0);
}

#[test]
fn what_does_not_fit_is_refused_and_fits_again_after_a_release() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    for _ in 0..3 {
        let mut handles = Vec::new();
        loop {
            let reply = tenant.ask(&format!("create 0 {}", 16 * MIB));
            if reply.result != SUCCESS {
                assert_eq!(reply.result, OUT_OF_MEMORY);
                break;
            }
            handles.push(reply.ok());
        }
        assert_eq!(handles.len(), 4);
        assert_eq!(tenant.ask("info").values, [0, 64 * MIB]);
        for handle in handles {
            tenant.must(&format!("release {handle}"));
        }
        assert_eq!(tenant.must("info"), 64 * MIB);
    }
    // Sizes that no quota holds, and those that the driver rejects, charge nothing.
    for bytes in ["18446744073709551615", "18446744071562067968", "1000", "0"] {
        assert_ne!(tenant.ask(&format!("create 0 {bytes}")).result, SUCCESS, "{bytes}");
        assert_eq!(pages.charged(0), 0, "{bytes}");
    }
}

/// "This creates a memory allocation on the target device specified through the prop structure"
/// (`cuMemCreate`), whatever context is current.
#[test]
fn memory_is_charged_where_its_location_says() {
    let (sim, pages) = both(64 * MIB, 32 * MIB);
    let mut tenant = tenant(&sim, &pages);
    let handle = tenant.must(&format!("create 1 {}", 32 * MIB));
    assert_eq!((pages.charged(0), pages.charged(1)), (0, 32 * MIB));
    assert_eq!(tenant.ask(&format!("create 1 {}", 2 * MIB)).result, OUT_OF_MEMORY);
    tenant.must(&format!("release {handle}"));
    let host = tenant.ask(&format!("host {}", 128 * MIB));
    assert_ne!(host.result, OUT_OF_MEMORY, "host memory is not the quota's: {host}");
    assert_eq!((pages.charged(0), pages.charged(1)), (0, 0));
}

/// One unmap of "the entire contiguous address range that was mapped to" covers all its mappings.
#[test]
fn one_unmap_ends_several_mappings_and_a_failed_one_none() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let range = tenant.must(&format!("reserve {}", 16 * MIB));
    for part in 0..4 {
        let handle = tenant.must(&format!("create 0 {}", 4 * MIB));
        tenant.must(&format!("map {} {} {handle}", range + part * 4 * MIB, 4 * MIB));
        // Mapped there already: the driver refuses, and nothing more is held.
        let twice = format!("map {} {} {handle}", range + part * 4 * MIB, 4 * MIB);
        assert_ne!(tenant.ask(&twice).result, SUCCESS);
        tenant.must(&format!("release {handle}"));
    }
    // "cuMemUnmap cannot unmap a sub-range of an address range mapped by cuMemMap"
    assert_ne!(tenant.ask(&format!("unmap {} {}", range + 2 * MIB, 4 * MIB)).result, SUCCESS);
    assert_eq!(pages.charged(0), 16 * MIB);
    tenant.must(&format!("unmap {range} {}", 8 * MIB));
    assert_eq!(pages.charged(0), 8 * MIB);
    tenant.must(&format!("unmap {} {}", range + 8 * MIB, 8 * MIB));
    assert_eq!(pages.charged(0), 0);
}

/// "cuCtxDestroy() will not destroy memory allocations by cuMemCreate()".
#[test]
fn a_contexts_end_leaves_it_and_the_processs_end_does_not() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let context = tenant.must("ctx 0");
    let handle = tenant.must(&format!("create 0 {}", 8 * MIB));
    tenant.must(&format!("destroy {context}"));
    assert_eq!(pages.charged(0), 8 * MIB);
    tenant.must(&format!("release {handle}"));
    assert_eq!(pages.charged(0), 0);
    tenant.must(&format!("create 0 {}", 8 * MIB));
    tenant.kill();
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn a_multicast_binding_holds_memory_until_it_or_its_object_ends() {
    let (sim, pages) = both(64 * MIB, 64 * MIB);
    let mut tenant = tenant(&sim, &pages);
    for unbind in [true, false] {
        let object = tenant.ask(&format!("multicast 2 {}", 4 * MIB)).ok();
        for device in 0..2 {
            tenant.must(&format!("member {object} {device}"));
        }
        assert_eq!(pages.charged(0), 0, "the object owns no memory");
        let memory = tenant.must(&format!("create 0 {}", 4 * MIB));
        tenant.must(&format!("bind {object} 0 {memory} {}", 4 * MIB));
        tenant.must(&format!("release {memory}"));
        assert_eq!(pages.charged(0), 4 * MIB, "bound");
        if unbind {
            tenant.must(&format!("unbind {object} 0 0 {}", 4 * MIB));
            assert_eq!(pages.charged(0), 0);
        }
        tenant.must(&format!("release {object}"));
        assert_eq!(pages.charged(0), 0, "unbound: {unbind}");
    }
}

/// "Each time a recipient process imports a shareable handle, it needs to pair it with cuMemRelease
/// for the handle to be freed."
#[test]
fn the_exporter_is_charged_while_an_import_lives() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let handle = exporter.must(&format!("create 0 {}", 16 * MIB));
    let fd = exporter.must(&format!("export {handle}"));
    let import = format!("import {} {fd}", exporter.pid());
    let imported = importer.must(&import);
    assert_eq!(pages.charged(0), 16 * MIB, "once");
    exporter.must(&format!("close {fd}"));
    exporter.must(&format!("release {handle}"));
    assert_eq!(exporter.must("info"), 48 * MIB, "the importer has it");
    // What is mapped is held as well.
    let range = importer.must(&format!("reserve {}", 16 * MIB));
    importer.must(&format!("map {range} {} {imported}", 16 * MIB));
    importer.must(&format!("release {imported}"));
    assert_eq!(exporter.must("info"), 48 * MIB, "and has it mapped");
    importer.must(&format!("unmap {range} {}", 16 * MIB));
    // Looked at again before a refusal.
    let all = exporter.must(&format!("create 0 {}", 64 * MIB));
    exporter.must(&format!("release {all}"));
    assert_eq!(exporter.must("info"), 64 * MIB);
}

#[test]
fn an_import_that_dies_holds_nothing() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let handle = exporter.must(&format!("create 0 {}", 16 * MIB));
    let fd = exporter.must(&format!("export {handle}"));
    importer.must(&format!("import {} {fd}", exporter.pid()));
    exporter.must(&format!("close {fd}"));
    exporter.must(&format!("release {handle}"));
    assert_eq!(exporter.must("info"), 48 * MIB);
    importer.kill();
    // The driver has it for a while: who asks for it waits.
    let all = exporter.must(&format!("create 0 {}", 64 * MIB));
    exporter.must(&format!("release {all}"));
    assert_eq!(exporter.must("info"), 64 * MIB);
}

#[test]
fn an_open_descriptor_holds_what_was_released() {
    let (_sim, _pages, mut tenant) = held("vmm", 64 * MIB);
    let mut open = Vec::new();
    // Otherwise a loop of these would hold more than the quota.
    for _ in 0..4 {
        let handle = tenant.must(&format!("create 0 {}", 16 * MIB));
        open.push(tenant.must(&format!("export {handle}")));
        tenant.must(&format!("release {handle}"));
    }
    assert_eq!(tenant.ask(&format!("create 0 {}", 2 * MIB)).result, OUT_OF_MEMORY);
    for fd in open {
        tenant.must(&format!("close {fd}"));
    }
    assert_eq!(tenant.must("info"), 64 * MIB);
}

#[test]
fn an_old_import_does_not_hold_what_is_exported_later() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let kept = exporter.must(&format!("create 0 {}", 2 * MIB));
    let fd = exporter.must(&format!("export {kept}"));
    importer.must(&format!("import {} {fd}", exporter.pid()));
    for _ in 0..8 {
        let handle = exporter.must(&format!("create 0 {}", 32 * MIB));
        let fd = exporter.must(&format!("export {handle}"));
        exporter.must(&format!("close {fd}"));
        exporter.must(&format!("release {handle}"));
    }
    assert_eq!(exporter.must("info"), 62 * MIB);
}
