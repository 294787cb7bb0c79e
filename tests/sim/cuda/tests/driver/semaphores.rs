//! Semaphores of other APIs: CUDA Driver API, "External Resource Interoperability". The other side is memory
//! that the test maps.

use crate::harness::*;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

scenarios! {
    a_stream_waits_until_the_counter_has_been_reached
    a_stream_signals_when_it_gets_there
}

const TIMELINE_FD: c_int = 9;
const NOT_READY: Result = 600;

/// `CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC`.
#[repr(C)]
struct Description(c_int, [u64; 2], c_uint, [c_uint; 16]);

/// `CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS` and `…_WAIT_PARAMS`.
#[repr(C)]
struct Params(u64, [u64; 8], c_uint, [c_uint; 16]);

fn to(value: u64) -> Params {
    Params(value, [0; 8], 0, [0; 16])
}

/// A counter, and a descriptor of it.
fn counter() -> (c_int, &'static AtomicU64) {
    // SAFETY: a file of a page, mapped and never unmapped; its first word is aligned.
    unsafe {
        let fd = libc::memfd_create(c"timeline".as_ptr(), 0);
        assert_eq!(libc::ftruncate(fd, 4096), 0);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let at = libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        (fd, &*at.cast::<AtomicU64>())
    }
}

fn import(kind: c_int, fd: c_int) -> Outcome<Handle> {
    let description = Description(kind, [u64::from(fd.cast_unsigned()), 0], 0, [0; 16]);
    made(|to| cuda!(cuImportExternalSemaphore(to, (&raw const description).cast())))
}

fn wait(semaphore: Handle, value: u64, s: Handle) -> Result {
    let (list, params) = ([semaphore], [to(value)]);
    cuda!(cuWaitExternalSemaphoresAsync(list.as_ptr(), params.as_ptr().cast(), 1, s))
}

fn signal(semaphore: Handle, value: u64, s: Handle) -> Result {
    let (list, params) = ([semaphore], [to(value)]);
    cuda!(cuSignalExternalSemaphoresAsync(list.as_ptr(), params.as_ptr().cast(), 1, s))
}

fn query(s: Handle) -> Result {
    cuda!(cuStreamQuery(s))
}

mod body {
    use super::*;

    pub fn a_stream_waits_until_the_counter_has_been_reached() {
        retain(0);
        let (s, (fd, counter)) = (new_stream(), counter());
        let semaphore = import(TIMELINE_FD, fd).unwrap();
        // SAFETY: asks about a descriptor.
        let is_open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
        assert!(!is_open, "the driver's now");
        ok(wait(semaphore, 0, s));
        synchronize(s);
        ok(wait(semaphore, 5, s));
        counter.store(4, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(query(s), NOT_READY);
        counter.store(7, Ordering::SeqCst);
        synchronize(s);
        ok(cuda!(cuDestroyExternalSemaphore(semaphore)));
        assert_eq!(wait(semaphore, 5, s), 400);
        assert_eq!(cuda!(cuDestroyExternalSemaphore(semaphore)), 400);
    }

    pub fn a_stream_signals_when_it_gets_there() {
        retain(0);
        let (s, (fd, counter)) = (new_stream(), counter());
        let semaphore = import(TIMELINE_FD, fd).unwrap();
        ok(wait(semaphore, 1, s));
        ok(signal(semaphore, 9, s));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counter.load(Ordering::SeqCst), 0, "not before the wait is over");
        counter.store(1, Ordering::SeqCst);
        synchronize(s);
        assert_eq!(counter.load(Ordering::SeqCst), 9);
    }
}
