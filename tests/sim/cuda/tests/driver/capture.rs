//! Stream capture. What is checked is what CUDA's documentation says; each test names the section
//! ("Guide": CUDA Programming Guide, "CUDA Graphs"; else CUDA Driver API).

use crate::harness::*;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

scenarios! {
    captured_work_runs_with_each_launch
    forks_and_joins_become_edges
    captured_allocations_are_graph_memory
    what_a_capture_prohibits_invalidates_it
    a_threads_mode_decides_what_others_captures_prohibit
    the_legacy_stream_waits_for_blocking_captures
    captures_do_not_mix
    a_capture_ends_where_and_by_whom_it_began
    dependencies_are_read
    a_graph_is_captured_into
    external_events_are_nodes
    graphs_launched_in_a_capture_are_child_graphs
}

const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;
const NONE: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

const UNSUPPORTED: Result = 900;
const ISOLATION: Result = 905;
const IMPLICIT: Result = 906;
const CAPTURED_EVENT: Result = 907;

fn begin(s: Handle, mode: c_int) {
    ok(cuda!(cuStreamBeginCapture_v2(s => Handle, mode => c_int)));
}

fn end(s: Handle) -> std::result::Result<Handle, Result> {
    let mut graph = s;
    match cuda!(cuStreamEndCapture(s => Handle, &raw mut graph => *mut Handle)) {
        0 => Ok(graph),
        e => {
            assert_eq!(graph, NULL, "a NULL graph will be returned");
            Err(e)
        }
    }
}

fn status(s: Handle) -> c_int {
    let mut status = -1;
    ok(cuda!(cuStreamIsCapturing(s => Handle, &raw mut status => *mut c_int)));
    status
}

fn wait(s: Handle, event: Handle) -> Result {
    cuda!(cuStreamWaitEvent(s => Handle, event => Handle, 0 => c_uint))
}

fn fill(s: Handle, at: u64, value: u8) -> Result {
    cuda!(cuMemsetD8Async(at => u64, value => u8, 4 => usize, s => Handle))
}

fn launch_graph(graph: Handle, s: Handle) {
    let mut exec = NULL;
    ok(cuda!(cuGraphInstantiateWithFlags(&raw mut exec => *mut Handle, graph => Handle, 0 => u64)));
    ok(cuda!(cuGraphLaunch(exec => Handle, s => Handle)));
    synchronize(s);
    ok(cuda!(cuGraphExecDestroy(exec => Handle)));
}

