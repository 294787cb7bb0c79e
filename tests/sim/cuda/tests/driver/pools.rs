//! Memory pools against CUDA's documentation: CUDA Driver API, "Stream Ordered Memory Allocator"
//! (the comments of cuda.h), and CUDA C++ Programming Guide, the chapter of the same name.

use crate::harness::*;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tessera_cuda::types::{CUmemLocation, CUmemPoolProps};

const FOLLOW: c_int = 1;
const OPPORTUNISTIC: c_int = 2;
const INTERNAL: c_int = 3;
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;

fn default_pool(device: c_int) -> Handle {
    must(|to| cuda!(cuDeviceGetDefaultMemPool(to, device)))
}

fn current_pool(device: c_int) -> Handle {
    must(|to| cuda!(cuDeviceGetMemPool(to, device)))
}

/// A pool of the first GPU.
fn create() -> Handle {
    // SAFETY: numbers and pointers, for which zero is a value.
    let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
    (props.allocType, props.location) = (1, CUmemLocation { r#type: 1, id: 0 });
    must(|to| cuda!(cuMemPoolCreate(to, &raw const props)))
}

fn get(pool: Handle, which: c_int) -> u64 {
    must(|to: *mut u64| cuda!(cuMemPoolGetAttribute(pool, which, to.cast())))
}

fn set(pool: Handle, which: c_int, mut value: u64) -> Result {
    cuda!(cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()))
}

fn alloc_async(bytes: usize, s: Handle) -> Outcome<u64> {
    made(|to| cuda!(cuMemAllocAsync(to, bytes, s)))
}

fn alloc_from(pool: Handle, bytes: usize, s: Handle) -> Outcome<u64> {
    made(|to| cuda!(cuMemAllocFromPoolAsync(to, bytes, pool, s)))
}

fn free_async(at: u64, s: Handle) -> Result {
    cuda!(cuMemFreeAsync(at, s))
}

/// In MiB.
fn reserved(pool: Handle) -> u64 {
    get(pool, RESERVED) >> 20
}

scenarios! {
    /// "Basic stream ordering allows future work submitted into the same stream to use the
    /// allocation": what one stream frees, its later allocations have.
    fn the_same_stream_has_its_free_memory_again_at_once() {
        retain(0);
        let (pool, s) = (default_pool(0), new_stream());
        let a = alloc_async(30 * MIB, s).unwrap();
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        let b = alloc_async(30 * MIB, s).unwrap();
        assert_eq!((a, reserved(pool)), (b, 32));
    }

    /// "Allow cuMemAllocAsync to use memory asynchronously freed in another stream as long as a
    /// stream ordering dependency of the allocating stream on the free action exists. Cuda events
    /// and null stream interactions can create the required stream ordered dependencies."
    /// (`CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES`).
    fn another_stream_has_it_after_an_event() {
        retain(0);
        let pool = default_pool(0);
        let [s, middle, other, stranger] = [(); 4].map(|()| new_stream());
        let (event, second) = (new_event(), new_event());
        let a = alloc_async(30 * MIB, s).unwrap();
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        record(event, s);
        let b = alloc_async(30 * MIB, stranger).unwrap();
        assert_eq!(reserved(pool), 64, "no dependency, not complete");
        // Through a third stream.
        let wait = |s: Handle, e: Handle| {
            ok(cuda!(cuStreamWaitEvent(s, e, 0)));
        };
        wait(middle, event);
        record(second, middle);
        wait(other, second);
        ok(set(pool, FOLLOW, 0));
        ok(set(pool, OPPORTUNISTIC, 0));
        let c = alloc_async(30 * MIB, other).unwrap();
        assert_eq!(reserved(pool), 96, "following is forbidden");
        ok(set(pool, FOLLOW, 1));
        assert_eq!((alloc_async(30 * MIB, other), reserved(pool)), (Ok(a), 96));
        // The legacy default stream comes after blocking streams, and they after it.
        let blocking = must(|to| cuda!(cuStreamCreate(to, 0)));
        keep_busy(kernel("spin"), blocking);
        ok(free_async(b, blocking));
        assert_eq!(alloc_async(30 * MIB, NULL), Ok(b));
        ok(free_async(c, NULL));
        assert_eq!(alloc_async(30 * MIB, blocking), Ok(c));
    }

    /// "Allow reuse of already completed frees when there is no dependency between the free and
    /// allocation." (`CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC`).
    fn another_stream_has_it_once_the_free_is_complete() {
        retain(0);
        let (pool, s, other) = (default_pool(0), new_stream(), new_stream());
        ok(set(pool, THRESHOLD, u64::MAX));
        let a = alloc_async(30 * MIB, s).unwrap();
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        let b = alloc_async(30 * MIB, other).unwrap();
        assert_ne!(a, b);
        while cuda!(cuStreamQuery(s)) != 0 {}
        assert_eq!(alloc_async(30 * MIB, other), Ok(a));
        assert_eq!(reserved(pool), 64);
    }

    /// "Allow cuMemAllocAsync to insert new stream dependencies in order to establish the stream
    /// ordering required to reuse a piece of memory released by cuMemFreeAsync"
    /// (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`).
    fn short_of_memory_a_dependency_is_inserted() {
        retain(0);
        let (pool, s, other) = (default_pool(0), new_stream(), new_stream());
        let _odd = alloc(MIB).unwrap();
        let most = free_bytes() - 8 * MIB;
        let a = alloc_async(most, s).unwrap();
        assert_eq!(reserved(pool), most as u64 >> 20, "a chunk that just fits");
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        ok(set(pool, INTERNAL, 0));
        assert_eq!(alloc_async(most, other), Err(2));
        ok(set(pool, INTERNAL, 1));
        assert_eq!(alloc_async(most, other), Ok(a));
    }

    /// What a pool merely holds is no reason to refuse memory to the same process.
    fn memory_held_unused_does_not_refuse_other_memory() {
        retain(0);
        let (pool, s, room) = (default_pool(0), new_stream(), free_bytes());
        ok(set(pool, THRESHOLD, u64::MAX));
        let hold = || {
            let at = alloc_async(room / 2, s).unwrap();
            ok(free_async(at, s));
            synchronize(s);
            assert!(free_bytes() <= room / 2);
        };
        hold();
        ok(free(alloc(room).unwrap()));
        hold();
        let own = create();
        let at = alloc_from(own, room - 2 * MIB, s).unwrap();
        assert_eq!(reserved(pool), 0);
        ok(free_async(at, s));
        assert_eq!(alloc(room + 1), Err(2));
    }

    /// `cuDeviceSetMemPool`: "pool must be local to the specified device"; "Destroying the current
    /// mempool of a device sets the default mempool of that device as the current mempool".
    fn a_devices_current_pool_can_be_replaced() {
        retain(0);
        let s = new_stream();
        let pool = create();
        let set_current = |pool: Handle, d: c_int| cuda!(cuDeviceSetMemPool(d, pool));
        assert_eq!(current_pool(0), default_pool(0));
        ok(set_current(pool, 0));
        assert_eq!((current_pool(0), current_pool(1)), (pool, default_pool(1)));
        assert_eq!(set_current(pool, 1), 1);
        let at = alloc_async(MIB, s).unwrap();
        assert_eq!((reserved(pool), reserved(default_pool(0))), (32, 0));
        let from = must(|to: *mut Handle| cuda!(cuPointerGetAttribute(to.cast(), 17, at)));
        assert_eq!(from, pool, "CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE");
        ok(cuda!(cuMemPoolDestroy(pool)));
        assert_eq!(current_pool(0), default_pool(0));
    }

    /// Each pool is its creator's until it is destroyed, which succeeds once, whichever process gives memory
    /// back meanwhile.
    fn pools_come_and_go_while_other_threads_synchronise() {
        const ROUNDS: usize = 3000;
        let context = retain(0) as usize;
        let (live, busy) = (Mutex::new(BTreeSet::new()), AtomicUsize::new(0));
        let come_and_go = |free_first: bool| {
            ok(cuda!(cuCtxSetCurrent(context as Handle)));
            let s = new_stream();
            for _ in 0..ROUNDS {
                let pool = create();
                assert!(live.lock().unwrap().insert(pool as usize), "it is another thread's");
                let at = alloc_from(pool, MIB, s).unwrap();
                if free_first {
                    ok(free_async(at, s));
                    synchronize(s);
                }
                live.lock().unwrap().remove(&(pool as usize));
                ok(cuda!(cuMemPoolDestroy(pool)));
                if !free_first {
                    ok(free_async(at, s));
                    synchronize(s);
                }
            }
            busy.fetch_sub(1, Ordering::AcqRel);
        };
        let come_and_go = &come_and_go;
        std::thread::scope(|scope| {
            for free_first in [true, false, true, false] {
                busy.fetch_add(1, Ordering::AcqRel);
                scope.spawn(move || come_and_go(free_first));
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    ok(cuda!(cuCtxSetCurrent(context as Handle)));
                    while busy.load(Ordering::Acquire) > 0 {
                        ok(cuda!(cuCtxSynchronize()));
                    }
                });
            }
        });
        assert_eq!(free_bytes(), 16 * 1024 * MIB - 64 * MIB, "nothing is left behind");
    }
}
