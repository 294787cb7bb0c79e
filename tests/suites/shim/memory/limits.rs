//! Device memory that limits of contexts and frames of kernels take (CUDA Driver API,
//! `cuCtxSetLimit`), under the quota.

use crate::{OUT_OF_MEMORY, ready};
use tessera_harness::{Conversation, GIB, MIB, Pages, Preloaded, Rng, SimGpu, compile_c};

const STACK: u64 = 0;
const PRINTF: u64 = 1;
const HEAP: u64 = 2;
const PENDING: u64 = 4;
/// Threads that the simulated GPU can have resident.
const THREADS: u64 = 132 * 2048;

/// A GPU whose modules cost nothing, so that the driver's account can be compared to the byte.
fn machine(limit: u64) -> (SimGpu, Pages, Conversation) {
    let sim = SimGpu::start(
        "[memory]\nreserved = 0\ncontext_overhead = \"64MiB\"\nmodule_overhead = 0\n\
         [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000002\"\nmemory = \"40GiB\"\n",
    );
    let pages = Pages::with_overhead(&[(sim.uuid(0), limit)], 64 * MIB);
    let witness = ready(Preloaded::bare(compile_c("limits")).sim(&sim));
    (sim, pages, witness)
}

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("limits", sim, pages)
}

#[test]
fn a_heap_or_a_stack_over_the_quota_is_refused_and_nothing_changes() {
    let (sim, pages, mut witness) = machine(GIB);
    let before = witness.must("info");
    let mut tenant = tenant(&sim, &pages);
    for (which, value) in
        [(HEAP, 8 * GIB), (PRINTF, 2 * GIB), (STACK, 64 << 10), (PENDING, 1 << 20)]
    {
        let was = tenant.must(&format!("now {which}"));
        assert_eq!(tenant.ask(&format!("limit {which} {value}")).result, OUT_OF_MEMORY, "{which}");
        assert_eq!(tenant.must(&format!("now {which}")), was);
    }
    let kernel = tenant.must("kernel 0");
    tenant.must(&format!("launch {kernel}"));
    tenant.must("sync");
    assert_eq!((pages.charged(0), before - witness.must("info")), (64 * MIB, 64 * MIB));
    assert_eq!(pages.snapshot().slots[0].did.refusals, 4);
    let said = tenant.finish().stderr;
    assert!(said.contains("cuCtxSetLimit asks for"), "{said}");
}

#[test]
fn a_stack_is_charged_for_every_resident_thread_until_it_is_lowered_or_its_context_ends() {
    let (sim, pages, mut witness) = machine(2 * GIB);
    let before = witness.must("info");
    let mut tenant = tenant(&sim, &pages);
    let held = |witness: &mut Conversation| before - witness.must("info");
    tenant.must(&format!("limit {STACK} 2048"));
    assert_eq!(pages.charged(0), 64 * MIB + 1024 * THREADS);
    assert_eq!(
        (tenant.must("info"), held(&mut witness)),
        (2 * GIB - pages.charged(0), pages.charged(0))
    );
    tenant.must(&format!("limit {STACK} 512"));
    assert_eq!((pages.charged(0), held(&mut witness)), (64 * MIB, 64 * MIB));
    tenant.must(&format!("limit {STACK} 1024"));
    assert_eq!(pages.charged(0), 64 * MIB, "the context's constant pays for the default");
    // A context of its own, beside the primary one's.
    tenant.must(&format!("limit {STACK} 2048"));
    let own = tenant.must("ctx 0");
    tenant.must(&format!("limit {STACK} 4096"));
    tenant.must(&format!("limit {HEAP} {}", 72 * MIB));
    assert_eq!(pages.charged(0), 128 * MIB + 4 * 1024 * THREADS + 64 * MIB);
    tenant.must(&format!("destroy {own}"));
    assert_eq!(
        (pages.charged(0), held(&mut witness)),
        (64 * MIB + 1024 * THREADS, 64 * MIB + 1024 * THREADS)
    );
    tenant.must("reset 0");
    assert_eq!((pages.charged(0), held(&mut witness)), (0, 0));
    tenant.must("retain 0");
    assert_eq!((pages.charged(0), tenant.must("now 0")), (64 * MIB, 1024));
    tenant.must(&format!("limit {STACK} 2048"));
    tenant.must("release 0");
    assert_eq!((pages.charged(0), held(&mut witness)), (0, 0));
}

