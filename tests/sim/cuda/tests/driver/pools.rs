//! Memory pools against CUDA's documentation: CUDA Driver API, "Stream Ordered Memory Allocator"
//! (the comments of cuda.h), and CUDA C++ Programming Guide, the chapter of the same name.

use crate::harness::*;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

scenarios! {
    a_pool_reserves_chunks_and_uses_parts_of_them
    what_is_unused_is_released_when_the_host_synchronises
    a_release_threshold_is_held_on_to
    trimming_keeps_what_is_asked_for_and_what_is_in_use
    the_same_stream_has_its_free_memory_again_at_once
    another_stream_has_it_after_an_event
    another_stream_has_it_once_the_free_is_complete
    opportunistic_reuse_can_be_forbidden
    short_of_memory_a_dependency_is_inserted
    memory_held_unused_does_not_refuse_other_memory
    pools_are_created_as_their_properties_say
    impossible_pools_are_refused
    a_pool_has_no_more_than_its_maximum
    a_destroyed_pool_lives_until_its_last_allocation
    a_devices_current_pool_can_be_replaced
    current_pools_have_places
    attributes_are_read_and_reset
    cu_mem_free_frees_pool_memory
    other_memory_can_be_freed_in_stream_order
    pools_come_and_go_while_other_threads_synchronise
}

const FOLLOW: c_int = 1;
const OPPORTUNISTIC: c_int = 2;
const INTERNAL: c_int = 3;
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED: c_int = 7;
const USED_HIGH: c_int = 8;

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
    let mut pool = NULL;
    ok(cuda!(cuDeviceGetDefaultMemPool(&raw mut pool => *mut Handle, device => c_int)));
    pool
}

fn current_pool(device: c_int) -> Handle {
    let mut pool = NULL;
    ok(cuda!(cuDeviceGetMemPool(&raw mut pool => *mut Handle, device => c_int)));
    pool
}

fn create(props: Props) -> std::result::Result<Handle, Result> {
    let mut pool = NULL;
    match cuda!(cuMemPoolCreate(&raw mut pool => *mut Handle, &raw const props => *const Props)) {
        0 => Ok(pool),
        e => Err(e),
    }
}

fn get(pool: Handle, which: c_int) -> u64 {
    let mut value = 0u64;
    ok(cuda!(cuMemPoolGetAttribute(pool => Handle, which => c_int, &raw mut value => *mut u64)));
    value
}

fn set(pool: Handle, which: c_int, value: u64) -> Result {
    cuda!(cuMemPoolSetAttribute(pool => Handle, which => c_int, &raw const value => *const u64))
}

fn trim(pool: Handle, keep: usize) {
    ok(cuda!(cuMemPoolTrimTo(pool => Handle, keep => usize)));
}

fn alloc_async(bytes: usize, s: Handle) -> std::result::Result<u64, Result> {
    let mut at = 0u64;
    match cuda!(cuMemAllocAsync(&raw mut at => *mut u64, bytes => usize, s => Handle)) {
        0 => Ok(at),
        e => Err(e),
    }
}

fn alloc_from(pool: Handle, bytes: usize, s: Handle) -> std::result::Result<u64, Result> {
    let mut at = 0u64;
    match cuda!(cuMemAllocFromPoolAsync(&raw mut at => *mut u64, bytes => usize, pool => Handle,
                s => Handle))
    {
        0 => Ok(at),
        e => Err(e),
    }
}

fn free_async(at: u64, s: Handle) -> Result {
    cuda!(cuMemFreeAsync(at => u64, s => Handle))
}

/// In MiB.
fn reserved(pool: Handle) -> u64 {
    get(pool, RESERVED) >> 20
}

mod body {
    use super::*;

