//! What graphs allocate, held to the quota: CUDA Driver API, "Graph Management", and CUDA
//! Programming Guide, "Graph Memory Nodes".

use crate::{OUT_OF_MEMORY, SUCCESS, held, quota};
use tessera_harness::{Conversation, MIB, Pages, SimGpu};

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("graph_memory", sim, pages)
}

/// "CUDA cannot allocate or map physical memory during graph instantiation"; "destroying a graph
/// which contains memory nodes […] will not immediately return physical memory to the OS"
/// (Graph Memory Nodes, "First Launch / cudaGraphUpload" and "Physical Memory Footprint").
#[test]
fn graph_memory_is_charged_from_the_launch_to_the_trim() {
    let (_sim, pages, mut tenant) = held("graph_memory", 512 * MIB);
    let exec = tenant.must(&format!("graph {} 2", 20 * MIB));
    assert_eq!(pages.charged(0), 0, "instantiated only");
    tenant.must(&format!("launch {exec} 0"));
    let reserved = tenant.must("reserved 0");
    assert!(reserved >= 40 * MIB, "{reserved}");
    assert_eq!(pages.charged(0), reserved);
    tenant.must(&format!("launch {exec} 0"));
    tenant.must("sync");
    assert_eq!(pages.charged(0), reserved, "launched again, it takes no more");
    tenant.must(&format!("destroy {exec}"));
    assert_eq!(pages.charged(0), reserved, "kept for other graphs");
    tenant.must("trim 0");
    assert_eq!(tenant.must("reserved 0"), 0);
    assert_eq!(pages.charged(0), 0);
    let slot = &pages.snapshot().slots[0];
    assert_eq!(slot.kinds[tessera_region::layout::Kind::Graph as usize], 0);
    assert!(slot.did.peak[0] >= 40 * MIB);
}

#[test]
fn a_launch_that_does_not_fit_is_refused_and_leaves_nothing() {
    let (_sim, pages, mut tenant) = held("graph_memory", 64 * MIB);
    for how in ["graph", "loose", "nested", "capture"] {
        let exec = tenant.must(&format!("{how} {}", 66 * MIB));
        for call in ["launch", "upload"] {
            let refused = tenant.ask(&format!("{call} {exec} 0"));
            assert_eq!(refused.result, OUT_OF_MEMORY, "{how}, {call}");
        }
        assert_eq!((pages.charged(0), tenant.must("reserved 0")), (0, 0), "{how}");
    }
    assert_eq!(tenant.ask(&format!("uploaded {}", 66 * MIB)).result, OUT_OF_MEMORY);
    let exec = tenant.must(&format!("graph {}", 64 * MIB));
    tenant.must(&format!("launch {exec} 0"));
    assert_eq!(pages.charged(0), 64 * MIB);
}

#[test]
fn an_upload_is_charged_and_the_launch_after_it_takes_no_more() {
    let (_sim, pages, mut tenant) = held("graph_memory", 60 * MIB);
    let exec = tenant.must(&format!("graph {}", 40 * MIB));
    tenant.must(&format!("upload {exec} 0"));
    assert_eq!(pages.charged(0), 40 * MIB);
    // Full but for 20 MiB, which is less than the graph's nodes ask for.
    tenant.must(&format!("launch {exec} 0"));
    tenant.must("sync");
    tenant.must(&format!("launch {exec} 0"));
    assert_eq!(pages.charged(0), 40 * MIB);
    tenant.must("sync");
    tenant.must(&format!("destroy {exec}"));
    tenant.must("trim 0");
    // The smaller with room for the worst, the larger on the edge.
    for bytes in [30 * MIB, 40 * MIB] {
        let exec = tenant.must(&format!("uploaded {bytes}"));
        assert_eq!(pages.charged(0), bytes, "uploaded with the instantiation");
        tenant.must(&format!("launch {exec} 0"));
        assert_eq!(pages.charged(0), bytes);
        tenant.must("sync");
        tenant.must(&format!("destroy {exec}"));
        tenant.must("trim 0");
    }
    assert_eq!(pages.charged(0), 0);
}

