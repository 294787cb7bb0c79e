//! The driver's calls, each scenario in a process of its own.

use crate::harness::*;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

static STEP: AtomicU32 = AtomicU32::new(0);

extern "C" fn first(data: *mut c_void) {
    std::thread::sleep(Duration::from_millis(5));
    // SAFETY: the test's own array, alive until the stream is synchronised.
    unsafe { *data.cast::<u8>() = 42 };
    assert_eq!(STEP.swap(1, Ordering::SeqCst), 0);
}

// Memory that no allocation function obtained: CUDA Driver API, "Context Management"
// (`cuCtxSetLimit`), "Module Management" (lazy loading).

fn set_heap(bytes: usize) {
    ok(cuda!(cuCtxSetLimit(2, bytes)));
}

fn launch_it(function: Handle) -> Result {
    launch(function, 1, NULL, std::ptr::null_mut())
}

/// How many bytes from the beginning `call` writes; it must succeed and write nothing behind them.
fn written(call: impl Fn(*mut c_void) -> Result) -> usize {
    const ROOM: usize = 256;
    let fill = |pattern: u8| {
        let mut bytes = [u64::from_le_bytes([pattern; 8]); ROOM / 8];
        ok(call(bytes.as_mut_ptr().cast()));
        bytes.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()
    };
    // A byte that keeps two unlike patterns was not written.
    let (a, b) = (fill(0xa5), fill(0x5a));
    let kept: Vec<bool> = a.iter().zip(&b).map(|(a, b)| (*a, *b) == (0xa5, 0x5a)).collect();
    let len = kept.iter().take_while(|kept| !**kept).count();
    assert!(kept[len..].iter().all(|kept| *kept), "a gap");
    len
}

/// `CU_POINTER_ATTRIBUTE_*` and the bytes of its value.
const POINTER: &[(c_int, usize)] = &[
    (1, 8),  // CUcontext
    (2, 4),  // unsigned int
    (3, 8),  // CUdeviceptr
    (4, 8),  // void *
    (5, 16), // CUDA_POINTER_ATTRIBUTE_P2P_TOKENS
    (6, 4),  // boolean
    (7, 8),  // unsigned long long
    (8, 4),  // boolean: managed
    (9, 4),  // int
    (10, 4), // boolean: IPC
    (11, 8), // CUdeviceptr
    (12, 8), // size_t
    (13, 4), // boolean: mapped
    (14, 8), // unsigned long long
    (15, 4), // boolean: GPUDirect
    (16, 4), // CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS
    (17, 8), // CUmemoryPool
    (18, 8), // size_t
    (19, 8), // CUdeviceptr
    (20, 8), // unsigned long long
    (21, 4), // boolean: decompression
];

// Threads that are cancelled (pthread_cancel(3)) when they call the driver: no function of it is a cancellation point, so each
// ends at its own next one, and leaves no lock behind.

