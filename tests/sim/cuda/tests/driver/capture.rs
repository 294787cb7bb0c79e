//! Stream capture. What is checked is what CUDA's documentation says; each test names the section
//! ("Guide": CUDA Programming Guide, "CUDA Graphs"; else CUDA Driver API).

use crate::harness::*;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

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

// Which calls a capture refuses, to whom: every kind of call in every mode of the capture and of the calling thread
// (`cuThreadExchangeStreamCaptureMode`), in the capturing thread and in another, by a driver before CUDA 12.3 and by a
// new one.

const THREAD_LOCAL: c_int = 1;

/// Makes a call, which any thread may.
type Call<'a> = (&'a str, &'a (dyn Fn() -> Result + Sync));

const PTX: &std::ffi::CStr = c".version 8.0\n.entry plain()\n";

/// `CUmemAllocationProp` of device 0.
const PINNED_ON_0: [c_int; 10] = [1, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// The result of a call that makes something.
fn result_of<T: Default>(call: impl FnOnce(*mut T) -> Result) -> Result {
    made(call).err().unwrap_or(0)
}

fn exchange(mode: c_int) -> c_int {
    let mut mode = mode;
    ok(cuda!(cuThreadExchangeStreamCaptureMode(&raw mut mode)));
    mode
}

/// "If the local thread has an ongoing capture sequence that was not initiated with RELAXED …, or if
/// any other thread has a concurrent capture sequence initiated with GLOBAL".
fn prohibited(capture: c_int, same_thread: bool, own: c_int) -> bool {
    own != RELAXED
        && if same_thread { capture != RELAXED } else { own == GLOBAL && capture == GLOBAL }
}

fn every_call(code_is_unsafe: bool) {
    let context = retain(0) as usize;
    let spare: Vec<u64> = (0..100).map(|_| alloc(64).unwrap()).collect();
    let spare = std::sync::Mutex::new(spare);
    let pool: Handle = must(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)));
    let (pool, event, stream) = (pool as usize, new_event() as usize, new_stream() as usize);
    let is_unsafe: [Call<'_>; 11] = [
        ("cuMemAlloc", &|| result_of(|to| cuda!(cuMemAlloc_v2(to, 64)))),
        ("cuMemAllocManaged", &|| result_of(|to| cuda!(cuMemAllocManaged(to, 64, 1)))),
        ("cuMemFree", &|| free(spare.lock().unwrap().pop().unwrap())),
        ("cuMemAllocHost", &|| result_of(|to| cuda!(cuMemAllocHost_v2(to, 64)))),
        ("cuArrayCreate", &|| {
            let shape = [64usize, 0, 0x20 | 1 << 32];
            result_of(|to| cuda!(cuArrayCreate_v2(to, shape.as_ptr().cast())))
        }),
        ("cuMemPoolGetAttribute", &|| {
            let pool = pool as Handle;
            result_of(|to: *mut u64| cuda!(cuMemPoolGetAttribute(pool, 5, to.cast())))
        }),
        ("cuMemPoolSetAttribute", &|| {
            let pool = pool as Handle;
            result_of(|to: *mut u64| cuda!(cuMemPoolSetAttribute(pool, 4, to.cast())))
        }),
        ("cuEventQuery", &|| cuda!(cuEventQuery(event as Handle))),
        ("cuEventSynchronize", &|| cuda!(cuEventSynchronize(event as Handle))),
        ("cuStreamQuery", &|| cuda!(cuStreamQuery(stream as Handle))),
        ("cuStreamSynchronize", &|| cuda!(cuStreamSynchronize(stream as Handle))),
    ];
    let loads_code: [Call<'_>; 2] = [
        ("cuModuleLoadData", &|| result_of(|to| cuda!(cuModuleLoadData(to, PTX.as_ptr().cast())))),
        ("cuLibraryLoadData", &|| {
            let (code, none) = (PTX.as_ptr().cast(), NULL);
            result_of(|to| {
                cuda!(cuLibraryLoadData(
                    to,
                    code,
                    none.cast(),
                    none.cast(),
                    0,
                    none.cast(),
                    none.cast(),
                    0
                ))
            })
        }),
    ];
    let is_safe: [Call<'_>; 6] = [
        ("cuMemCreate", &|| {
            result_of(|to| cuda!(cuMemCreate(to, 2 * MIB, PINNED_ON_0.as_ptr().cast(), 0)))
        }),
        ("cuMemGetInfo", &|| {
            free_bytes();
            0
        }),
        ("cuDeviceGetDefaultMemPool", &|| result_of(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)))),
        ("cuEventCreate", &|| result_of(|to| cuda!(cuEventCreate(to, 0)))),
        ("cuStreamCreate", &|| result_of(|to| cuda!(cuStreamCreate(to, 1)))),
        ("cuEventRecord", &|| cuda!(cuEventRecord(event as Handle, stream as Handle))),
    ];
    record(event as Handle, stream as Handle);
    synchronize(stream as Handle);
    let s = new_stream();
    let modes = || [GLOBAL, THREAD_LOCAL, RELAXED].into_iter();
    let cases = modes().flat_map(|capture| modes().map(move |own| (capture, own)));
    let kinds = [(&is_unsafe[..], true), (&loads_code[..], code_is_unsafe), (&is_safe[..], false)];
    for (calls, is_unsafe) in kinds {
        for ((name, call), (capture, own)) in
            calls.iter().flat_map(|call| cases.clone().map(move |case| (call, case)))
        {
            let answer = || {
                ok(cuda!(cuCtxSetCurrent(context as Handle)));
                let before = exchange(own);
                let result = call();
                exchange(before);
                result
            };
            for same_thread in [true, false] {
                begin(s, capture);
                let result = match same_thread {
                    true => answer(),
                    false => std::thread::scope(|scope| scope.spawn(answer).join().unwrap()),
                };
                let refused = is_unsafe && prohibited(capture, same_thread, own);
                let at = format!("{name}, capture {capture}, thread {own} {same_thread}");
                assert_eq!(result, if refused { UNSUPPORTED } else { 0 }, "{at}");
                assert_eq!(end(s).err(), refused.then_some(901), "{at}");
            }
        }
    }
}

