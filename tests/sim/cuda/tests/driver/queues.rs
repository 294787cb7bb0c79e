//! Streams run by themselves, but for events and the legacy default stream: CUDA Driver API, "Stream
//! synchronization behavior". `tests/gpu/probes/findings.py` shows that they and their kernels run at once and chained, or by
//! another configuration do not.

use crate::harness::*;
use std::ffi::c_uint;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const NOT_READY: Result = 600;
const BLOCKING: c_uint = 0;
const NON_BLOCKING: c_uint = 1;

fn stream(flags: c_uint) -> Handle {
    must(|to| cuda!(cuStreamCreate(to, flags)))
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

fn let_go(all: &[Handle]) {
    WORD.store(1, Ordering::SeqCst);
    all.iter().for_each(|s| synchronize(*s));
}

scenarios! {
    fn with_one_connection_a_stream_holds_another() {
        set("CUDA_DEVICE_MAX_CONNECTIONS", "1");
        let (_, plain) = begin();
        let [waiting, s] = [NON_BLOCKING; 2].map(stream);
        ok(cuda!(cuStreamWaitValue32_v2(waiting, word(), 1, 0)));
        run(plain, s);
        assert!(is_held(s));
        let_go(&[waiting, s]);
    }

    fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
        let (until, plain) = begin();
        let ([a, b], apart) = ([BLOCKING; 2].map(stream), stream(NON_BLOCKING));
        let event = new_event();
        run(until, a);
        run(plain, b);
        assert!(is_done_soon(b), "nothing is in the legacy stream");
        // A marker there is as good as a kernel.
        record(event, NULL);
        run(plain, b);
        run(plain, apart);
        assert!(is_done_soon(apart));
        assert!(is_held(b) && is_held(NULL));
        assert_eq!(cuda!(cuEventQuery(event)), NOT_READY);
        let_go(&[a, b, NULL]);
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
