//! Virtual memory management, held to the quota: CUDA Driver API, "Virtual Memory Management" and
//! "Multicast Object Management".

use tessera_harness::{Conversation, MIB, Pages, SimGpu};
use tessera_region::layout::Kind;

use crate::{OUT_OF_MEMORY, SUCCESS, both, held, quota};

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
    // 16 MiB each.
    let array = format!("array 1024 1024 {FLOAT} 4");
    for (make, end) in [("create 0 16777216", "release"), (array.as_str(), "unarray")] {
        for _ in 0..3 {
            let mut handles = Vec::new();
            loop {
                let reply = tenant.ask(make);
                if reply.result != SUCCESS {
                    assert_eq!(reply.result, OUT_OF_MEMORY, "{make}");
                    break;
                }
                handles.push(reply.ok());
            }
            assert_eq!(handles.len(), 4, "{make}");
            assert_eq!(tenant.ask("info").values, [0, 64 * MIB], "{make}");
            for handle in handles {
                tenant.must(&format!("{end} {handle}"));
            }
            assert_eq!(tenant.must("info"), 64 * MIB, "{make}");
        }
    }
    // Sizes that no quota holds, and what the driver rejects, charge nothing.
    for bad in [
        "create 0 18446744073709551615".to_owned(),
        "create 0 18446744071562067968".to_owned(),
        "create 0 1000".to_owned(),
        "create 0 0".to_owned(),
        "array 0 0 1 1".to_owned(),
        "array 16 16 1 3".to_owned(),
        format!("array 18446744073709551615 18446744073709551615 {FLOAT} 4"),
        format!("array3 4294967296 4294967296 4294967296 {FLOAT} 4 0"),
        "unarray 0".to_owned(),
    ] {
        assert_ne!(tenant.ask(&bad).result, SUCCESS, "{bad}");
        assert_eq!(pages.charged(0), 0, "{bad}");
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

// Arrays and mipmapped arrays, held to the quota by the driver's own size: CUDA Driver API, "Memory
// Management".

const UINT8: u32 = 0x01;
const FLOAT: u32 = 0x20;

/// The page footprint of what the driver says that such an array needs.
fn footprint(tenant: &mut Conversation, of: &str) -> u64 {
    let needs = tenant.must(&format!("needs {of}"));
    let step = if needs <= MIB { 512 } else { 2 * MIB };
    needs.next_multiple_of(step)
}

#[test]
fn every_form_is_charged_what_the_driver_says_until_it_is_destroyed() {
    let (_sim, pages, mut tenant) = held("vmm", 256 * MIB);
    for (make, needs, end) in [
        (format!("array 1000 1000 {FLOAT} 4"), format!("1000 1000 0 {FLOAT} 4 0 0"), "unarray"),
        (format!("array1 1000 1000 {FLOAT} 1"), format!("1000 1000 0 {FLOAT} 1 0 0"), "unarray"),
        (format!("array 5000 0 {UINT8} 1"), format!("5000 0 0 {UINT8} 1 0 0"), "unarray"),
        (
            format!("array3 100 100 100 {FLOAT} 2 0"),
            format!("100 100 100 {FLOAT} 2 0 0"),
            "unarray",
        ),
        (format!("array31 64 64 6 {FLOAT} 1 4"), format!("64 64 6 {FLOAT} 1 4 0"), "unarray"),
        (format!("mipmap 512 512 0 {FLOAT} 4 0 5"), format!("512 512 0 {FLOAT} 4 0 5"), "unmipmap"),
        (format!("mipmap 64 64 9 {FLOAT} 4 1 3"), format!("64 64 9 {FLOAT} 4 1 3"), "unmipmap"),
    ] {
        let expected = footprint(&mut tenant, &needs);
        for round in 0..2 {
            let array = tenant.must(&make);
            assert_eq!(pages.charged(0), expected, "{make}, round {round}");
            tenant.must(&format!("{end} {array}"));
            assert_eq!(pages.charged(0), 0, "{make}");
        }
    }
    assert_eq!(pages.snapshot().slots[0].kinds[Kind::Array as usize], 0);
}

/// "Destroys and cleans up all resources associated with the context. These resources include CUDA
/// types […] CUarray, CUmipmappedArray" (`cuCtxDestroy`).
#[test]
fn a_contexts_end_gives_its_arrays_back() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let context = tenant.must("ctx 0");
    tenant.must(&format!("array 1024 1024 {FLOAT} 1"));
    tenant.must(&format!("mipmap 256 256 0 {FLOAT} 4 0 4"));
    assert!(pages.charged(0) > 4 * MIB);
    tenant.must(&format!("destroy {context}"));
    assert_eq!(pages.charged(0), 0);
    tenant.must("retain 0");
    tenant.must(&format!("array 1024 1024 {FLOAT} 1"));
    tenant.must("reset 0");
    assert_eq!(pages.charged(0), 0);
}

