//! What a context's calls wait for: its lock, and the loading of code under it. `tests/gpu/probes/findings.py` shows more
//! of it, as the simulator is by default and as its authors once believed.

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
/// that goes on until they return, or for a while.
fn pass(call: impl FnOnce() + Send, others: impl FnOnce()) -> bool {
    const A_WHILE: Duration = Duration::from_millis(100);
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
            while !returned.load(Ordering::SeqCst) && since.elapsed() < A_WHILE {
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
}

/// Two streams, a complete event of the other one, and a kernel that runs until the word is written.
fn work() -> Work {
    retain(0);
    let until = kernel("until");
    let (busy, other, event) = (new_stream(), new_stream(), new_event());
    ok(register_the_word());
    record(event, other);
    synchronize(other);
    Work { until, busy, other, event }
}

fn keep_it_busy(work: &Work) {
    WORD.store(0, Ordering::SeqCst);
    run(work.until, work.busy);
}

fn eager() {
    retain(0);
    assert_eq!((mode(), is_loaded(unloaded("plain"))), (1, true));
}

scenarios! {
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
            assert!(!pass(|| assert_eq!(free(memory), 0), || others(&work)));
        }
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
