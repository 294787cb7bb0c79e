//! What a context's calls wait for: its lock, and the loading of code under it.

use crate::harness::*;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn is_loaded(function: Handle) -> bool {
    let state = must(|to| cuda!(cuFuncIsLoaded(to, function)));
    state == 1
}

fn mode() -> c_int {
    must(|to| cuda!(cuModuleGetLoadingMode(to)))
}

/// Whether `others` return while a second thread is in `call` of this context, which waits for work
/// that goes on until they return, or for `patience`.
fn pass(patience: Duration, call: impl FnOnce() + Send, others: impl FnOnce()) -> bool {
    let context = retain(0) as usize;
    let (begun, returned) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ok(cuda!(cuCtxSetCurrent(context as Handle)));
            begun.store(true, Ordering::SeqCst);
            call();
        });
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // It is in the call by then; later, a test proves less, and fails as little.
        std::thread::sleep(Duration::from_millis(20));
        let ended = scope.spawn(|| {
            let since = Instant::now();
            while !returned.load(Ordering::SeqCst) && since.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(1));
            }
            let in_time = returned.load(Ordering::SeqCst);
            WORD.store(1, Ordering::SeqCst);
            in_time
        });
        others();
        returned.store(true, Ordering::SeqCst);
        ended.join().unwrap()
    })
}

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(60);

/// What `cuPointerGetAttribute` says of the registered word.
fn is_host() {
    let kind = must(|to: *mut u32| cuda!(cuPointerGetAttribute(to.cast(), 2, word())));
    assert_eq!(kind, 1);
}

/// What the driver's callers do all the time.
fn ask(event: Handle) {
    let _ = cuda!(cuEventQuery(event));
}

struct Work {
    until: Handle,
    busy: Handle,
    other: Handle,
    event: Handle,
    cold: Handle,
}

/// Two streams, a complete event of the other one, a kernel that runs until the word is written, and
/// one that was never launched.
fn work() -> Work {
    retain(0);
    let (until, cold) = (kernel("until"), unloaded("plain"));
    let (busy, other, event) = (new_stream(), new_stream(), new_event());
    ok(register_the_word());
    record(event, other);
    synchronize(other);
    Work { until, busy, other, event, cold }
}

fn keep_it_busy(work: &Work) {
    WORD.store(0, Ordering::SeqCst);
    run(work.until, work.busy);
}

fn is_busy(work: &Work) -> bool {
    cuda!(cuStreamQuery(work.busy)) == 600
}

fn first_launch(cold: usize, stream: usize) {
    ok(launch(cold as Handle, 1, stream as Handle, std::ptr::null_mut()));
}

fn passes_a_first_launch(patience: Duration, call: fn(&Work)) -> bool {
    let work = work();
    keep_it_busy(&work);
    let (cold, to) = (work.cold as usize, work.other as usize);
    let passed = pass(patience, || first_launch(cold, to), || call(&work));
    synchronize(work.busy);
    assert_eq!((mode(), is_loaded(work.cold)), (2, true));
    passed
}

fn pinned(bytes: usize) -> usize {
    let at = must(|to| cuda!(cuMemHostAlloc(to, bytes, 0)));
    at as usize
}

fn unpin(at: usize) {
    ok(cuda!(cuMemFreeHost(at as Handle)));
}

fn eager() {
    retain(0);
    assert_eq!((mode(), is_loaded(unloaded("plain"))), (1, true));
}