scenarios! {
    /// Guide, "Stream Capture": "not executed, but will instead be captured".
    fn captured_work_runs_with_each_launch() {
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
    fn forks_and_joins_become_edges() {
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

    fn what_no_allocation_node_made_is_not_freed_by_a_node() {
        retain(0);
        let (s, other) = (new_stream(), alloc(MIB).unwrap());
        begin(s, GLOBAL);
        assert_eq!(cuda!(cuMemFreeAsync(other, s)), 1);
        assert_eq!((status(s), end(s)), (INVALIDATED, Err(901)));
        ok(free(other));
    }

    /// Guide, "Prohibited and Unhandled Operations", "Invalidation".
    fn what_a_capture_prohibits_invalidates_it() {
        retain(0);
        let (s, event) = (new_stream(), new_event());
        let plain = kernel("plain");
        // And what the modes prohibit, see below.
        let prohibited: [(&str, &dyn Fn() -> Result); 3] = [
            ("synchronize", &|| cuda!(cuStreamSynchronize(s))),
            ("query", &|| cuda!(cuStreamQuery(s))),
            ("context", &|| cuda!(cuCtxSynchronize())),
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
    }

    /// "cuStreamIsCapturing"; Guide, "Prohibited and Unhandled Operations".
    fn the_legacy_stream_waits_for_blocking_captures() {
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
    fn captures_do_not_mix() {
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
    fn a_capture_ends_where_and_by_whom_it_began() {
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

    fn graphs_launched_in_a_capture_are_child_graphs() {
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

    fn each_call_is_refused_where_the_modes_say_so() {
        every_call(false);
    }

    fn an_older_driver_loads_no_code_beside_a_capture() with "cuda_version = \"12.2\"\n" {
        every_call(true);
    }
}
