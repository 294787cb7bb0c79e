//! Memory pools against CUDA's documentation: CUDA Driver API, "Stream Ordered Memory Allocator"
//! (the comments of cuda.h), and CUDA C++ Programming Guide, the chapter of the same name.

use crate::harness::*;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

scenarios! {
    the_same_stream_has_its_free_memory_again_at_once
    another_stream_has_it_after_an_event
    another_stream_has_it_once_the_free_is_complete
    opportunistic_reuse_can_be_forbidden
    short_of_memory_a_dependency_is_inserted
    memory_held_unused_does_not_refuse_other_memory
    pools_are_created_as_their_properties_say
    a_pool_has_no_more_than_its_maximum
    a_destroyed_pool_lives_until_its_last_allocation
    a_devices_current_pool_can_be_replaced
    current_pools_have_places
    pools_come_and_go_while_other_threads_synchronise
}

const FOLLOW: c_int = 1;
const OPPORTUNISTIC: c_int = 2;
const INTERNAL: c_int = 3;
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Props {
    allocation: c_int,
    handles: c_int,
    location: [c_int; 2],
    security: usize,
    max_size: usize,
    rest: [u8; 56],
}

const DEVICE_0: Props =
    Props { allocation: 1, handles: 0, location: [1, 0], security: 0, max_size: 0, rest: [0; 56] };

fn default_pool(device: c_int) -> Handle {
    must(|to| cuda!(cuDeviceGetDefaultMemPool(to, device)))
}

fn current_pool(device: c_int) -> Handle {
    must(|to| cuda!(cuDeviceGetMemPool(to, device)))
}