    /// "Amount of backing memory currently allocated for the mempool", "Amount of memory from the
    /// pool that is currently in use by the application" (`cuMemPoolGetAttribute`).
    pub fn a_pool_reserves_chunks_and_uses_parts_of_them() {
        retain(0);
        let (pool, s, room) = (default_pool(0), new_stream(), free_bytes());
        assert_eq!((reserved(pool), get(pool, USED)), (0, 0));
        let a = alloc_async(1000, s).unwrap();
        assert_eq!((reserved(pool), get(pool, USED)), (32, 1024));
        let b = alloc_async(MIB, s).unwrap();
        assert_eq!(reserved(pool), 32, "chunks are shared");
        let c = alloc_async(40 * MIB, s).unwrap();
        assert_eq!(reserved(pool), 96, "a large request takes a chunk of several");
        assert_eq!(room - free_bytes(), 96 * MIB, "the GPU lacks what is reserved");
        ok(cuda!(cuMemsetD8Async(c => u64, 7 => u8, 40 * MIB => usize, s => Handle)));
        synchronize(s);
        assert_eq!(read::<2>(c + 40 * MIB as u64 - 2), [7, 7]);
        for at in [a, b, c] {
            ok(free_async(at, s));
        }
        assert_eq!((reserved(pool), get(pool, USED)), (96, 0));
        assert_eq!(alloc_async(0, s), Err(1));
        assert_eq!(free_async(a, s), 1, "freed already");
        assert_eq!(free_async(0xdead_0000, s), 1);
    }

    /// "When more than the release threshold bytes of memory are held by the memory pool, the
    /// allocator will try to release memory back to the OS on the next call to stream, event or
    /// context synchronize. (default 0)" (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
    pub fn what_is_unused_is_released_when_the_host_synchronises() {
        retain(0);
        let (pool, s, event, room) = (default_pool(0), new_stream(), new_event(), free_bytes());
        let all: [&dyn Fn(); 3] = [
            &|| synchronize(s),
            &|| {
                record(event, s);
                ok(cuda!(cuEventSynchronize(event => Handle)));
            },
            &|| ok(cuda!(cuCtxSynchronize())),
        ];
        for synchronise in all {
            let at = alloc_async(MIB, s).unwrap();
            ok(free_async(at, s));
            ok(cuda!(cuStreamQuery(s => Handle)));
            assert_eq!(reserved(pool), 32, "asking is not synchronising");
            synchronise();
            assert_eq!((reserved(pool), free_bytes()), (0, room));
        }
        let at = alloc_async(MIB, s).unwrap();
        synchronize(s);
        assert_eq!(reserved(pool), 32, "in use");
        // A free that the GPU has not reached keeps its chunk, whatever else is synchronised.
        keep_busy(kernel("spin"), s);
        ok(free_async(at, s));
        synchronize(new_stream());
        assert_eq!(reserved(pool), 32);
        synchronize(s);
        assert_eq!(reserved(pool), 0);
    }

    /// "Amount of reserved memory in bytes to hold onto before trying to release memory back to
    /// the OS" (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
    pub fn a_release_threshold_is_held_on_to() {
        retain(0);
        let (pool, s) = (default_pool(0), new_stream());
        assert_eq!(get(pool, THRESHOLD), 0);
        ok(set(pool, THRESHOLD, 64 << 20));
        let many: Vec<u64> = (0..4).map(|_| alloc_async(20 * MIB, s).unwrap()).collect();
        assert_eq!(reserved(pool), 128);
        many.into_iter().for_each(|at| ok(free_async(at, s)));
        synchronize(s);
        assert_eq!(reserved(pool), 64);
        ok(set(pool, THRESHOLD, u64::MAX));
        let at = alloc_async(200 * MIB, s).unwrap();
        ok(free_async(at, s));
        synchronize(s);
        assert_eq!(reserved(pool), 288);
        ok(set(pool, THRESHOLD, 0));
        synchronize(s);
        assert_eq!(reserved(pool), 0);
    }