/// "The driver automatically increases the per-thread stack size for each kernel launch as needed. This
/// size isn't reset back to the original value after each launch." By every kind of function, and every way to launch.
#[test]
fn a_kernels_frame_is_charged_at_its_first_launch() {
    let kinds = ["kernel", "library", "cukernel"].map(|from| (from, 0));
    for (from, way) in kinds.into_iter().chain((1..9).map(|way| ("kernel", way))) {
        let (sim, pages, mut witness) = machine(GIB);
        let before = witness.must("info");
        let mut tenant = tenant(&sim, &pages);
        let within = tenant.must(&format!("{from} 1024"));
        let function = tenant.must(&format!("{from} 3072"));
        let large = tenant.must(&format!("{from} 8192"));
        tenant.must(&format!("launch {within} {way}"));
        assert_eq!(pages.charged(0), 64 * MIB, "{from} {way}: looked up, or within the default");
        let all = tenant.must(&format!("alloc {}", GIB - 64 * MIB));
        let refused = tenant.ask(&format!("launch {function} {way}"));
        assert_eq!(refused.result, OUT_OF_MEMORY, "{from} {way}");
        tenant.must(&format!("launch {within} {way}"));
        tenant.must(&format!("free {all}"));
        let refused = tenant.ask(&format!("launch {large} {way}"));
        assert_eq!(refused.result, OUT_OF_MEMORY, "{from} {way}");
        assert_eq!(pages.charged(0), 64 * MIB, "{from} {way}: refused");
        tenant.must(&format!("launch {function} {way}"));
        assert_eq!(pages.charged(0), 64 * MIB + 2048 * THREADS, "{from} {way}");
        tenant.must("sync");
        assert_eq!(before - witness.must("info"), pages.charged(0), "{from} {way}");
        let smaller = tenant.must(&format!("{from} 2048"));
        tenant.must(&format!("launch {smaller} {way}"));
        tenant.must(&format!("limit {STACK} 1024"));
        assert_eq!(before - witness.must("info"), pages.charged(0), "{from} {way}: it stays");
        assert_eq!(pages.charged(0), 64 * MIB + 2048 * THREADS, "{from} {way}");
        tenant.must("reset 0");
        assert_eq!((pages.charged(0), before - witness.must("info")), (0, 0), "{from} {way}");
        let said = tenant.finish().stderr;
        assert!(said.contains("a kernel with much local memory asks for"), "{said}");
    }
}

/// A captured launch is one; a node made by hand is charged before an executable graph has it.
#[test]
fn a_graph_is_charged_the_frames_of_its_kernels() {
    let (sim, pages, mut witness) = machine(GIB);
    let before = witness.must("info");
    for how in ["capture", "make", "nest", "update", "set 0", "set 1", "set 2"] {
        let mut tenant = tenant(&sim, &pages);
        let within = tenant.must("kernel 512");
        let [function, large] = [3072, 8192].map(|frame| tenant.must(&format!("kernel {frame}")));
        let (first, more) = how.split_once(' ').unwrap_or((how, ""));
        let mut exec = 0;
        let mut charge = |function: u64| {
            let graph = match first {
                "capture" => tenant.ask(&format!("capture {function}")),
                "set" => tenant.ask(&format!("make {within}")),
                _ => tenant.ask(&format!("make {function}")),
            };
            if graph.result != 0 {
                return graph.result;
            }
            let mut graph = graph.values[0];
            if first == "nest" {
                graph = tenant.must(&format!("nest {graph}"));
            }
            if !matches!(first, "set" | "update") {
                let made = tenant.ask(&format!("instantiate {graph}"));
                exec = made.values[0];
                return made.result;
            }
            assert_eq!(pages.charged(0), 64 * MIB, "{how}: no executable graph has it");
            let other = tenant.must(&format!("make {within}"));
            exec = tenant.must(&format!("instantiate {other}"));
            let change = match first {
                "set" => format!("set {exec} {function} {more}"),
                _ => format!("update {exec} {graph}"),
            };
            tenant.ask(&change).result
        };
        assert_eq!(charge(large), OUT_OF_MEMORY, "{how}");
        assert_eq!(charge(function), 0, "{how}");
        assert_eq!(pages.charged(0), 64 * MIB + 2048 * THREADS, "{how}");
        tenant.must(&format!("run {exec}"));
        tenant.must("sync");
        assert_eq!(before - witness.must("info"), pages.charged(0), "{how}");
        tenant.must("reset 0");
    }
}

