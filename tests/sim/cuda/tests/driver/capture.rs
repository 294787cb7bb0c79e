//! Stream capture. What is checked is what CUDA's documentation says; each test names the section
//! ("Guide": CUDA Programming Guide, "CUDA Graphs"; else CUDA Driver API).

use crate::harness::*;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

scenarios! {
    captured_work_runs_with_each_launch
    forks_and_joins_become_edges
    captured_allocations_are_graph_memory
    what_a_capture_prohibits_invalidates_it
    the_legacy_stream_waits_for_blocking_captures
    captures_do_not_mix
    a_capture_ends_where_and_by_whom_it_began
    dependencies_are_read
    a_graph_is_captured_into
    external_events_are_nodes
    graphs_launched_in_a_capture_are_child_graphs
}

const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;
const NONE: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

const UNSUPPORTED: Result = 900;
const ISOLATION: Result = 905;
const IMPLICIT: Result = 906;
const CAPTURED_EVENT: Result = 907;

fn begin(s: Handle, mode: c_int) {
    ok(cuda!(cuStreamBeginCapture_v2(s, mode)));
}

fn end(s: Handle) -> Outcome<Handle> {
    let mut graph = s;
    match cuda!(cuStreamEndCapture(s, &raw mut graph)) {
        0 => Ok(graph),
        e => {
            assert_eq!(graph, NULL, "a NULL graph will be returned");
            Err(e)
        }
    }
}

fn status(s: Handle) -> c_int {
    must(|to| cuda!(cuStreamIsCapturing(s, to)))
}

fn wait(s: Handle, event: Handle) -> Result {
    cuda!(cuStreamWaitEvent(s, event, 0))
}

fn fill(s: Handle, at: u64, value: u8) -> Result {
    cuda!(cuMemsetD8Async(at, value, 4, s))
}

fn launch_graph(graph: Handle, s: Handle) {
    let exec = must(|to| cuda!(cuGraphInstantiateWithFlags(to, graph, 0)));
    ok(cuda!(cuGraphLaunch(exec, s)));
    synchronize(s);
    ok(cuda!(cuGraphExecDestroy(exec)));
}

fn nodes(graph: Handle) -> Vec<(c_int, Vec<usize>)> {
    let (mut all, mut count) = ([NULL; 16], 16usize);
    ok(cuda!(cuGraphGetNodes(graph, all.as_mut_ptr(), &raw mut count)));
    let describe = |node: Handle| {
        let (mut kind, mut from, mut room) = (-1, [NULL; 16], 16usize);
        ok(cuda!(cuGraphNodeGetType(node, &raw mut kind)));
        ok(cuda!(cuGraphNodeGetDependencies(node, from.as_mut_ptr(), &raw mut room)));
        let index = |n: &Handle| all.iter().position(|other| other == n).unwrap();
        (kind, from[..room].iter().map(index).collect())
    };
    all[..count].iter().map(|node| describe(*node)).collect()
}

static CALLS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: *mut c_void) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

mod body {
    use super::*;