fn nodes(graph: Handle) -> Vec<(c_int, Vec<usize>)> {
    let (mut all, mut count) = ([NULL; 16], 16usize);
    ok(cuda!(cuGraphGetNodes(graph => Handle, all.as_mut_ptr() => *mut Handle,
             &raw mut count => *mut usize)));
    let describe = |node: Handle| {
        let (mut kind, mut from, mut room) = (-1, [NULL; 16], 16usize);
        ok(cuda!(cuGraphNodeGetType(node => Handle, &raw mut kind => *mut c_int)));
        ok(cuda!(cuGraphNodeGetDependencies(node => Handle, from.as_mut_ptr() => *mut Handle,
                 &raw mut room => *mut usize)));
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
        ok(
            cuda!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr() => *mut u8, at => u64, 4 => usize, s => Handle)),
        );
        ok(
            cuda!(cuLaunchHostFunc(s => Handle, count => extern "C" fn(*mut c_void), NULL => Handle)),
        );
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
        ok(cuda!(cuMemAllocAsync(&raw mut at => *mut u64, 4 * MIB => usize, s => Handle)));
        ok(fill(s, at, 9));
        ok(cuda!(cuMemFreeAsync(at => u64, s => Handle)));
        let graph = end(s).unwrap();
        assert_eq!(nodes(graph), [(10, vec![]), (2, vec![0]), (11, vec![1])]);
        assert_eq!(free_bytes(), room);
        launch_graph(graph, s);
        assert_eq!(room - free_bytes(), 4 * MIB);
        ok(cuda!(cuDeviceGraphMemTrim(0 => c_int)));
        assert_eq!(free_bytes(), room);
        // What no allocation node made can't be freed by a node.
        let other = alloc(MIB).unwrap();
        begin(s, GLOBAL);
        assert_eq!(cuda!(cuMemFreeAsync(other => u64, s => Handle)), 1);
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
        let prohibited: [(&str, &dyn Fn() -> Result); 8] = [
            ("alloc", &|| alloc(1).err().unwrap_or(0)),
            ("free", &|| free(at)),
            ("synchronize", &|| cuda!(cuStreamSynchronize(s => Handle))),
            ("query", &|| cuda!(cuStreamQuery(s => Handle))),
            ("context", &|| cuda!(cuCtxSynchronize())),
            ("event", &|| cuda!(cuEventQuery(event => Handle))),
            ("another stream", &|| cuda!(cuStreamSynchronize(other => Handle))),
            (
                "attach",
                &|| cuda!(cuStreamAttachMemAsync(s => Handle, at => u64, 64 => usize, 4 => c_uint)),
            ),
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
        assert_eq!(cuda!(cuEventQuery(event => Handle)), CAPTURED_EVENT);
        assert_eq!(end(s), Err(901));
        assert_eq!(cuda!(cuEventSynchronize(event => Handle)), CAPTURED_EVENT);
        record(event, s);
        ok(cuda!(cuEventSynchronize(event => Handle)));
        ok(free(at));
    }

    /// "cuThreadExchangeStreamCaptureMode".
    pub fn a_threads_mode_decides_what_others_captures_prohibit() {
        let context = retain(0) as usize;
        let s = new_stream();
        // What an allocation answers: in this thread, and in another one with the given mode.
        let here = |own: c_int| {
            let mut mode = own;
            ok(cuda!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)));
            let answer = alloc(64).map_or_else(|e| e, |_| 0);
            ok(cuda!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)));
            assert_eq!(mode, own);
            answer
        };
        let there = |mode: c_int| {
            std::thread::scope(|scope| {
                let other = scope.spawn(move || {
                    ok(cuda!(cuCtxSetCurrent(context as Handle => Handle)));
                    here(mode)
                });
                other.join().unwrap()
            })
        };
        let expected = [
            (GLOBAL, [UNSUPPORTED, UNSUPPORTED, 0], [UNSUPPORTED, 0, 0]),
            (THREAD_LOCAL, [UNSUPPORTED, UNSUPPORTED, 0], [0, 0, 0]),
            (RELAXED, [0, 0, 0], [0, 0, 0]),
        ];
        for (capture, own, others) in expected {
            for (i, mode) in [GLOBAL, THREAD_LOCAL, RELAXED].into_iter().enumerate() {
                for (answer, expected) in
                    [(&here as &dyn Fn(c_int) -> Result, own[i]), (&there, others[i])]
                {
                    begin(s, capture);
                    assert_eq!(answer(mode), expected, "capture {capture}, thread {mode}");
                    assert_eq!(end(s).is_ok(), expected == 0);
                }
            }
        }
    }

    /// "cuStreamIsCapturing"; Guide, "Prohibited and Unhandled Operations".
    pub fn the_legacy_stream_waits_for_blocking_captures() {
        retain(0);
        let (mut blocking, at) = (NULL, alloc(64).unwrap());
        let plain = kernel("plain");
        ok(cuda!(cuStreamCreate(&raw mut blocking => *mut Handle, 0 => c_uint)));
        begin(blocking, RELAXED);
        let mut seen = 0;
        assert_eq!(
            cuda!(cuStreamIsCapturing(NULL => Handle, &raw mut seen => *mut c_int)),
            IMPLICIT
        );
        assert_eq!(status(blocking), ACTIVE, "the capture is not invalidated");
        assert_eq!(launch(plain, 1, NULL, std::ptr::null_mut()), IMPLICIT);
        assert_eq!(end(blocking), Err(901));
        begin(blocking, RELAXED);
        assert_eq!(cuda!(cuMemsetD8_v2(at => u64, 1 => u8, 4 => usize)), IMPLICIT);
        assert_eq!(end(blocking), Err(901));
        let own = new_stream();
        begin(own, RELAXED);
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        end(own).unwrap();
        assert_eq!(cuda!(cuStreamBeginCapture_v2(NULL => Handle, RELAXED => c_int)), UNSUPPORTED);
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
        assert_eq!(cuda!(cuStreamBeginCapture_v2(s => Handle, GLOBAL => c_int)), 401);
        let stream = s as usize;
        let elsewhere = || {
            std::thread::scope(|scope| {
                let other = scope.spawn(move || {
                    ok(cuda!(cuCtxSetCurrent(context as Handle => Handle)));
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
        ok(cuda!(cuStreamGetCaptureInfo_v2(s => Handle, &raw mut state => *mut c_int,
                 &raw mut id => *mut u64, &raw mut graph => *mut Handle,
                 &raw mut list => *mut *const Handle, &raw mut count => *mut usize)));
        assert_eq!((state, count), (ACTIVE, 1));
        assert_ne!(id, 0);
        // SAFETY: the driver's array of `count` handles, until the stream is used again.
        let tip = unsafe { *list };
        assert_eq!(end(s), Ok(graph));
        let (mut node, mut room) = (NULL, 1usize);
        ok(cuda!(cuGraphGetNodes(graph => Handle, &raw mut node => *mut Handle,
                 &raw mut room => *mut usize)));
        assert_eq!((node, room), (tip, 1));
    }

    /// "cuStreamBeginCaptureToGraph".
    pub fn a_graph_is_captured_into() {
        retain(0);
        let (s, at) = (new_stream(), alloc(64).unwrap());
        let (mut graph, mut node, mut exec) = (NULL, NULL, NULL);
        ok(cuda!(cuGraphCreate(&raw mut graph => *mut Handle, 0 => c_uint)));
        ok(
            cuda!(cuGraphAddEmptyNode(&raw mut node => *mut Handle, graph => Handle, NULL => Handle, 0 => usize)),
        );
        ok(cuda!(cuStreamBeginCaptureToGraph(s => Handle, graph => Handle,
                 &raw const node => *const Handle, NULL => Handle, 1 => usize, GLOBAL => c_int)));
        ok(fill(s, at, 1));
        let early = cuda!(cuGraphInstantiateWithFlags(&raw mut exec => *mut Handle, graph => Handle, 0 => u64));
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
        let wait = || cuda!(cuStreamWaitEvent(s => Handle, event => Handle, 1 => c_uint));
        assert_eq!(wait(), 1, "invalid when used outside of capture");
        begin(s, GLOBAL);
        ok(wait());
        let graph = end(s).unwrap();
        assert_eq!(nodes(graph), [(6, vec![])]);
        launch_graph(graph, s);
        ok(cuda!(cuEventQuery(event => Handle)));
    }

    pub fn graphs_launched_in_a_capture_are_child_graphs() {
        retain(0);
        let (s, at, mut exec) = (new_stream(), alloc(64).unwrap(), NULL);
        begin(s, GLOBAL);
        ok(fill(s, at, 5));
        let inner = end(s).unwrap();
        ok(
            cuda!(cuGraphInstantiateWithFlags(&raw mut exec => *mut Handle, inner => Handle, 0 => u64)),
        );
        begin(s, GLOBAL);
        ok(cuda!(cuGraphLaunch(exec => Handle, s => Handle)));
        ok(cuda!(cuMemcpyDtoDAsync_v2(at + 8 => u64, at => u64, 4 => usize, s => Handle)));
        let outer = end(s).unwrap();
        assert_eq!(nodes(outer), [(4, vec![]), (1, vec![0])]);
        launch_graph(outer, s);
        assert_eq!(read::<12>(at), [5, 5, 5, 5, 0, 0, 0, 0, 5, 5, 5, 5]);
    }
}