fn create(props: Props) -> Outcome<Handle> {
    made(|to| cuda!(cuMemPoolCreate(to, (&raw const props).cast())))
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

mod body {
    use super::*;

    /// "Basic stream ordering allows future work submitted into the same stream to use the
    /// allocation": what one stream frees, its later allocations have.
    pub fn the_same_stream_has_its_free_memory_again_at_once() {
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
    pub fn another_stream_has_it_after_an_event() {
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
    pub fn another_stream_has_it_once_the_free_is_complete() {
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

    /// The same attribute, forbidden: what the host has synchronised with is reused all the same
    /// (Programming Guide: "the driver will still reuse memory that … a stream is synchronized
    /// with the CPU").
    pub fn opportunistic_reuse_can_be_forbidden() {
        retain(0);
        let (pool, s, other) = (default_pool(0), new_stream(), new_stream());
        ok(set(pool, THRESHOLD, u64::MAX));
        ok(set(pool, OPPORTUNISTIC, 0));
        let a = alloc_async(30 * MIB, s).unwrap();
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        while cuda!(cuStreamQuery(s)) != 0 {}
        assert_ne!(alloc_async(30 * MIB, other), Ok(a));
        synchronize(s);
        assert_eq!(alloc_async(30 * MIB, other), Ok(a));
    }

    /// "Allow cuMemAllocAsync to insert new stream dependencies in order to establish the stream
    /// ordering required to reuse a piece of memory released by cuMemFreeAsync"
    /// (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`).
    pub fn short_of_memory_a_dependency_is_inserted() {
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
    pub fn memory_held_unused_does_not_refuse_other_memory() {
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
        let own = create(DEVICE_0).unwrap();
        let at = alloc_from(own, room - 2 * MIB, s).unwrap();
        assert_eq!(reserved(pool), 0);
        ok(free_async(at, s));
        assert_eq!(alloc(room + 1), Err(2));
    }

    /// `cuMemPoolCreate`, and `CU_MEMPOOL_ATTR_*` of CUDA 13.
    pub fn pools_are_created_as_their_properties_say() {
        retain(0);
        let s = new_stream();
        let room = free_bytes();
        let numbers = |pool: Handle| [9, 10, 11, 12].map(|which| get(pool, which) & 0xffff_ffff);
        let pool = create(DEVICE_0).unwrap();
        assert_eq!((numbers(pool), get(pool, 13)), ([1, 0, 0, 1], 0));
        let other = create(Props { location: [1, 1], ..DEVICE_0 }).unwrap();
        assert_eq!(numbers(other), [1, 0, 1, 1]);
        // "The specified memory pool may be from a device different than that of the … stream."
        alloc_from(other, MIB, s).unwrap();
        assert_eq!((reserved(other), free_bytes()), (32, room));
        let host = create(Props { location: [2, 99], ..DEVICE_0 }).unwrap();
        let numa = create(Props { location: [3, 0], ..DEVICE_0 }).unwrap();
        assert_eq!((numbers(host)[3], numbers(numa)[3]), (2, 3));
        for pool in [host, numa] {
            let at = alloc_from(pool, MIB, s).unwrap();
            assert_eq!(free_bytes(), room, "host memory");
            ok(cuda!(cuMemsetD8Async(at, 1, MIB, s)));
            ok(free_async(at, s));
        }
        let managed = create(Props { allocation: 2, ..DEVICE_0 }).unwrap();
        alloc_from(managed, MIB, s).unwrap();
        assert_eq!(numbers(managed)[0], 2);
        create(Props { allocation: 2, location: [0, 0], ..DEVICE_0 }).unwrap();
    }

    /// "Applications can control the maximum size of the pool by specifying a non-zero value for
    /// maxSize", which "may be higher … due to alignment requirements".
    pub fn a_pool_has_no_more_than_its_maximum() {
        retain(0);
        let s = new_stream();
        let pool = create(Props { max_size: 39 * MIB, ..DEVICE_0 }).unwrap();
        assert_eq!(get(pool, 13) >> 20, 40);
        let a = alloc_from(pool, 30 * MIB, s).unwrap();
        assert_eq!(alloc_from(pool, 10 * MIB, s), Err(2));
        alloc_from(pool, 7 * MIB, s).unwrap();
        assert_eq!(reserved(pool), 40);
        ok(free_async(a, s));
        alloc_from(pool, 20 * MIB, s).unwrap();
    }

    /// "the function will return immediately and the resources associated with the pool will be
    /// released automatically once there are no more outstanding allocations" (`cuMemPoolDestroy`).
    pub fn a_destroyed_pool_lives_until_its_last_allocation() {
        retain(0);
        let (s, room) = (new_stream(), free_bytes());
        let pool = create(DEVICE_0).unwrap();
        let (a, b) = (alloc_from(pool, MIB, s).unwrap(), alloc_from(pool, 40 * MIB, s).unwrap());
        keep_busy(kernel("spin"), s);
        ok(free_async(a, s));
        let destroy = |pool: Handle| cuda!(cuMemPoolDestroy(pool));
        ok(destroy(pool));
        assert_eq!(destroy(pool), 1);
        assert_eq!(alloc_from(pool, MIB, s), Err(1));
        assert_eq!(room - free_bytes(), 96 * MIB);
        ok(free_async(b, s));
        synchronize(s);
        assert_eq!(free_bytes(), room);
        let unused = create(DEVICE_0).unwrap();
        let at = alloc_from(unused, MIB, s).unwrap();
        ok(free_async(at, s));
        ok(destroy(unused));
        assert_eq!(free_bytes(), room, "nothing outstanding");
        // "A device's default memory pool cannot be destroyed."
        assert_eq!(destroy(default_pool(0)), 1);
    }

    /// `cuDeviceSetMemPool`: "pool must be local to the specified device"; "Destroying the current
    /// mempool of a device sets the default mempool of that device as the current mempool".
    pub fn a_devices_current_pool_can_be_replaced() {
        retain(0);
        let s = new_stream();
        let pool = create(DEVICE_0).unwrap();
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

    /// `cuMemGetDefaultMemPool`, `cuMemGetMemPool` (CUDA 13).
    pub fn current_pools_have_places() {
        retain(0);
        let of = |mut place: [c_int; 2], kind: c_int, current: bool| {
            let mut pool = NULL;
            let (out, place) = (&raw mut pool, &raw mut place);
            let result = if current {
                cuda!(cuMemGetMemPool(out, place.cast(), kind))
            } else {
                cuda!(cuMemGetDefaultMemPool(out, place.cast(), kind))
            };
            if result == 0 { Ok(pool) } else { Err(result) }
        };
        assert_eq!(of([1, 0], 1, false), Ok(default_pool(0)));
        let own = create(DEVICE_0).unwrap();
        ok(cuda!(cuDeviceSetMemPool(0, own)));
        assert_eq!(of([1, 0], 1, true), Ok(own));
        let host = of([2, 0], 1, false).unwrap();
        assert_eq!(of([2, 0], 1, true), Ok(host));
        let managed = of([0, 0], 2, false).unwrap();
        assert_ne!(managed, of([1, 0], 2, false).unwrap());
        assert_eq!((of([0, 0], 1, false), of([4, 0], 1, false)), (Err(1), Err(1)));
        assert_eq!(cuda!(cuMemPoolDestroy(managed)), 1, "a default pool");
    }

    /// Each pool is its creator's until it is destroyed, which succeeds once, whichever process gives memory
    /// back meanwhile.
    pub fn pools_come_and_go_while_other_threads_synchronise() {
        const ROUNDS: usize = 3000;
        let context = retain(0) as usize;
        let (live, busy) = (Mutex::new(BTreeSet::new()), AtomicUsize::new(0));
        let come_and_go = |free_first: bool| {
            ok(cuda!(cuCtxSetCurrent(context as Handle)));
            let s = new_stream();
            for _ in 0..ROUNDS {
                let pool = create(DEVICE_0).unwrap();
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