/// The table of handles is bounded. What it has no place for is charged at the look-up.
#[test]
fn what_is_not_remembered_is_charged_at_the_look_up() {
    let (sim, pages, _witness) = machine(GIB);
    let mut tenant = tenant(&sim, &pages);
    for _ in 0..64 {
        tenant.must("kernel 8192");
    }
    assert_eq!(pages.charged(0), 64 * MIB);
    tenant.must("kernel 2048");
    assert_eq!(pages.charged(0), 64 * MIB + 1024 * THREADS);
    assert_eq!(tenant.ask("kernel 8192").result, OUT_OF_MEMORY);
}

/// Whatever limits, frames, contexts and allocations come in what order: the driver holds no more than
/// is charged, and that no more than the quota.
#[test]
fn what_limits_take_is_charged_whatever_comes_in_what_order() {
    // What these came to was 2 MiB more than was charged: one sum was rounded, and each has pages of its own.
    [7, 9, 10, 21, 38].into_iter().chain(0..6).for_each(is_charged);
}

fn is_charged(seed: u64) {
    let limit = 3 * GIB;
    let (sim, pages, mut witness) = machine(limit);
    let before = witness.must("info");
    let mut tenant = Conversation::tenant("limits", &sim, &pages);
    tenant.must("init");
    let mut contexts = vec![tenant.must("retain 0")];
    let mut random = Rng::with_seed(seed);
    // Of the current context.
    let mut functions = Vec::new();
    let (mut refused, mut done) = (0, 0);
    for step in 0..400 {
        let command = match random.u64(..12) {
            0..3 => format!("limit {STACK} {}", random.u64(..9) * 768),
            3 => format!("limit {HEAP} {}", random.u64(..1200) * MIB),
            4 => format!("limit {PRINTF} {}", random.u64(..200) * MIB),
            5 => format!("limit {PENDING} {}", random.u64(..60_000)),
            6 => format!("{} {}", ["kernel", "library"][random.usize(..2)], random.u64(..7000)),
            7 if !functions.is_empty() => {
                let function: u64 = functions[random.usize(..functions.len())];
                let how = random.u64(..3);
                if how < 2 {
                    format!("launch {function} {}", how * 8)
                } else {
                    format!("capture {function}")
                }
            }
            8 => "ctx 0".to_owned(),
            9 if contexts.len() > 1 => {
                let gone = contexts.pop().expect("more than one");
                let last = contexts.last().expect("one");
                functions.clear();
                tenant.must(&format!("destroy {gone}"));
                format!("current {last}")
            }
            _ => format!("alloc {}", (1 + random.u64(..30)) * 2 * MIB),
        };
        let reply = tenant.ask(&command);
        match (reply.result, command.split(' ').next()) {
            (0, Some("ctx")) => {
                functions.clear();
                contexts.push(reply.values[0]);
            }
            (0, Some("kernel" | "library")) => functions.push(reply.values[0]),
            (0, _) => {}
            (OUT_OF_MEMORY, _) => refused += 1,
            (other, _) => panic!("step {step}: {command}: {other}"),
        }
        done += i32::from(reply.result == 0);
        let (held, charged) = (before - witness.must("info"), pages.charged(0));
        assert!(
            held <= charged && charged <= limit,
            "{seed}, {step}: {command}: {held} of {charged}"
        );
    }
    assert!(refused > 30 && done > 100, "{refused} refused, {done} done");
    while contexts.len() > 1 {
        let gone = contexts.pop().expect("more than one");
        tenant.must(&format!("destroy {gone}"));
    }
    tenant.must("release 0");
    assert_eq!((pages.charged(0), before - witness.must("info")), (0, 0));
}