/// "Blocks which are not in use by a graph that is either currently executing or scheduled to
/// execute are freed" (`cuDeviceGraphMemTrim`).
#[test]
fn unused_graph_memory_is_asked_back_before_anything_is_refused() {
    let (_sim, pages, mut tenant) = held("graph_memory", 64 * MIB);
    let exec = tenant.must(&format!("graph {}", 40 * MIB));
    tenant.must(&format!("launch {exec} 0"));
    tenant.must("sync");
    let pointer = tenant.must(&format!("alloc {}", 60 * MIB));
    assert_eq!(pages.charged(0), 60 * MIB);
    assert_eq!(tenant.ask(&format!("launch {exec} 0")).result, OUT_OF_MEMORY);
    tenant.must(&format!("free {pointer}"));
    tenant.must(&format!("launch {exec} 0"));
    assert_eq!(pages.charged(0), 40 * MIB);
    let refusals: u64 = pages.snapshot().slots.iter().map(|slot| slot.did.refusals).sum();
    assert_eq!(refusals, 1, "what was granted in the end is no refusal");
}

#[test]
fn what_outlives_its_graph_stays_charged_until_it_is_freed_and_trimmed() {
    let (_sim, pages, mut tenant) = held("graph_memory", 256 * MIB);
    let reply = tenant.ask(&format!("loose {}", 40 * MIB));
    let (exec, pointer) = (reply.ok(), reply.values[1]);
    tenant.must(&format!("launch {exec} 0"));
    tenant.must("sync");
    tenant.must("trim 0");
    assert_eq!(pages.charged(0), 40 * MIB, "in use");
    tenant.must(&format!("free_async {pointer} 0"));
    tenant.must("sync");
    tenant.must(&format!("destroy {exec}"));
    tenant.must("trim 0");
    assert_eq!((pages.charged(0), tenant.must("reserved 0")), (0, 0));
}

#[test]
fn capturing_takes_nothing_however_large() {
    let (_sim, pages, mut tenant) = held("graph_memory", 64 * MIB);
    let held = tenant.must(&format!("alloc {}", 64 * MIB));
    let exec = tenant.must(&format!("capture {}", 48 * MIB));
    assert_eq!(pages.charged(0), 64 * MIB);
    assert_eq!(tenant.ask(&format!("launch {exec} 0")).result, OUT_OF_MEMORY);
    tenant.must(&format!("free {held}"));
    tenant.must(&format!("launch {exec} 0"));
    assert_eq!(pages.charged(0), tenant.must("reserved 0"));
}

#[test]
fn graphs_without_memory_are_launched_beside_those_with() {
    let (_sim, pages, mut tenant) = held("graph_memory", 64 * MIB);
    let plain = tenant.must("plain");
    tenant.must(&format!("launch {plain} 0"));
    let large = tenant.must(&format!("graph {}", 66 * MIB));
    for _ in 0..3 {
        tenant.must(&format!("launch {plain} 1"));
        tenant.must(&format!("update {plain}"));
        assert_eq!(tenant.ask(&format!("launch {large} 0")).result, OUT_OF_MEMORY);
    }
    tenant.must(&format!("destroy {large}"));
    assert_eq!(tenant.ask(&format!("launch {plain} 0")).result, SUCCESS);
    assert_eq!(pages.snapshot().slots[0].did.launches, 5, "refused ones do not count");
}

#[test]
fn processes_share_the_limit_with_each_others_graphs() {
    let (sim, pages) = quota(96 * MIB);
    let (mut first, mut second) = (tenant(&sim, &pages), tenant(&sim, &pages));
    let (one, other) = (format!("graph {}", 60 * MIB), format!("graph {}", 60 * MIB));
    let (one, other) = (first.must(&one), second.must(&other));
    first.must(&format!("launch {one} 0"));
    assert_eq!(second.ask(&format!("launch {other} 0")).result, OUT_OF_MEMORY);
    first.must("sync");
    first.must("trim 0");
    second.must(&format!("launch {other} 0"));
    assert_eq!(pages.charged(0), 60 * MIB);
}