unsafe extern "C-unwind" {
    /// Ends the thread by unwinding it; libc's own declaration does not say so.
    fn pthread_testcancel();
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

/// A thread whose cancellation is pending from its beginning. Nothing in it needs to be dropped.
extern "C-unwind" fn victim(_: *mut c_void) -> *mut c_void {
    // SAFETY: this very thread.
    unsafe { libc::pthread_cancel(libc::pthread_self()) };
    one_round();
    ROUNDS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: nothing lives here that unwinding would have to drop.
    unsafe { pthread_testcancel() };
    NULL
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
    let rc = unsafe { libc::pthread_create(&raw mut thread, std::ptr::null(), routine, NULL) };
    assert_eq!(rc, 0);
    thread
}

/// Waits for a thread that was cancelled.
fn join(thread: libc::pthread_t) {
    let mut value = NULL;
    // SAFETY: a thread of ours that nobody else joins, and a valid place.
    assert_eq!(unsafe { libc::pthread_join(thread, &raw mut value) }, 0);
    assert_eq!(value as isize, -1, "PTHREAD_CANCELED");
}

scenarios! {
    fn errors_before_init_and_without_a_context() {
        assert_eq!(alloc(1), Err(3));
        assert_eq!(cuda!(cuInit(1)), 1);
        ok(cuda!(cuInit(0)));
        assert_eq!(alloc(1), Err(201));
        assert_eq!(cuda!(cuCtxSynchronize()), 201);
        let mut device = 0;
        assert_eq!(cuda!(cuDeviceGet(&raw mut device, 2)), 101);
        assert_eq!(cuda!(cuDevicePrimaryCtxRelease_v2(0)), 201);
        retain(0);
        assert_eq!(alloc(0), Err(1));
        assert_eq!(free(0xdead_0000), 1);
        assert_eq!(free(0), 0);
        assert_eq!(launch(NULL, 1, NULL, std::ptr::null_mut()), 400);
        assert_eq!(launch(kernel("plain"), 0, NULL, std::ptr::null_mut()), 1);
        ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
        assert_eq!(alloc(1), Err(709), "its context is gone");
    }

    fn copies_and_fills_are_real() {
        retain(0);
        let (a, b) = (alloc(4096).unwrap(), alloc(4096).unwrap());
        let bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
        ok(cuda!(cuMemcpyHtoD_v2(a, bytes.as_ptr().cast(), 4096)));
        ok(cuda!(cuMemcpyDtoD_v2(b, a, 4096)));
        assert_eq!(read::<4096>(b)[..], bytes[..]);
        ok(cuda!(cuMemsetD32_v2(a, 0x0403_0201, 3)));
        ok(cuda!(cuMemsetD16_v2(a + 12, 0x0605, 1)));
        ok(cuda!(cuMemsetD8_v2(a + 14, 9, 1)));
        assert_eq!(read::<16>(a), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 9, 15]);
        // Two rows of three bytes, ten apart.
        ok(cuda!(cuMemsetD2D8_v2(b, 10, 7, 3, 2)));
        assert_eq!(read::<14>(b), [7, 7, 7, 3, 4, 5, 6, 7, 8, 9, 7, 7, 7, 13]);
        assert_eq!(cuda!(cuMemsetD8_v2(a + 4000, 0, 97)), 1, "past the end");
        assert_eq!(cuda!(cuMemcpyDtoD_v2(a, 0x1000, 8)), 1);
    }

    fn kernels_take_the_time_that_the_configuration_says() {
        retain(0);
        let (s, from, to) = (new_stream(), new_event(), new_event());
        let spin = kernel("spin");
        let timed = |n: u32, launch: &dyn Fn() -> Result| {
            keep_busy(spin, s);
            record(from, s);
            (0..n).for_each(|_| ok(launch()));
            record(to, s);
            synchronize(s);
            (elapsed_us(from, to) - 1.0).round()
        };
        let plain = kernel("plain");
        assert_eq!(timed(1000, &|| launch(plain, 1, s, std::ptr::null_mut())), 20_000.0);
        assert_eq!(timed(1, &|| launch_with(spin, s, [0, 123_000])), 123.0);
    }

    fn an_event_of_another_gpu_is_waited_for() {
        retain(0);
        let (s0, e0) = (new_stream(), new_event());
        let slow = kernel("spin");
        ok(launch_with(slow, s0, [0, 30_000_000]));
        record(e0, s0);
        retain(1);
        let (s1, e1) = (new_stream(), new_event());
        let since = Instant::now();
        ok(cuda!(cuStreamWaitEvent(s1, e0, 0)));
        record(e1, s1);
        synchronize(s1);
        assert!(since.elapsed() >= Duration::from_millis(25), "{:?}", since.elapsed());
        assert_eq!(elapsed_us(e0, e1), 1.0, "its end on one GPU is its start on the other");
    }

    fn host_functions_run_in_stream_order() {
        retain(0);
        let s = new_stream();
        let mut value = [0u8; 4];
        let at = alloc(4).unwrap();
        ok(launch(kernel("plain"), 1, s, std::ptr::null_mut()));
        ok(cuda!(cuLaunchHostFunc(s, Some(first), value.as_mut_ptr().cast())));
        ok(cuda!(cuMemcpyHtoDAsync_v2(at, value.as_ptr().cast(), 4, s)));
        synchronize(s);
        assert_eq!(STEP.load(Ordering::SeqCst), 1);
        assert_eq!(read::<4>(at), [42, 0, 0, 0], "the copy saw what the host function wrote");
    }

    fn a_forked_child_has_no_driver() {
        retain(0);
        let before = free_bytes();
        // SAFETY: the child makes two calls and leaves with _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let result = alloc(1).err().unwrap_or(0);
            // SAFETY: ends the child.
            unsafe { libc::_exit(result) };
        }
        let mut status = 0;
        // SAFETY: our own child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 3);
        assert_eq!(free_bytes(), before);
        ok(free(alloc(MIB).unwrap()));
    }

    fn pointers_are_what_they_are() {
        let context = retain(0);
        let at = alloc(1000).unwrap();
        let (mut owner, mut kind) = (NULL, 0u32);
        ok(cuda!(cuPointerGetAttribute((&raw mut owner).cast(), 1, at + 999)));
        ok(cuda!(cuPointerGetAttribute((&raw mut kind).cast(), 2, at)));
        assert_eq!((owner, kind), (context, 2));
        assert_eq!(cuda!(cuPointerGetAttribute((&raw mut kind).cast(), 2, at + 1000)), 1);
        let (mut base, mut size) = (0u64, 0usize);
        ok(cuda!(cuMemGetAddressRange_v2(&raw mut base, &raw mut size, at + 10)));
        assert_eq!((base, size), (at, 1000));
        let host = must(|to| cuda!(cuMemHostAlloc(to, 64, 0)));
        ok(cuda!(cuPointerGetAttribute((&raw mut kind).cast(), 2, host as u64)));
        assert_eq!(kind, 1);
        ok(cuda!(cuMemFreeHost(host)));
    }

    fn memory_is_registered_until_it_is_unregistered() {
        let start = word() as Handle;
        assert_eq!(cuda!(cuMemHostUnregister(start)), 3, "before cuInit");
        retain(0);
        assert_eq!(cuda!(cuMemHostUnregister(start)), 713);
        for _ in 0..2 {
            ok(register_the_word());
            assert_eq!(register_the_word(), 712);
            let kind = must(|to: *mut u32| cuda!(cuPointerGetAttribute(to.cast(), 2, word())));
            assert_eq!(kind, 1);
            ok(cuda!(cuMemHostUnregister(start)));
            assert_eq!(cuda!(cuMemHostUnregister(start)), 713);
        }
        let pinned = must(|to| cuda!(cuMemHostAlloc(to, 64, 0)));
        assert_eq!(cuda!(cuMemHostUnregister(pinned)), 713, "allocated, not registered");
    }

    /// "CU_LIMIT_MALLOC_HEAP_SIZE controls the size in bytes of the heap used by the malloc() and
    /// free() device system calls".
    fn a_raised_heap_is_taken_at_the_next_launch() {
        retain(0);
        let plain = kernel("plain");
        ok(launch_it(plain));
        let room = free_bytes();
        set_heap(128 << 20);
        assert_eq!(free_bytes(), room, "not before a kernel runs");
        ok(launch_it(plain));
        assert_eq!(room - free_bytes(), 120 << 20);
        set_heap(8 << 20);
        ok(launch_it(plain));
        assert_eq!(room - free_bytes(), 120 << 20, "kept");
        set_heap(1 << 40);
        assert_eq!(launch_it(plain), 2, "more than there is");
    }

    /// A fatbin's header, and as much as it says.
    fn a_large_image_takes_its_size_with_its_first_function() {
        retain(0);
        let mut fatbin = [0u8; 16];
        fatbin[..8].copy_from_slice(&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
        fatbin[8..].copy_from_slice(&(300u64 << 20).to_le_bytes());
        let (room, mut module, mut function) = (free_bytes(), NULL, NULL);
        ok(cuda!(cuModuleLoadData(&raw mut module, fatbin.as_ptr().cast())));
        let loaded = free_bytes();
        ok(cuda!(cuModuleGetFunction(&raw mut function, module, c"any".as_ptr())));
        ok(launch_it(function));
        let (launched, whole) = (free_bytes(), 300 << 20);
        assert!((whole..whole + (4 << 20)).contains(&(room - launched)) && loaded > launched);
        ok(launch_it(function));
        assert_eq!(launched, free_bytes());
        ok(cuda!(cuModuleUnload(module)));
        assert_eq!(room, free_bytes());
    }

    /// Whatever is there before: the comments of cuda.h, and its types.
    fn attributes_have_the_manuals_width() {
        retain(0);
        let (mut managed, mut host, mut pooled) = (0u64, NULL, 0u64);
        ok(cuda!(cuMemAllocManaged(&raw mut managed, MIB, 1)));
        ok(cuda!(cuMemAllocHost_v2(&raw mut host, MIB)));
        ok(cuda!(cuMemAllocAsync(&raw mut pooled, MIB, NULL)));
        let device = alloc(MIB).unwrap();
        let local = 5u64;
        for address in [device, managed, host as u64, pooled, &raw const local as u64] {
            for &(which, width) in POINTER {
                let one = |value: *mut c_void| cuda!(cuPointerGetAttribute(value, which, address));
                let mut room = [0u64; 4];
                if one(room.as_mut_ptr().cast()) == 0 {
                    assert_eq!(written(one), width, "attribute {which} of {address:#x}");
                }
            }
            let mut is_managed: c_int = -1;
            let result = cuda!(cuPointerGetAttribute((&raw mut is_managed).cast(), 8, address));
            let known = address != &raw const local as u64;
            assert_eq!(result == 0, known);
            assert_eq!(known.then_some(is_managed), known.then_some((address == managed).into()));
        }
        // Reuse policies are ints, amounts are cuuint64_t.
        let pool: Handle = must(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)));
        for which in 1..=8 {
            let width = written(|to| cuda!(cuMemPoolGetAttribute(pool, which, to)));
            assert_eq!(width, if which <= 3 { 4 } else { 8 }, "{which}");
        }
    }

    fn threads_that_are_cancelled_leave_nothing_locked() {
        // SAFETY: ends this process if it hangs.
        unsafe { libc::alarm(240) };
        CONTEXT.store(retain(0) as usize, Ordering::Relaxed);
        one_round();
        let _: Handle = must(|to| cuda!(cuDeviceGetDefaultMemPool(to, 0)));
        let before = free_bytes();
        let threads: Vec<_> = (0..6).map(|_| start()).collect();
        threads.into_iter().for_each(join);
        assert_eq!(ROUNDS.load(Ordering::Relaxed), 6, "each made all its calls");
        one_round();
        assert_eq!(free_bytes(), before, "what they had is given back");
    }
}
