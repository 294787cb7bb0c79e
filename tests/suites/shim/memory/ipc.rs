//! Memory of one process in another by 64-byte handles: CUDA Driver API, "Memory Management",
//! `cuIpcGetMemHandle`. The exporter is charged while an import lives.

use crate::{SUCCESS, quota};
use tessera_harness::{Conversation, MIB, Pages, SimGpu};

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("vmm", sim, pages)
}

/// The words of the handle of `pointer`, as a command to open it.
fn open(exporter: &mut Conversation, pointer: u64) -> String {
    let reply = exporter.ask(&format!("getipc {pointer}"));
    assert_eq!(reply.result, SUCCESS, "{reply}");
    let words: Vec<String> = reply.values.iter().map(u64::to_string).collect();
    format!("openipc {}", words.join(" "))
}

#[test]
fn an_import_is_charged_to_nobody_but_the_exporter() {
    let (sim, pages) = quota(64 * MIB);
    let (mut exporter, mut importer) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let pointer = exporter.must(&format!("alloc {}", 16 * MIB));
    let open = open(&mut exporter, pointer);
    let imported = importer.must(&open);
    assert_eq!(pages.charged(0), 16 * MIB);
    importer.must(&format!("closeipc {imported}"));
    exporter.must(&format!("free {pointer}"));
    assert_eq!(pages.charged(0), 0);
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
