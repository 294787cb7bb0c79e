//! Streams run by themselves, but for events and the legacy default stream: CUDA Driver API, "Stream
//! synchronization behavior".

use crate::harness::*;
use std::ffi::{CString, c_uint, c_void};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tessera_cuda::types::CUlaunchConfig;

const NOT_READY: Result = 600;
const BLOCKING: c_uint = 0;
const NON_BLOCKING: c_uint = 1;

fn stream(flags: c_uint) -> Handle {
    must(|to| cuda!(cuStreamCreate(to, flags)))
}

fn query(s: Handle) -> Result {
    cuda!(cuStreamQuery(s))
}

/// Whether the stream is done while the word is not written.
fn is_done_soon(s: Handle) -> bool {
    let since = Instant::now();
    while query(s) == NOT_READY {
        if since.elapsed() > Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn is_held(s: Handle) -> bool {
    std::thread::sleep(Duration::from_millis(20));
    query(s) == NOT_READY
}

/// A kernel that runs until the word is written, and one that takes its time.
fn begin() -> (Handle, Handle) {
    retain(0);
    ok(register_the_word());
    (kernel("until"), kernel("plain"))
}

fn wait_for_the_word(s: Handle) {
    ok(cuda!(cuStreamWaitValue32_v2(s, word(), 1, 0)));
}

fn let_go(all: &[Handle]) {
    WORD.store(1, Ordering::SeqCst);
    all.iter().for_each(|s| synchronize(*s));
}

/// How long it takes until both streams are done, in kernels' lengths, of 100 ms.
fn lengths(streams: [Handle; 2], work: impl FnOnce()) -> u128 {
    let since = Instant::now();
    work();
    streams.into_iter().for_each(synchronize);
    since.elapsed().as_millis() / 100
}

fn of_two_streams() -> u128 {
    retain(0);
    let (spin, streams) = (kernel("spin"), [NON_BLOCKING; 2].map(stream));
    lengths(streams, || streams.iter().for_each(|s| keep_busy(spin, *s)))
}

/// A pair of kernels, of which the second need not wait for the first if nothing is between them.
fn of_a_pair(lets_go: &str, between: fn(Handle)) -> u128 {
    retain(0);
    let (mut module, mut spin) = (NULL, NULL);
    let ptx = format!(".version 7.8\n.entry spin()\n{lets_go}\n");
    let ptx = CString::new(ptx).unwrap();
    ok(cuda!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast())));
    ok(cuda!(cuModuleGetFunction(&raw mut spin, module, c"spin".as_ptr())));
    ok(cuda!(cuFuncLoad(spin)));
    // `CUlaunchAttribute` of 72 bytes: its number, and behind eight bytes its value.
    let mut attribute = [0u32; 18];
    (attribute[0], attribute[2]) = (6, 1);
    let s = stream(NON_BLOCKING);
    let config = CUlaunchConfig {
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: s.cast(),
        attrs: attribute.as_mut_ptr().cast(),
        numAttrs: 1,
    };
    lengths([s; 2], || {
        keep_busy(spin, s);
        between(s);
        let (mut unused, mut ns) = (0u64, 100_000_000u64);
        let mut params = [(&raw mut unused).cast::<c_void>(), (&raw mut ns).cast()];
        ok(cuda!(cuLaunchKernelEx(
            &raw const config,
            spin,
            params.as_mut_ptr(),
            std::ptr::null_mut()
        )));
    })
}

const LETS_GO: &str = "griddepcontrol.launch_dependents;

";

scenarios! {
    fn a_stream_does_not_hold_another() {
        let (until, plain) = begin();
        let [kernel, word, s] = [NON_BLOCKING; 3].map(stream);
        let (device, mut host) = (alloc(4).unwrap(), [0u8; 4]);
        run(until, kernel);
        wait_for_the_word(word);
        run(plain, s);
        record(new_event(), s);
        ok(cuda!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), device, 4, s)));
        assert!(is_done_soon(s));
        assert_eq!((query(kernel), query(word)), (NOT_READY, NOT_READY));
        let_go(&[kernel, word]);
    }

    fn in_one_queue_a_stream_holds_another() with "driver = { queues = 1 }\n" {
        let (_, plain) = begin();
        let [word, s] = [NON_BLOCKING; 2].map(stream);
        wait_for_the_word(word);
        run(plain, s);
        assert!(is_held(s));
        let_go(&[word, s]);
    }

    fn with_one_connection_a_stream_holds_another() {
        set("CUDA_DEVICE_MAX_CONNECTIONS", "1");
        in_one_queue_a_stream_holds_another();
    }

    fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
        let (until, plain) = begin();
        let ([a, b], apart) = ([BLOCKING; 2].map(stream), stream(NON_BLOCKING));
        run(until, a);
        run(plain, b);
        assert!(is_done_soon(b), "nothing is in the legacy stream");
        run(plain, NULL);
        run(plain, b);
        run(plain, apart);
        assert!(is_done_soon(apart));
        assert!(is_held(b) && is_held(NULL));
        let_go(&[a, b, NULL]);
    }

    /// What a marker in the legacy stream does to programs of blocking streams.
    fn an_event_in_the_legacy_stream_is_a_barrier() {
        let (until, plain) = begin();
        let ([a, b], event) = ([BLOCKING; 2].map(stream), new_event());
        run(until, a);
        record(event, NULL);
        run(plain, b);
        assert!(is_held(b));
        assert_eq!(cuda!(cuEventQuery(event)), NOT_READY);
        let_go(&[b]);
        ok(cuda!(cuEventQuery(event)));
    }

    fn a_stream_waits_for_an_event_of_another() {
        let (until, plain) = begin();
        let ([a, b], event) = ([NON_BLOCKING; 2].map(stream), new_event());
        run(until, a);
        record(event, a);
        ok(cuda!(cuStreamWaitEvent(b, event, 0)));
        assert!(is_held(b), "synchronising waits for the event, too");
        run(plain, b);
        assert!(is_held(b));
        let_go(&[b]);
        assert_eq!(query(a), 0);
    }

    fn kernels_of_several_streams_run_at_once() {
        assert_eq!(of_two_streams(), 1);
    }

    fn one_by_one_kernels_of_several_streams_take_their_sum() with "driver.concurrent_kernels = false\n" {
        assert_eq!(of_two_streams(), 2);
    }

    /// CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
    fn a_chained_kernel_begins_with_the_one_before_it() {
        assert_eq!(of_a_pair(LETS_GO, |_| ()), 1);
        assert_eq!(of_a_pair("", |_| ()), 2, "unless that does not let it");
        assert_eq!(of_a_pair(LETS_GO, |s| record(new_event(), s)), 2, "or something is between");
    }

    fn unchained_a_kernel_waits_for_the_one_before_it() with "driver.chained_kernels = false\n" {
        assert_eq!(of_a_pair(LETS_GO, |_| ()), 2);
    }

    fn all_of_a_context_is_waited_for() {
        let (until, plain) = begin();
        let streams: Vec<Handle> = (0..20).map(|_| stream(NON_BLOCKING)).collect();
        run(until, streams[3]);
        streams[10..].iter().for_each(|s| run(plain, *s));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                WORD.store(1, Ordering::SeqCst);
            });
            ok(cuda!(cuCtxSynchronize()));
        });
        assert!(streams.iter().all(|s| query(*s) == 0));
        assert_eq!(WORD.load(Ordering::SeqCst), 1);
    }
}