    /// "If the pool has less than minBytesToKeep reserved, the TrimTo operation is a no-op.
    /// Otherwise the pool will be guaranteed to have at least minBytesToKeep bytes reserved after
    /// the operation"; "Allocations that have not been freed count as outstanding"
    /// (`cuMemPoolTrimTo`).
    pub fn trimming_keeps_what_is_asked_for_and_what_is_in_use() {
        retain(0);
        let (pool, s) = (default_pool(0), new_stream());
        let many: Vec<u64> = (0..4).map(|_| alloc_async(20 * MIB, s).unwrap()).collect();
        many[1..].iter().for_each(|at| ok(free_async(*at, s)));
        trim(pool, 1 << 30);
        assert_eq!(reserved(pool), 128);
        trim(pool, 70 * MIB);
        assert_eq!(reserved(pool), 96);
        trim(pool, 0);
        assert_eq!(reserved(pool), 32);
        ok(free_async(many[0], s));
        trim(pool, 0);
        assert_eq!(reserved(pool), 0);
    }

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
            ok(cuda!(cuStreamWaitEvent(s => Handle, e => Handle, 0 => c_uint)));
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
        let mut blocking = NULL;
        ok(cuda!(cuStreamCreate(&raw mut blocking => *mut Handle, 0 => c_uint)));
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
        while cuda!(cuStreamQuery(s => Handle)) != 0 {}
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
        while cuda!(cuStreamQuery(s => Handle)) != 0 {}
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
            ok(cuda!(cuMemsetD8Async(at => u64, 1 => u8, MIB => usize, s => Handle)));
            ok(free_async(at, s));
        }
        let managed = create(Props { allocation: 2, ..DEVICE_0 }).unwrap();
        alloc_from(managed, MIB, s).unwrap();
        assert_eq!(numbers(managed)[0], 2);
        create(Props { allocation: 2, location: [0, 0], ..DEVICE_0 }).unwrap();
    }

    /// `cuMemPoolCreate`: "any other values will result in CUDA_ERROR_INVALID_VALUE", and so on.
    pub fn impossible_pools_are_refused() {
        retain(0);
        let mut set_reserved = DEVICE_0;
        set_reserved.rest[55] = 1;
        for props in [
            Props { allocation: 0, ..DEVICE_0 },
            Props { allocation: 3, ..DEVICE_0 },
            Props { location: [0, 0], ..DEVICE_0 },
            Props { location: [1, 2], ..DEVICE_0 },
            Props { location: [1, -1], ..DEVICE_0 },
            Props { location: [3, 77], ..DEVICE_0 },
            // "Specifying HOST_NUMA_CURRENT … will result in CUDA_ERROR_INVALID_VALUE".
            Props { location: [4, 0], ..DEVICE_0 },
            Props { handles: 16, ..DEVICE_0 },
            Props { security: 1, ..DEVICE_0 },
            // "maxSize must be set to zero for managed memory pools".
            Props { allocation: 2, max_size: 1, ..DEVICE_0 },
            set_reserved,
        ] {
            assert_eq!(create(props), Err(1));
        }
        assert_eq!(create(Props { handles: 8, ..DEVICE_0 }), Err(800), "no IMEX channel");
        assert_eq!(create(Props { handles: 1, ..DEVICE_0 }), Err(801), "no pool is shared");
        let mut pool = NULL;
        let null = std::ptr::null::<c_void>();
        assert_eq!(cuda!(cuMemPoolCreate(&raw mut pool => *mut Handle, null => *const c_void)), 1);
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
        let destroy = |pool: Handle| cuda!(cuMemPoolDestroy(pool => Handle));
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
        let set_current =
            |pool: Handle, d: c_int| cuda!(cuDeviceSetMemPool(d => c_int, pool => Handle));
        assert_eq!(current_pool(0), default_pool(0));
        ok(set_current(pool, 0));
        assert_eq!((current_pool(0), current_pool(1)), (pool, default_pool(1)));
        assert_eq!(set_current(pool, 1), 1);
        let at = alloc_async(MIB, s).unwrap();
        assert_eq!((reserved(pool), reserved(default_pool(0))), (32, 0));
        let mut from = NULL;
        ok(cuda!(cuPointerGetAttribute(&raw mut from => *mut Handle, 17 => c_int, at => u64)));
        assert_eq!(from, pool, "CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE");
        ok(cuda!(cuMemPoolDestroy(pool => Handle)));
        assert_eq!(current_pool(0), default_pool(0));
    }

    /// `cuMemGetDefaultMemPool`, `cuMemGetMemPool` (CUDA 13).
    pub fn current_pools_have_places() {
        retain(0);
        let of = |place: [c_int; 2], kind: c_int, current: bool| {
            let mut pool = NULL;
            let (out, place) = (&raw mut pool, &raw const place);
            let result = if current {
                cuda!(cuMemGetMemPool(out => *mut Handle, place => *const [c_int; 2], kind => c_int))
            } else {
                cuda!(cuMemGetDefaultMemPool(out => *mut Handle, place => *const [c_int; 2],
                      kind => c_int))
            };
            if result == 0 { Ok(pool) } else { Err(result) }
        };
        assert_eq!(of([1, 0], 1, false), Ok(default_pool(0)));
        let own = create(DEVICE_0).unwrap();
        ok(cuda!(cuDeviceSetMemPool(0 => c_int, own => Handle)));
        assert_eq!(of([1, 0], 1, true), Ok(own));
        let host = of([2, 0], 1, false).unwrap();
        assert_eq!(of([2, 0], 1, true), Ok(host));
        let managed = of([0, 0], 2, false).unwrap();
        assert_ne!(managed, of([1, 0], 2, false).unwrap());
        assert_eq!((of([0, 0], 1, false), of([4, 0], 1, false)), (Err(1), Err(1)));
        assert_eq!(cuda!(cuMemPoolDestroy(managed => Handle)), 1, "a default pool");
    }

    /// "It is illegal to set this attribute to a non-zero value" (`…_MEM_HIGH`).
    pub fn attributes_are_read_and_reset() {
        retain(0);
        let (pool, s) = (create(DEVICE_0).unwrap(), new_stream());
        for which in [FOLLOW, OPPORTUNISTIC, INTERNAL] {
            assert_eq!(get(pool, which), 1);
            ok(set(pool, which, 0));
            assert_eq!(get(pool, which), 0);
        }
        let a = alloc_from(pool, 40 * MIB, s).unwrap();
        ok(free_async(a, s));
        trim(pool, 0);
        let _b = alloc_from(pool, MIB, s).unwrap();
        let high = |p: Handle| (get(p, RESERVED_HIGH) >> 20, get(p, USED_HIGH) >> 20);
        assert_eq!(high(pool), (64, 40));
        assert_eq!((set(pool, RESERVED_HIGH, 1), set(pool, USED_HIGH, 1)), (1, 1));
        ok(set(pool, RESERVED_HIGH, 0));
        ok(set(pool, USED_HIGH, 0));
        assert_eq!(high(pool), (32, 1));
        assert_eq!((set(pool, RESERVED, 0), set(pool, USED, 0), set(pool, 99, 0)), (1, 1, 1));
    }

    /// Programming Guide: such memory may be freed with `cuMemFree`; "the driver assumes that all
    /// accesses to the allocation are complete and performs no further synchronization".
    pub fn cu_mem_free_frees_pool_memory() {
        retain(0);
        let (pool, s) = (default_pool(0), new_stream());
        let at = alloc_async(MIB, s).unwrap();
        ok(free(at));
        assert_eq!((reserved(pool), get(pool, USED), free(at)), (32, 0, 1));
        synchronize(s);
        assert_eq!(reserved(pool), 0);
    }

    /// `cuMemFreeAsync` takes any device memory.
    pub fn other_memory_can_be_freed_in_stream_order() {
        retain(0);
        let (room, s) = (free_bytes(), new_stream());
        ok(free_async(alloc(10 * MIB).unwrap(), s));
        ok(free_async(0, s));
        synchronize(s);
        assert_eq!(free_bytes(), room);
    }

    /// Each pool is its creator's until it is destroyed, which succeeds once, whichever process gives memory
    /// back meanwhile.
    pub fn pools_come_and_go_while_other_threads_synchronise() {
        const ROUNDS: usize = 3000;
        let context = retain(0) as usize;
        let (live, busy) = (Mutex::new(BTreeSet::new()), AtomicUsize::new(0));
        let come_and_go = |free_first: bool| {
            ok(cuda!(cuCtxSetCurrent(context as Handle => Handle)));
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
                ok(cuda!(cuMemPoolDestroy(pool => Handle)));
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
                    ok(cuda!(cuCtxSetCurrent(context as Handle => Handle)));
                    while busy.load(Ordering::Acquire) > 0 {
                        ok(cuda!(cuCtxSynchronize()));
                    }
                });
            }
        });
        assert_eq!(free_bytes(), 16 * 1024 * MIB - 64 * MIB, "nothing is left behind");
    }
}
