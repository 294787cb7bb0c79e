//! Which calls a capture refuses, to whom: every kind of call in every mode of the capture and of the
//! calling thread (`cuThreadExchangeStreamCaptureMode`), in the capturing thread and in another, by a
//! driver before CUDA 12.3 and by a new one.

use crate::harness::*;
use std::ffi::c_int;

scenarios! {
    each_call_is_refused_where_the_modes_say_so
}
configured! {
    an_older_driver_loads_no_code_beside_a_capture = "cuda_version = \"12.2\"\n"
}

const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;
const UNSUPPORTED: Result = 900;

/// Makes a call, and undoes it where it did something.
type Call = fn(&Things) -> Result;

/// What the calls need, made before any capture.
struct Things {
    context: usize,
    event: usize,
    stream: usize,
    pool: usize,
    at: u64,
    /// Memory that a call may free.
    spare: std::sync::Mutex<Vec<u64>>,
}

const PTX: &std::ffi::CStr = c".version 8.0\n.entry plain()\n";

/// `CUmemAllocationProp` of device 0.
const PINNED_ON_0: [c_int; 10] = [1, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// What is unsafe always, and what with drivers before 12.3 alone, and what never.
const UNSAFE: &[(&str, Call)] = &[
    ("cuMemAlloc", |_| alloc(64).map_or_else(|e| e, |_| 0)),
    ("cuMemAllocManaged", |_| {
        let mut at = 0u64;
        cuda!(cuMemAllocManaged(&raw mut at, 64, 1))
    }),
    ("cuMemFree", |t| free(t.spare.lock().unwrap().pop().unwrap())),
    ("cuMemAllocHost", |_| {
        let mut at = NULL;
        cuda!(cuMemAllocHost_v2(&raw mut at, 64))
    }),
    ("cuArrayCreate", |_| {
        let (mut array, shape) = (NULL, [64usize, 0, 0x20 | 1 << 32]);
        cuda!(cuArrayCreate_v2(&raw mut array, shape.as_ptr().cast()))
    }),
    ("cuMemPoolGetAttribute", |t| {
        let mut value = 0u64;
        cuda!(cuMemPoolGetAttribute(t.pool as Handle, 5, (&raw mut value).cast()))
    }),
    ("cuMemPoolSetAttribute", |t| {
        let mut value = 0u64;
        cuda!(cuMemPoolSetAttribute(t.pool as Handle, 4, (&raw mut value).cast()))
    }),
    ("cuEventQuery", |t| cuda!(cuEventQuery(t.event as Handle))),
    ("cuEventSynchronize", |t| cuda!(cuEventSynchronize(t.event as Handle))),
    ("cuStreamQuery", |t| cuda!(cuStreamQuery(t.stream as Handle))),
    ("cuStreamSynchronize", |t| cuda!(cuStreamSynchronize(t.stream as Handle))),
];
const CODE: &[(&str, Call)] = &[
    ("cuModuleLoadData", |_| {
        let mut module = NULL;
        cuda!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()))
    }),
    ("cuLibraryLoadData", |_| {
        let mut library = NULL;
        cuda!(cuLibraryLoadData(
            &raw mut library,
            PTX.as_ptr().cast(),
            NULL.cast(),
            NULL.cast(),
            0,
            NULL.cast(),
            NULL.cast(),
            0
        ))
    }),
];
const SAFE: &[(&str, Call)] = &[
    ("cuMemCreate", |_| {
        let mut handle = 0u64;
        cuda!(cuMemCreate(&raw mut handle, 2 * MIB, PINNED_ON_0.as_ptr().cast(), 0))
    }),
    ("cuMemGetInfo", |_| {
        free_bytes();
        0
    }),
    ("cuDeviceGetDefaultMemPool", |_| {
        let mut pool = NULL;
        cuda!(cuDeviceGetDefaultMemPool(&raw mut pool, 0))
    }),
    ("cuEventCreate", |_| {
        new_event();
        0
    }),
    ("cuStreamCreate", |_| {
        new_stream();
        0
    }),
    ("cuEventRecord", |t| cuda!(cuEventRecord(t.event as Handle, t.stream as Handle))),
];

fn exchange(mode: c_int) -> c_int {
    let mut mode = mode;
    ok(cuda!(cuThreadExchangeStreamCaptureMode(&raw mut mode)));
    mode
}

/// What a call answers in this thread with its own mode, while `s` captures.
fn answer(things: &Things, own: c_int, call: Call) -> Result {
    let before = exchange(own);
    let result = call(things);
    exchange(before);
    result
}

/// "If the local thread has an ongoing capture sequence that was not initiated with RELAXED …, or if
/// any other thread has a concurrent capture sequence initiated with GLOBAL".
fn prohibited(capture: c_int, same_thread: bool, own: c_int) -> bool {
    own != RELAXED
        && if same_thread { capture != RELAXED } else { own == GLOBAL && capture == GLOBAL }
}

fn every_call(code_is_unsafe: bool) {
    let context = retain(0) as usize;
    let pool = must(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)));
    let spare = (0..100).map(|_| alloc(64).unwrap()).collect();
    let things = Things {
        context,
        event: new_event() as usize,
        stream: new_stream() as usize,
        pool: pool as usize,
        at: alloc(64).unwrap(),
        spare: std::sync::Mutex::new(spare),
    };
    record(things.event as Handle, things.stream as Handle);
    synchronize(things.stream as Handle);
    let s = new_stream();
    let kinds = [(UNSAFE, true), (CODE, code_is_unsafe), (SAFE, false)];
    let mut made = 0;
    for (calls, is_unsafe) in kinds {
        for (name, call) in calls {
            for capture in [GLOBAL, THREAD_LOCAL, RELAXED] {
                for own in [GLOBAL, THREAD_LOCAL, RELAXED] {
                    for same_thread in [true, false] {
                        ok(cuda!(cuStreamBeginCapture_v2(s, capture)));
                        let things = &things;
                        let result = if same_thread {
                            answer(things, own, *call)
                        } else {
                            std::thread::scope(|scope| {
                                let other = scope.spawn(move || {
                                    ok(cuda!(cuCtxSetCurrent(things.context as Handle)));
                                    answer(things, own, *call)
                                });
                                other.join().unwrap()
                            })
                        };
                        let refused = is_unsafe && prohibited(capture, same_thread, own);
                        let at = format!("{name}, capture {capture}, thread {own} {same_thread}");
                        assert_eq!(result, if refused { UNSUPPORTED } else { 0 }, "{at}");
                        let mut graph = NULL;
                        let ended = cuda!(cuStreamEndCapture(s, &raw mut graph));
                        assert_eq!(ended, if refused { 901 } else { 0 }, "{at}");
                        made += 1;
                    }
                }
            }
        }
    }
    assert_eq!(made, (UNSAFE.len() + CODE.len() + SAFE.len()) * 18);
    ok(free(things.at));
}

mod body {
    pub fn each_call_is_refused_where_the_modes_say_so() {
        super::every_call(false);
    }

    pub fn an_older_driver_loads_no_code_beside_a_capture() {
        super::every_call(true);
    }
}
