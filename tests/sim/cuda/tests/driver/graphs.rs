//! Graphs and their memory. What is checked is what CUDA's documentation says; each test names
//! the section ("Guide": CUDA Programming Guide; else CUDA Driver API, "Graph Management").

#![allow(clippy::cast_possible_truncation, reason = "a few pages")]

use crate::harness::*;
use std::ffi::c_int;
use tessera_cuda::types::{CUDA_MEM_ALLOC_NODE_PARAMS, CUmemLocation};

const PAGE: u64 = 2 << 20;
const AUTO_FREE: u64 = 1;

const USED: c_int = 0;
const RESERVED: c_int = 2;

fn attribute(which: c_int) -> u64 {
    must(|to: *mut u64| cuda!(cuDeviceGetGraphMemAttribute(0, which, to.cast())))
}

fn trim() {
    ok(cuda!(cuDeviceGraphMemTrim(0)));
}

fn graph() -> Handle {
    must(|to| cuda!(cuGraphCreate(to, 0)))
}

fn alloc_node(graph: Handle, after: &[Handle], bytes: u64) -> (Handle, u64) {
    let mut node = NULL;
    // SAFETY: numbers and pointers, for which zero is a value.
    let mut params: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    params.poolProps.allocType = 1;
    params.poolProps.location = CUmemLocation { r#type: 1, id: 0 };
    params.bytesize = bytes as usize;
    ok(cuda!(cuGraphAddMemAllocNode(
        &raw mut node,
        graph,
        after.as_ptr(),
        after.len(),
        (&raw mut params).cast()
    )));
    assert_ne!(params.dptr, 0);
    (node, params.dptr)
}

fn free_node(graph: Handle, after: &[Handle], at: u64) -> Outcome<Handle> {
    made(|to| cuda!(cuGraphAddMemFreeNode(to, graph, after.as_ptr(), after.len(), at)))
}

fn instantiate(graph: Handle, flags: u64) -> Outcome<Handle> {
    made(|to| cuda!(cuGraphInstantiateWithFlags(to, graph, flags)))
}

fn run(exec: Handle, stream: Handle) -> Result {
    cuda!(cuGraphLaunch(exec, stream))
}

fn destroy_exec(exec: Handle) {
    ok(cuda!(cuGraphExecDestroy(exec)));
}

fn destroy(graph: Handle) {
    ok(cuda!(cuGraphDestroy(graph)));
}

/// A graph that allocates and frees as much.
fn temporary(bytes: u64) -> Handle {
    let graph = graph();
    let (node, at) = alloc_node(graph, &[], bytes);
    free_node(graph, &[node], at).unwrap();
    graph
}

/// `CUgraphNodeParams`.
#[repr(C)]
struct Params(c_int, [c_int; 3], [u64; 29], u64);

impl Params {
    fn new(kind: c_int, data: &[u64]) -> Params {
        let mut all = [0u64; 29];
        all[..data.len()].copy_from_slice(data);
        Params(kind, [0; 3], all, 0)
    }

    /// A node behind another, or behind none.
    fn add(&mut self, graph: Handle, after: Handle) -> Handle {
        let node = must(|to| {
            cuda!(cuGraphAddNode_v2(
                to,
                graph,
                &raw const after,
                NULL.cast(),
                usize::from(!after.is_null()),
                (&raw mut *self).cast()
            ))
        });
        let seen = must(|to| cuda!(cuGraphNodeGetType(node, to)));
        assert_eq!(seen, self.0);
        node
    }
}

fn two(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn fill(at: u64, value: u32, bytes: u64) -> Params {
    Params::new(2, &[at, 0, two(value, 1), bytes, 1])
}

scenarios! {
    /// Guide, "Physical Memory Management and Sharing": graphs share what is not in use at the same
    /// time, and allocations that outlive their graphs are; "Physical Memory Footprint": a trim takes
    /// none of it, nor what another thread is launching.
    fn allocations_that_live_on_share_no_memory_however_they_race() {
        let context = retain(0) as usize;
        let s = new_stream() as usize;
        const THREADS: u64 = 4;
        for _ in 0..100 {
            let race = || {
                ok(cuda!(cuCtxSetCurrent(context as Handle)));
                let graph = graph();
                let (_, at) = alloc_node(graph, &[], PAGE);
                let exec = instantiate(graph, 0).unwrap();
                ok(run(exec, s as Handle));
                trim();
                (exec as usize, graph as usize, at)
            };
            let made: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(race)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!((attribute(USED), attribute(RESERVED)), (THREADS * PAGE, THREADS * PAGE));
            for (exec, graph, at) in made {
                ok(cuda!(cuMemFreeAsync(at, s as Handle)));
                destroy_exec(exec as Handle);
                destroy(graph as Handle);
            }
            trim();
            assert_eq!((attribute(USED), attribute(RESERVED)), (0, 0));
        }
    }

    /// Guide, "Optimized Memory Reuse": "Address Reuse within a Graph" needs a dependency.
    fn what_one_graph_frees_serves_its_next_allocation() {
        retain(0);
        let s = new_stream();
        let chain = graph();
        let (a, at) = alloc_node(chain, &[], 4 * PAGE);
        let freed = free_node(chain, &[a], at).unwrap();
        let (b, second) = alloc_node(chain, &[freed], 4 * PAGE);
        free_node(chain, &[b], second).unwrap();
        let exec = instantiate(chain, 0).unwrap();
        ok(run(exec, s));
        assert_eq!(attribute(RESERVED), 4 * PAGE);
        destroy_exec(exec);
        trim();
        let beside = graph();
        for _ in 0..2 {
            let (a, at) = alloc_node(beside, &[], 4 * PAGE);
            free_node(beside, &[a], at).unwrap();
        }
        ok(run(instantiate(beside, 0).unwrap(), s));
        assert_eq!(attribute(RESERVED), 8 * PAGE, "both may be there at once");
    }

    /// Guide, "Physical Memory Management and Sharing".
    fn graphs_of_one_stream_share_memory_and_those_of_two_do_not() {
        retain(0);
        let (s, t) = (new_stream(), new_stream());
        let (a, b) = (instantiate(temporary(4 * PAGE), 0), instantiate(temporary(6 * PAGE), 0));
        ok(run(a.unwrap(), s));
        ok(run(b.unwrap(), s));
        assert_eq!((attribute(USED), attribute(RESERVED)), (6 * PAGE, 6 * PAGE));
        ok(run(a.unwrap(), t));
        assert_eq!(attribute(USED), 10 * PAGE);
        // "Allocations that have not been freed and graphs that are scheduled or running are
        // considered to be actively using the physical memory".
        keep_busy(kernel("spin"), s);
        ok(run(b.unwrap(), s));
        trim();
        assert_eq!(attribute(RESERVED), 6 * PAGE, "the other graph was done");
        synchronize(s);
        trim();
        assert_eq!(attribute(RESERVED), 0);
    }

    /// "cuGraphLaunch": unfreed allocations; "cuGraphInstantiate": AUTO_FREE_ON_LAUNCH.
    fn a_relaunch_needs_its_allocations_freed() {
        retain(0);
        let s = new_stream();
        let graph = graph();
        let (_, at) = alloc_node(graph, &[], 2 * PAGE);
        let exec = instantiate(graph, 0).unwrap();
        ok(run(exec, s));
        assert_eq!(run(exec, s), 1);
        ok(cuda!(cuMemsetD8Async(at, 7, 100, s)));
        assert_eq!(read::<2>(at), [7, 7]);
        ok(cuda!(cuMemFreeAsync(at, s)));
        ok(run(exec, s));
        ok(free(at));
        ok(run(exec, s));
        assert_eq!(attribute(RESERVED), 2 * PAGE);
        ok(free(at));
        destroy_exec(exec);
        let exec = instantiate(graph, AUTO_FREE).unwrap();
        for _ in 0..3 {
            ok(run(exec, s));
        }
        assert_eq!(attribute(USED), 2 * PAGE);
        ok(free(at));
        assert_eq!(free(at), 1, "freed already");
    }

    /// Guide, "Alloc Node": "Graph destruction does not automatically free any live
    /// graph-allocated memory".
    fn an_allocation_outlives_its_graph() {
        retain(0);
        let (s, room) = (new_stream(), free_bytes() as u64);
        let graph = graph();
        let (_, at) = alloc_node(graph, &[], 2 * PAGE);
        let exec = instantiate(graph, 0).unwrap();
        destroy(graph);
        ok(run(exec, s));
        destroy_exec(exec);
        synchronize(s);
        trim();
        assert_eq!((attribute(USED), attribute(RESERVED)), (2 * PAGE, 2 * PAGE));
        ok(cuda!(cuMemsetD8_v2(at, 9, 2 * PAGE as usize)));
        assert_eq!(read::<1>(at), [9]);
        // "freed in another graph"
        let other = super::graph();
        free_node(other, &[], at).unwrap();
        let exec = instantiate(other, 0).unwrap();
        ok(run(exec, s));
        assert_eq!(run(exec, s), 1, "it is gone");
        synchronize(s);
        trim();
        assert_eq!(free_bytes() as u64, room);
    }

    fn a_launch_fails_when_the_gpu_is_full() {
        retain(0);
        let (s, room) = (new_stream(), free_bytes());
        let exec = instantiate(temporary(4 * PAGE), 0).unwrap();
        let ballast = alloc(room - 3 * PAGE as usize).unwrap();
        assert_eq!(run(exec, s), 2);
        assert_eq!((attribute(USED), attribute(RESERVED)), (0, 0));
        ok(free(ballast));
        ok(run(exec, s));
    }

    fn a_primary_reset_takes_graph_memory() {
        retain(0);
        let (s, room) = (new_stream(), free_bytes());
        let graph = graph();
        alloc_node(graph, &[], 4 * PAGE);
        ok(run(instantiate(graph, 0).unwrap(), s));
        ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
        retain(0);
        assert_eq!((attribute(RESERVED), free_bytes()), (0, room));
    }

    /// "cuGraphExecUpdate", "cuGraphExecNodeSetParams".
    fn an_executable_graph_is_updated() {
        #[repr(C)]
        struct Info(c_int, Handle, Handle);
        retain(0);
        let (s, at) = (new_stream(), alloc(64).unwrap());
        let filled = |value: u32| {
            let graph = graph();
            (graph, fill(at, value, 4).add(graph, NULL))
        };
        let ((graph, node), (other, _)) = (filled(1), filled(2));
        let exec = instantiate(graph, 0).unwrap();
        let result = || {
            ok(run(exec, s));
            synchronize(s);
            read::<1>(at)[0]
        };
        assert_eq!(result(), 1);
        let mut info = Info(9, NULL, NULL);
        ok(cuda!(cuGraphExecUpdate_v2(exec, other, (&raw mut info).cast())));
        assert_eq!((info.0, result()), (0, 2));
        let mut params = fill(at, 3, 4);
        ok(cuda!(cuGraphExecNodeSetParams(exec, node, (&raw mut params).cast())));
        assert_eq!(result(), 3);
        let _: Handle = must(|to| cuda!(cuGraphAddEmptyNode(to, other, NULL.cast(), 0)));
        let refused = cuda!(cuGraphExecUpdate_v2(exec, other, (&raw mut info).cast()));
        assert_eq!((refused, info.0), (910, 2), "another topology");
    }

    /// "cuGraphAddNode", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph".
    fn every_way_to_add_a_node() {
        retain(0);
        let (s, graph) = (new_stream(), graph());
        let (target, event) = (alloc(64).unwrap(), new_event());
        let add = |kind: c_int, data: &[u64], after: Handle| {
            let mut params = Params::new(kind, data);
            (params.add(graph, after), params.2)
        };
        let kernel = [kernel("plain") as u64, two(1, 1), two(1, 32), two(1, 1), 0, 0, 0];
        let (kernel, _) = add(0, &kernel, NULL);
        // PINNED, no handles; on device 0; …; 2 pages.
        let alloc = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2 * PAGE];
        let (allocation, back) = add(10, &alloc[..14], kernel);
        let at = back[14];
        let filled = fill(at, 5, 8).add(graph, allocation);
        // Context; copy: source device at `at`, destination device `target`, 8 bytes.
        let mut copy = [0u64; 27];
        (copy[2 + 4], copy[2 + 6], copy[2 + 15], copy[2 + 17]) = (2, at, 2, target);
        (copy[2 + 22], copy[2 + 23], copy[2 + 24]) = (8, 1, 1);
        let (copied, _) = add(1, &copy, filled);
        let (freed, _) = add(11, &[at], copied);
        let (empty, _) = add(5, &[], freed);
        let (waited, _) = add(6, &[event as u64], empty);
        add(7, &[event as u64], waited);
        let inner = super::graph();
        fill(target + 8, 6, 8).add(inner, NULL);
        let (child, _) = add(4, &[inner as u64, 0], waited);
        let own = must(|to| cuda!(cuGraphChildGraphNodeGetGraph(child, to)));
        assert_ne!(own, inner, "a clone");
        assert_ne!(cuda!(cuGraphDestroy(own)), 0, "the node's own");
        ok(run(instantiate(graph, 0).unwrap(), s));
        synchronize(s);
        assert_eq!(read::<16>(target), [5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6]);
        ok(cuda!(cuEventQuery(event)));
    }
}