/// With `CUDA_ARRAY3D_DEFERRED_MAPPING` or `CUDA_ARRAY3D_SPARSE` memory comes with
/// `cuMemMapArrayAsync`, from `cuMemCreate`.
#[test]
fn arrays_whose_memory_comes_later_are_charged_nothing() {
    let (_sim, pages, mut tenant) = held("vmm", MIB);
    let array = tenant.must(&format!("array3 2048 2048 0 {FLOAT} 4 128"));
    assert_eq!(pages.charged(0), 0);
    tenant.must(&format!("unarray {array}"));
    assert_eq!(pages.charged(0), 0);
}

// Memory of one process in another by 64-byte handles: CUDA Driver API, "Memory Management",
// `cuIpcGetMemHandle`. The exporter is charged while an import lives.

/// The words of the handle of `pointer`, as a command to open it.
fn open(exporter: &mut Conversation, pointer: u64) -> String {
    let reply = exporter.ask(&format!("getipc {pointer}"));
    assert_eq!(reply.result, SUCCESS, "{reply}");
    let words: Vec<String> = reply.values.iter().map(u64::to_string).collect();
    format!("openipc {}", words.join(" "))
}

#[test]
fn what_is_freed_while_it_is_imported_stays_charged_until_the_last_close() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let pointer = exporter.must(&format!("alloc {}", 16 * MIB));
    let other = exporter.must(&format!("alloc {}", 8 * MIB));
    let (open, _) = (open(&mut exporter, pointer), open(&mut exporter, other));
    // "If the memory handle has already been opened by the current context, the reference count on
    // the handle is incremented by 1 and the existing device pointer is returned."
    let imported = importer.must(&open);
    assert_eq!(importer.must(&open), imported);
    exporter.must(&format!("free {pointer}"));
    assert_eq!(exporter.must("info"), 40 * MIB, "imported");
    exporter.must(&format!("free {other}"));
    assert_eq!(exporter.must("info"), 48 * MIB, "exported, but imported by nobody");
    importer.must(&format!("closeipc {imported}"));
    assert_eq!(exporter.must("info"), 48 * MIB, "opened twice");
    importer.must(&format!("closeipc {imported}"));
    assert_eq!(exporter.must("info"), 64 * MIB);
}

#[test]
fn what_the_driver_refuses_to_open_or_close_marks_nothing() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let pointer = exporter.must(&format!("alloc {}", 16 * MIB));
    let open = open(&mut exporter, pointer);
    // "cuIpcOpenMemHandle" of one's own memory is refused, and so is nonsense.
    assert_ne!(exporter.ask(&open).result, SUCCESS);
    assert_ne!(importer.ask("openipc 1 2 3 4 5 6 7 8").result, SUCCESS);
    assert_ne!(importer.ask("closeipc 4096").result, SUCCESS);
    exporter.must(&format!("free {pointer}"));
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn an_importers_death_and_its_contexts_end_let_go() {
    let (sim, pages) = quota(64 * MIB);
    let mut exporter = tenant(&sim, &pages);
    for death in [true, false] {
        let mut importer = tenant(&sim, &pages);
        let pointer = exporter.must(&format!("alloc {}", 16 * MIB));
        let open = open(&mut exporter, pointer);
        importer.must(&open);
        exporter.must(&format!("free {pointer}"));
        assert_eq!(exporter.must("info"), 48 * MIB);
        if death {
            importer.kill();
        } else {
            importer.must("reset 0");
        }
        // What a dead importer had is with the driver for a while: who asks for it waits.
        let all = exporter.must(&format!("alloc {}", 64 * MIB));
        exporter.must(&format!("free {all}"));
        assert_eq!(exporter.must("info"), 64 * MIB, "death: {death}");
    }
}

#[test]
fn an_exporting_contexts_end_keeps_what_others_have_imported() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let context = exporter.must("ctx 0");
    let (pointer, _) = (
        exporter.must(&format!("alloc {}", 16 * MIB)),
        exporter.must(&format!("alloc {}", 8 * MIB)),
    );
    let open = open(&mut exporter, pointer);
    let imported = importer.must(&open);
    exporter.must(&format!("destroy {context}"));
    assert_eq!(importer.must("info"), 48 * MIB);
    importer.must(&format!("closeipc {imported}"));
    exporter.must("retain 0");
    assert_eq!(exporter.must("info"), 64 * MIB);
}
