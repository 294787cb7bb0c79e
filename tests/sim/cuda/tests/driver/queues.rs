//! Streams run by themselves, but for events and the legacy default stream: CUDA Driver API, "Stream
//! synchronization behavior".

use crate::harness::*;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

scenarios! {
    a_stream_does_not_hold_another
    the_legacy_stream_waits_for_blocking_streams_and_they_for_it
    an_event_in_the_legacy_stream_is_a_barrier
    a_stream_waits_for_an_event_of_another
    all_of_a_context_is_waited_for
    with_one_connection_a_stream_holds_another
}

configured! {
    in_one_queue_a_stream_holds_another = "driver = { queues = 1 }\n"
}

const NOT_READY: Result = 600;
const BLOCKING: c_uint = 0;
const NON_BLOCKING: c_uint = 1;

static WORD: AtomicU32 = AtomicU32::new(0);

fn at() -> u64 {
    (&raw const WORD).addr() as u64
}

fn stream(flags: c_uint) -> Handle {
    let mut s = NULL;
    ok(cuda!(cuStreamCreate(&raw mut s => *mut Handle, flags => c_uint)));
    s
}

fn query(s: Handle) -> Result {
    cuda!(cuStreamQuery(s => Handle))
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

mod body {
    use super::*;

    /// A kernel that runs until the word is written, and one that takes its time.
    fn begin() -> (Handle, Handle) {
        retain(0);
        ok(cuda!(cuMemHostRegister_v2((&raw const WORD).cast_mut() => *mut AtomicU32,
                 4 => usize, 0 => c_uint)));
        (kernel("until"), kernel("plain"))
    }

    fn run(function: Handle, s: Handle) {
        let (mut address, mut value) = (at(), 1u64);
        let mut params = [(&raw mut address).cast(), (&raw mut value).cast()];
        ok(launch(function, 1, s, params.as_mut_ptr()));
    }

    fn wait_for_the_word(s: Handle) {
        ok(cuda!(cuStreamWaitValue32_v2(s => Handle, at() => u64, 1 => u32, 0 => c_uint)));
    }

    fn let_go(all: &[Handle]) {
        WORD.store(1, Ordering::SeqCst);
        all.iter().for_each(|s| synchronize(*s));
    }

    pub fn a_stream_does_not_hold_another() {
        let (until, plain) = begin();
        let [kernel, word, s] = [NON_BLOCKING; 3].map(stream);
        let (device, mut host) = (alloc(4).unwrap(), [0u8; 4]);
        run(until, kernel);
        wait_for_the_word(word);
        run(plain, s);
        record(new_event(), s);
        ok(cuda!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr() => *mut u8, device => u64, 4 => usize,
                 s => Handle)));
        assert!(is_done_soon(s));
        assert_eq!((query(kernel), query(word)), (NOT_READY, NOT_READY));
        let_go(&[kernel, word]);
    }

    pub fn in_one_queue_a_stream_holds_another() {
        let (_, plain) = begin();
        let [word, s] = [NON_BLOCKING; 2].map(stream);
        wait_for_the_word(word);
        run(plain, s);
        assert!(is_held(s));
        let_go(&[word, s]);
    }

    pub fn with_one_connection_a_stream_holds_another() {
        set("CUDA_DEVICE_MAX_CONNECTIONS", "1");
        in_one_queue_a_stream_holds_another();
    }

    pub fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
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
    pub fn an_event_in_the_legacy_stream_is_a_barrier() {
        let (until, plain) = begin();
        let ([a, b], event) = ([BLOCKING; 2].map(stream), new_event());
        run(until, a);
        record(event, NULL);
        run(plain, b);
        assert!(is_held(b));
        assert_eq!(cuda!(cuEventQuery(event => Handle)), NOT_READY);
        let_go(&[b]);
        ok(cuda!(cuEventQuery(event => Handle)));
    }

    pub fn a_stream_waits_for_an_event_of_another() {
        let (until, plain) = begin();
        let ([a, b], event) = ([NON_BLOCKING; 2].map(stream), new_event());
        run(until, a);
        record(event, a);
        ok(cuda!(cuStreamWaitEvent(b => Handle, event => Handle, 0 => c_uint)));
        assert!(is_held(b), "synchronising waits for the event, too");
        run(plain, b);
        assert!(is_held(b));
        let_go(&[b]);
        assert_eq!(query(a), 0);
    }

    pub fn all_of_a_context_is_waited_for() {
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