scenarios! {
    /// The reproducer of meta-pytorch/torchcomms#2334, with a query in place of the copy.
    fn a_first_launch_waits_for_the_contexts_work_and_other_calls_for_it() {
        assert!(!passes_a_first_launch(SHORT, |work| ask(work.event)));
    }

    fn without_the_lock_calls_pass_a_first_launch() with "driver = { context_lock = false }\n" {
        assert!(passes_a_first_launch(LONG, |work| ask(work.event)));
    }

    fn a_stream_is_not_created_beside_a_first_launch() {
        assert!(!passes_a_first_launch(SHORT, |_| assert!(!new_stream().is_null())));
    }

    fn without_it_a_stream_is_created_beside_a_first_launch() with "driver = { creations_lock = false }\n" {
        assert!(passes_a_first_launch(LONG, |_| assert!(!new_stream().is_null())));
    }

    fn pinned_memory_is_given_back_after_the_contexts_work() {
        let work = work();
        let at = pinned(4096);
        keep_it_busy(&work);
        assert!(!pass(SHORT, || unpin(at), || ask(work.event)));
        assert!(!is_busy(&work));
    }

    fn without_it_pinned_memory_is_given_back_at_once() with "driver = { host_frees_drain = false }\n" {
        let work = work();
        let at = pinned(4096);
        keep_it_busy(&work);
        unpin(at);
        assert!(is_busy(&work));
        WORD.store(1, Ordering::SeqCst);
    }

    /// NVIDIA/TensorRT-LLM#17429; 64 MiB take a quarter of a second here.
    fn questions_for_memory_wait_for_who_pins() with "costs.pin_ms_per_gib = 4000.0\n" {
        let context = retain(0) as usize;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok(cuda!(cuCtxSetCurrent(context as Handle)));
                unpin(pinned(64 << 20));
            });
            std::thread::sleep(Duration::from_millis(50));
            let since = Instant::now();
            free_bytes();
            assert!(since.elapsed() >= Duration::from_millis(50), "{:?}", since.elapsed());
        });
    }

    fn without_drains_a_first_launch_waits_for_nothing() with "driver = { loads_drain = false }\n" {
        let work = work();
        keep_it_busy(&work);
        first_launch(work.cold as usize, work.other as usize);
        assert!(is_busy(&work));
        WORD.store(1, Ordering::SeqCst);
    }

    fn a_loaded_kernel_is_launched_behind_work_at_once() {
        let work = work();
        ok(cuda!(cuFuncLoad(work.cold)));
        keep_it_busy(&work);
        first_launch(work.cold as usize, work.other as usize);
        assert!(is_busy(&work));
        WORD.store(1, Ordering::SeqCst);
    }

    fn a_free_that_waits_keeps_other_calls_waiting() {
        let work = work();
        let others: [fn(&Work); 4] = [
            |work| ask(work.event),
            |work| record(work.event, work.other),
            |_| assert_eq!(free(alloc(64).unwrap()), 0),
            |_| is_host(),
        ];
        for others in others {
            let memory = alloc(1 << 20).unwrap();
            keep_it_busy(&work);
            assert!(!pass(SHORT, || assert_eq!(free(memory), 0), || others(&work)));
        }
    }

    fn a_launch_without_room_keeps_queries_waiting() {
        let work = work();
        ok(cuda!(cuFuncLoad(work.cold)));
        keep_it_busy(&work);
        let (cold, to) = (work.cold as usize, work.other as usize);
        // The queue holds 1,024 operations.
        let fill = || (0..1024).for_each(|_| first_launch(cold, to));
        assert!(!pass(SHORT, fill, || ask(work.event)));
    }

    fn eagerly_a_kernel_is_loaded_with_its_module() with "driver = { lazy_loading = false }\n" {
        eager();
    }

    fn the_variable_goes_before_the_configuration() with "driver = { lazy_loading = false }\n" {
        set("CUDA_MODULE_LOADING", "LAZY");
        retain(0);
        assert_eq!((mode(), is_loaded(unloaded("plain"))), (2, false));
    }

    fn before_12_2_a_kernel_is_loaded_with_its_module() with "cuda_version = \"12.1\"\n" {
        eager();
    }

    fn questions_take_their_time() {
        retain(0);
        let (event, since) = (new_event(), Instant::now());
        (0..100).for_each(|_| record(event, NULL));
        let recorded = since.elapsed();
        (0..100).for_each(|_| ask(event));
        let asked = since.elapsed() - recorded;
        assert!(recorded >= Duration::from_micros(45) && asked >= Duration::from_micros(20));
        work();
        let since = Instant::now();
        (0..100).for_each(|_| is_host());
        assert!(since.elapsed() >= Duration::from_micros(30));
    }
}