    /// Guide, "Stream Capture": "not executed, but will instead be captured".
    pub fn captured_work_runs_with_each_launch() {
        retain(0);
        let (s, at) = (new_stream(), alloc(64).unwrap());
        let mut host = [0u8; 4];
        let plain = kernel("plain");
        assert_eq!(status(s), NONE);
        begin(s, GLOBAL);
        assert_eq!(status(s), ACTIVE);
        ok(fill(s, at, 7));
        ok(launch(plain, 1, s, std::ptr::null_mut()));
        ok(cuda!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), at, 4, s)));
        ok(cuda!(cuLaunchHostFunc(s, Some(count), NULL)));
        let graph = end(s).unwrap();
        assert_eq!((status(s), host, CALLS.load(Ordering::SeqCst)), (NONE, [0; 4], 0));
        let chain = |i: usize| if i == 0 { vec![] } else { vec![i - 1] };
        let kinds = [2, 0, 1, 3].into_iter().enumerate().map(|(i, kind)| (kind, chain(i)));
        assert_eq!(nodes(graph), kinds.collect::<Vec<_>>());
        for round in 1..=2 {
            host = [0; 4];
            launch_graph(graph, s);
            assert_eq!((host, CALLS.load(Ordering::SeqCst)), ([7; 4], round));
        }
    }

    /// Guide, "Cross-stream Dependencies and Events".
    pub fn forks_and_joins_become_edges() {
        retain(0);
        let (s, t) = (new_stream(), new_stream());
        let (fork, join) = (new_event(), new_event());
        let at = alloc(64).unwrap();
        begin(s, GLOBAL);
        ok(fill(s, at, 1));
        record(fork, s);
        ok(wait(t, fork));
        assert_eq!(status(t), ACTIVE, "a fork");
        ok(fill(t, at + 16, 2));
        ok(fill(s, at + 32, 3));
        record(join, t);
        ok(wait(s, join));
        ok(fill(s, at + 48, 4));
        let graph = end(s).unwrap();
        assert_eq!(status(t), NONE);
        let fill = |after: &[usize]| (2, after.to_vec());
        assert_eq!(nodes(graph), [fill(&[]), fill(&[0]), fill(&[0]), fill(&[2, 1])]);
        begin(s, GLOBAL);
        record(fork, s);
        ok(wait(t, fork));
        ok(super::fill(t, at, 2));
        assert_eq!(end(s), Err(904), "unjoined");
        assert_eq!((status(s), status(t)), (NONE, NONE));
    }

    /// "cuMemAllocAsync": "During stream capture, this function results in the creation of an
    /// allocation node."
    pub fn captured_allocations_are_graph_memory() {
        retain(0);
        let (s, room, mut at) = (new_stream(), free_bytes(), 0u64);
        begin(s, GLOBAL);
        ok(cuda!(cuMemAllocAsync(&raw mut at, 4 * MIB, s)));
        ok(fill(s, at, 9));
        ok(cuda!(cuMemFreeAsync(at, s)));
        let graph = end(s).unwrap();
        assert_eq!(nodes(graph), [(10, vec![]), (2, vec![0]), (11, vec![1])]);
        assert_eq!(free_bytes(), room);
        launch_graph(graph, s);
        assert_eq!(room - free_bytes(), 4 * MIB);
        ok(cuda!(cuDeviceGraphMemTrim(0)));
        assert_eq!(free_bytes(), room);
        // What no allocation node made can't be freed by a node.
        let other = alloc(MIB).unwrap();
        begin(s, GLOBAL);
        assert_eq!(cuda!(cuMemFreeAsync(other, s)), 1);
        assert_eq!((status(s), end(s)), (INVALIDATED, Err(901)));
        ok(free(other));
    }

    /// Guide, "Prohibited and Unhandled Operations", "Invalidation".
    pub fn what_a_capture_prohibits_invalidates_it() {
        retain(0);
        let (s, other, event, at) = (new_stream(), new_stream(), new_event(), alloc(64).unwrap());
        let plain = kernel("plain");
        record(event, other);
        synchronize(other);
        let prohibited: [(&str, &dyn Fn() -> Result); 7] = [
            ("alloc", &|| alloc(1).err().unwrap_or(0)),
            ("free", &|| free(at)),
            ("synchronize", &|| cuda!(cuStreamSynchronize(s))),
            ("query", &|| cuda!(cuStreamQuery(s))),
            ("context", &|| cuda!(cuCtxSynchronize())),
            ("event", &|| cuda!(cuEventQuery(event))),
            ("another stream", &|| cuda!(cuStreamSynchronize(other))),
        ];
        for (name, call) in prohibited {
            begin(s, GLOBAL);
            assert_eq!(call(), UNSUPPORTED, "{name}");
            assert_eq!(status(s), INVALIDATED, "{name}");
            assert_eq!(launch(plain, 1, s, std::ptr::null_mut()), 901, "{name}");
            assert_eq!(end(s), Err(901), "{name}");
            ok(launch(plain, 1, s, std::ptr::null_mut()));
            synchronize(s);
        }
        // "a captured event" represents nothing that is scheduled.
        begin(s, RELAXED);
        record(event, s);
        assert_eq!(cuda!(cuEventQuery(event)), CAPTURED_EVENT);
        assert_eq!(end(s), Err(901));
        assert_eq!(cuda!(cuEventSynchronize(event)), CAPTURED_EVENT);
        record(event, s);
        ok(cuda!(cuEventSynchronize(event)));
        ok(free(at));
    }

    /// "cuStreamIsCapturing"; Guide, "Prohibited and Unhandled Operations".
    pub fn the_legacy_stream_waits_for_blocking_captures() {
        retain(0);
        let (mut blocking, at) = (NULL, alloc(64).unwrap());
        let plain = kernel("plain");
        ok(cuda!(cuStreamCreate(&raw mut blocking, 0)));
        begin(blocking, RELAXED);
        let mut seen = 0;
        assert_eq!(cuda!(cuStreamIsCapturing(NULL, &raw mut seen)), IMPLICIT);
        assert_eq!(status(blocking), ACTIVE, "the capture is not invalidated");
        assert_eq!(launch(plain, 1, NULL, std::ptr::null_mut()), IMPLICIT);
        assert_eq!(end(blocking), Err(901));
        begin(blocking, RELAXED);
        assert_eq!(cuda!(cuMemsetD8_v2(at, 1, 4)), IMPLICIT);
        assert_eq!(end(blocking), Err(901));
        let own = new_stream();
        begin(own, RELAXED);
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        end(own).unwrap();
        assert_eq!(cuda!(cuStreamBeginCapture_v2(NULL, RELAXED)), UNSUPPORTED);
    }

    /// Guide, "Prohibited and Unhandled Operations": merging, uncaptured events.
    pub fn captures_do_not_mix() {
        retain(0);
        let (s, t) = (new_stream(), new_stream());
        let (in_s, plain, never) = (new_event(), new_event(), new_event());
        begin(s, GLOBAL);
        begin(t, GLOBAL);
        record(in_s, s);
        assert_eq!(wait(t, in_s), 902, "a merge");
        assert_eq!((end(s), end(t)), (Err(901), Err(901)));
        record(plain, t);
        begin(s, GLOBAL);
        ok(wait(s, never));
        assert_eq!(wait(s, plain), ISOLATION);
        assert_eq!(end(s), Err(901));
        assert_eq!(wait(t, in_s), CAPTURED_EVENT, "its capture is over");
    }

    /// "cuStreamEndCapture".
    pub fn a_capture_ends_where_and_by_whom_it_began() {
        let context = retain(0) as usize;
        let (s, t, event) = (new_stream(), new_stream(), new_event());
        assert_eq!(end(s), Err(401), "nothing captures");
        begin(s, GLOBAL);
        assert_eq!(cuda!(cuStreamBeginCapture_v2(s, GLOBAL)), 401);
        let stream = s as usize;
        let elsewhere = || {
            std::thread::scope(|scope| {
                let other = scope.spawn(move || {
                    ok(cuda!(cuCtxSetCurrent(context as Handle)));
                    end(stream as Handle).map(|graph| graph as usize)
                });
                other.join().unwrap()
            })
        };
        assert_eq!(elsewhere(), Err(908), "another thread");
        end(s).unwrap();
        begin(s, RELAXED);
        elsewhere().unwrap();
        begin(s, GLOBAL);
        record(event, s);
        ok(wait(t, event));
        assert_eq!(end(t), Err(903), "it began elsewhere");
        assert_eq!(end(s), Err(901));
    }

    /// "cuStreamGetCaptureInfo".
    pub fn dependencies_are_read() {
        retain(0);
        let (s, at) = (new_stream(), alloc(64).unwrap());
        begin(s, GLOBAL);
        ok(fill(s, at, 1));
        let (mut state, mut id, mut graph) = (-1, 0u64, NULL);
        let (mut list, mut count): (*const Handle, usize) = (std::ptr::null(), 9);
        ok(cuda!(cuStreamGetCaptureInfo_v3(
            s,
            &raw mut state,
            &raw mut id,
            &raw mut graph,
            &raw mut list,
            std::ptr::null_mut(),
            &raw mut count
        )));
        assert_eq!((state, count), (ACTIVE, 1));
        assert_ne!(id, 0);
        // SAFETY: the driver's array of `count` handles, until the stream is used again.
        let tip = unsafe { *list };
        assert_eq!(end(s), Ok(graph));
        let (mut node, mut room) = (NULL, 1usize);
        ok(cuda!(cuGraphGetNodes(graph, &raw mut node, &raw mut room)));
        assert_eq!((node, room), (tip, 1));
    }

    /// "cuStreamBeginCaptureToGraph".
    pub fn a_graph_is_captured_into() {
        retain(0);
        let (s, at) = (new_stream(), alloc(64).unwrap());
        let (mut graph, mut node, mut exec) = (NULL, NULL, NULL);
        ok(cuda!(cuGraphCreate(&raw mut graph, 0)));
        ok(cuda!(cuGraphAddEmptyNode(&raw mut node, graph, NULL.cast(), 0)));
        ok(cuda!(cuStreamBeginCaptureToGraph(s, graph, &raw const node, NULL.cast(), 1, GLOBAL)));
        ok(fill(s, at, 1));
        let early = cuda!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        assert_ne!(early, 0, "not instantiable until cuStreamEndCapture");
        assert_eq!(end(s), Ok(graph));
        assert_eq!(nodes(graph), [(5, vec![]), (2, vec![0])]);
        launch_graph(graph, s);
        assert_eq!(read::<1>(at), [1]);
    }

    /// "cuStreamWaitEvent": the EXTERNAL flag.
    pub fn external_events_are_nodes() {
        retain(0);
        let (s, event) = (new_stream(), new_event());
        let wait = || cuda!(cuStreamWaitEvent(s, event, 1));
        assert_eq!(wait(), 1, "invalid when used outside of capture");
        begin(s, GLOBAL);
        ok(wait());
        let graph = end(s).unwrap();
        assert_eq!(nodes(graph), [(6, vec![])]);
        launch_graph(graph, s);
        ok(cuda!(cuEventQuery(event)));
    }

    pub fn graphs_launched_in_a_capture_are_child_graphs() {
        retain(0);
        let (s, at, mut exec) = (new_stream(), alloc(64).unwrap(), NULL);
        begin(s, GLOBAL);
        ok(fill(s, at, 5));
        let inner = end(s).unwrap();
        ok(cuda!(cuGraphInstantiateWithFlags(&raw mut exec, inner, 0)));
        begin(s, GLOBAL);
        ok(cuda!(cuGraphLaunch(exec, s)));
        ok(cuda!(cuMemcpyDtoDAsync_v2(at + 8, at, 4, s)));
        let outer = end(s).unwrap();
        assert_eq!(nodes(outer), [(4, vec![]), (1, vec![0])]);
        launch_graph(outer, s);
        assert_eq!(read::<12>(at), [5, 5, 5, 5, 0, 0, 0, 0, 5, 5, 5, 5]);
    }
}
