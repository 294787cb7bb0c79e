//! Threads that are cancelled (pthread_cancel(3)) while they are in the driver: no driver function is
//! a cancellation point, so each ends at its own next one, and leaves no lock behind.

use crate::harness::*;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

scenarios! {
    threads_that_are_cancelled_leave_nothing_locked
}

unsafe extern "C-unwind" {
    /// Ends the thread by unwinding it; libc's own declaration does not say so.
    fn pthread_testcancel();
}
unsafe extern "C" {
    fn pthread_timedjoin_np(
        thread: libc::pthread_t,
        value: *mut *mut c_void,
        until: *const libc::timespec,
    ) -> c_int;
}

static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static ROUNDS: AtomicUsize = AtomicUsize::new(0);

/// Every kind of call that locks or waits; whole when it returns.
fn one_round() {
    ok(cuda!(cuCtxSetCurrent(CONTEXT.load(Ordering::Relaxed) as Handle)));
    let (s, e) = (new_stream(), new_event());
    let at = alloc(MIB).unwrap();
    let pooled = must(|to| cuda!(cuMemAllocAsync(to, MIB, s)));
    let mut module = NULL;
    let ptx = c".version 8.0\n.entry plain()\n";
    ok(cuda!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast())));
    let (mut function, name) = (NULL, c"plain");
    ok(cuda!(cuModuleGetFunction(&raw mut function, module, name.as_ptr())));
    ok(launch(function, 1, s, std::ptr::null_mut()));
    record(e, s);
    ok(cuda!(cuEventSynchronize(e)));
    ok(cuda!(cuMemFreeAsync(pooled, s)));
    synchronize(s);
    assert_eq!(free(at), 0);
    free_bytes();
    ok(cuda!(cuModuleUnload(module)));
    ok(cuda!(cuEventDestroy_v2(e)));
    ok(cuda!(cuStreamDestroy_v2(s)));
    ok(cuda!(cuCtxSynchronize()));
}

/// A thread that is cancelled sooner or later. Nothing in it needs to be dropped.
extern "C-unwind" fn victim(_: *mut c_void) -> *mut c_void {
    loop {
        one_round();
        ROUNDS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: nothing lives here that unwinding would have to drop.
        unsafe { pthread_testcancel() };
    }
}

fn start() -> libc::pthread_t {
    let mut thread = 0;
    // SAFETY: a thread's function differs only in that it may be unwound, which pthread_create's are.
    let routine = unsafe {
        std::mem::transmute::<
            extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            extern "C" fn(*mut c_void) -> *mut c_void,
        >(victim)
    };
    // SAFETY: a place for the thread, no attributes, a function that needs no argument.
    let rc = unsafe {
        libc::pthread_create(&raw mut thread, std::ptr::null(), routine, std::ptr::null_mut())
    };
    assert_eq!(rc, 0);
    thread
}

/// Waits for a thread that was cancelled.
fn join(thread: libc::pthread_t) {
    // SAFETY: time(2) with no place for a copy.
    let now = unsafe { libc::time(std::ptr::null_mut()) };
    let until = libc::timespec { tv_sec: now + 60, tv_nsec: 0 };
    let mut value = std::ptr::null_mut();
    // SAFETY: a thread of ours that nobody else joins, and valid places.
    let rc = unsafe { pthread_timedjoin_np(thread, &raw mut value, &raw const until) };
    assert_eq!(rc, 0, "a thread that was cancelled hangs");
    assert_eq!(value as isize, -1, "PTHREAD_CANCELED");
}

mod body {
    use super::*;

    pub fn threads_that_are_cancelled_leave_nothing_locked() {
        // SAFETY: ends this process if it hangs.
        unsafe { libc::alarm(240) };
        CONTEXT.store(retain(0) as usize, Ordering::Relaxed);
        one_round();
        let _: Handle = must(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)));
        let before = free_bytes();
        for round in 0..60u32 {
            let threads: Vec<_> = (0..6).map(|_| start()).collect();
            std::thread::sleep(std::time::Duration::from_micros(u64::from(300 * (round % 10))));
            for thread in &threads {
                // SAFETY: a thread of ours that was not joined yet.
                assert_eq!(unsafe { libc::pthread_cancel(*thread) }, 0);
            }
            threads.into_iter().for_each(join);
            one_round();
        }
        assert!(ROUNDS.load(Ordering::Relaxed) > 0);
        assert_eq!(free_bytes(), before, "what they had is given back");
    }
}
