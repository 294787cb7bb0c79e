//! Virtual memory management against CUDA's documentation: CUDA Driver API, "Virtual Memory
//! Management" and "Multicast Object Management" (the comments of cuda.h).

use crate::harness::*;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use tessera_cuda::types::CUmulticastObjectProp;

scenarios! {
    memory_is_created_mapped_and_accessed
    copies_need_access
    copies_span_adjacent_mappings
    memory_lives_until_its_last_handle_and_mapping
    a_retained_handle_is_the_same
    one_memory_can_be_mapped_twice
    addresses_are_reserved_and_freed_whole
    only_whole_mappings_are_unmapped
    access_is_set
    host_memory_occupies_no_gpu
    properties_are_those_it_was_made_with
    memory_of_a_gpu_is_finite
    an_imported_handle_means_the_same_memory
    processes_share_memory
    memory_moves_to_the_importer_that_survives
    a_multicast_object_keeps_bound_memory
    an_open_descriptor_keeps_memory
}

configured! {
    a_descriptor_may_keep_nothing = "memory.descriptors = \"nothing\"\n"
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prop {
    kind: c_int,
    handles: c_int,
    location: [c_int; 2],
    security: usize,
    flags: [u8; 8],
}

const DEVICE_0: Prop = Prop { kind: 1, handles: 0, location: [1, 0], security: 0, flags: [0; 8] };
const EXPORTABLE: Prop = Prop { handles: 1, ..DEVICE_0 };
const GRAIN: usize = 2 * MIB;

fn create(size: usize, prop: Prop) -> Outcome<u64> {
    made(|to| cuda!(cuMemCreate(to, size, (&raw const prop).cast(), 0)))
}

fn release(handle: u64) -> Result {
    cuda!(cuMemRelease(handle))
}

fn reserve(size: usize) -> u64 {
    must(|to| cuda!(cuMemAddressReserve(to, size, 0, 0, 0)))
}

fn map(at: u64, size: usize, handle: u64) -> Result {
    cuda!(cuMemMap(at, size, 0, handle, 0))
}

fn unmap(at: u64, size: usize) -> Result {
    cuda!(cuMemUnmap(at, size))
}

fn allow(at: u64, size: usize, flags: c_int) -> Result {
    let desc = [1, 0, flags];
    cuda!(cuMemSetAccess(at, size, desc.as_ptr().cast(), 1))
}

fn mapped(size: usize, prop: Prop) -> (u64, u64) {
    let (handle, at) = (create(size, prop).unwrap(), reserve(size));
    ok(map(at, size, handle));
    ok(allow(at, size, 3));
    (handle, at)
}

fn fill(at: u64, value: u8, len: usize) -> Result {
    cuda!(cuMemsetD8_v2(at, value, len))
}

fn export(handle: u64) -> Outcome<c_int> {
    made(|to: *mut c_int| cuda!(cuMemExportToShareableHandle(to.cast(), handle, 1, 0)))
}

fn import(fd: c_int) -> Outcome<u64> {
    made(|to| {
        cuda!(cuMemImportFromShareableHandle(
            to,
            std::ptr::without_provenance_mut(usize::try_from(fd).unwrap_or(usize::MAX)),
            1
        ))
    })
}

fn view(handle: u64, size: usize) -> u64 {
    let at = reserve(size);
    ok(map(at, size, handle));
    ok(allow(at, size, 3));
    at
}

mod body {
    use super::*;

    pub fn memory_is_created_mapped_and_accessed() {
        retain(0);
        let room = free_bytes();
        let mut grain = [0usize; 2];
        for (option, grain) in (0..).zip(&mut grain) {
            ok(cuda!(cuMemGetAllocationGranularity(
                grain,
                std::ptr::from_ref(&DEVICE_0).cast(),
                option
            )));
        }
        assert_eq!(grain, [GRAIN; 2]);
        let handle = create(4 * GRAIN, DEVICE_0).unwrap();
        assert_eq!(room - free_bytes(), 4 * GRAIN, "physical memory comes with cuMemCreate");
        let at = reserve(4 * GRAIN);
        assert_eq!(at % GRAIN as u64, 0);
        ok(map(at, 4 * GRAIN, handle));
        ok(allow(at, 4 * GRAIN, 3));
        ok(fill(at, 5, 4 * GRAIN));
        assert_eq!(read::<2>(at + 4 * GRAIN as u64 - 2), [5, 5]);
        assert_eq!(free(at), 1, "not cuMemAlloc's");
        ok(unmap(at, 4 * GRAIN));
        ok(release(handle));
        ok(cuda!(cuMemAddressFree(at, 4 * GRAIN)));
        assert_eq!(free_bytes(), room);
    }

    /// "calling cuMemMap does not make the address accessible" (`cuMemMap`); "all mappings start
    /// with no accessibility setup" (`cuMemUnmap`).
    pub fn copies_need_access() {
        retain(0);
        let (handle, at) = (create(GRAIN, DEVICE_0).unwrap(), reserve(GRAIN));
        assert_eq!(fill(at, 1, 16), 1, "reserved only");
        ok(map(at, GRAIN, handle));
        assert_eq!(fill(at, 1, 16), 1, "mapped only");
        ok(allow(at, GRAIN, 1));
        assert_eq!(read::<4>(at), [0; 4]);
        assert_eq!(fill(at, 1, 16), 1, "read only");
        ok(allow(at, GRAIN, 3));
        ok(fill(at, 1, 16));
        ok(unmap(at, GRAIN));
        ok(map(at, GRAIN, handle));
        assert_eq!(fill(at, 1, 16), 1, "mapped again");
        ok(allow(at, GRAIN, 3));
        assert_eq!(read::<4>(at), [1; 4], "the memory is the same");
    }

    pub fn copies_span_adjacent_mappings() {
        retain(0);
        let at = reserve(4 * GRAIN);
        for i in 0..3 {
            ok(map(at + (i * GRAIN) as u64, GRAIN, create(GRAIN, DEVICE_0).unwrap()));
        }
        ok(allow(at, 3 * GRAIN, 3));
        ok(fill(at + 100, 9, 3 * GRAIN - 100));
        assert_eq!(fill(at + 100, 9, 3 * GRAIN), 1, "past the last mapping");
        assert_eq!(read::<2>(at + 3 * GRAIN as u64 - 2), [9, 9]);
    }

    /// "The memory allocation will be freed when all outstanding mappings to the memory are
    /// unmapped and when all outstanding references to the handle … are also released."
    /// (`cuMemRelease`).
    pub fn memory_lives_until_its_last_handle_and_mapping() {
        retain(0);
        let room = free_bytes();
        let (handle, at) = mapped(GRAIN, DEVICE_0);
        ok(fill(at, 3, GRAIN));
        ok(release(handle));
        assert_eq!((release(handle), map(reserve(GRAIN), GRAIN, handle)), (1, 1));
        assert_eq!((room - free_bytes(), read::<1>(at)), (GRAIN, [3]));
        ok(unmap(at, GRAIN));
        assert_eq!(free_bytes(), room);
        let (handle, at) = mapped(GRAIN, DEVICE_0);
        ok(unmap(at, GRAIN));
        assert_eq!(room - free_bytes(), GRAIN);
        ok(release(handle));
        assert_eq!(free_bytes(), room);
    }

    /// "The handle is guaranteed to be the same handle value used to map the memory. … must be
    /// released with corresponding number of calls to cuMemRelease"
    /// (`cuMemRetainAllocationHandle`).
    pub fn a_retained_handle_is_the_same() {
        retain(0);
        let room = free_bytes();
        let (handle, at) = mapped(GRAIN, DEVICE_0);
        ok(release(handle));
        let retained = |at: u64| {
            let mut handle = 0u64;
            let r = cuda!(cuMemRetainAllocationHandle(&raw mut handle, at as *mut c_void));
            (r, handle)
        };
        assert_eq!(retained(at + 12345), (0, handle));
        ok(unmap(at, GRAIN));
        assert_eq!(room - free_bytes(), GRAIN);
        assert_eq!(retained(at).0, 1, "not mapped");
        assert_eq!(retained(alloc(1).unwrap()).0, 1, "not cuMemCreate's");
        ok(release(handle));
        assert_eq!(release(handle), 1);
    }

    pub fn one_memory_can_be_mapped_twice() {
        retain(0);
        let room = free_bytes();
        let (handle, a) = mapped(2 * GRAIN, DEVICE_0);
        let b = view(handle, 2 * GRAIN);
        ok(fill(a, 8, 2 * GRAIN));
        assert_eq!(read::<2>(b + 2 * GRAIN as u64 - 2), [8, 8]);
        assert_eq!(room - free_bytes(), 2 * GRAIN);
        let half = view(handle, GRAIN);
        assert_eq!(read::<1>(half), [8]);
        ok(release(handle));
        ok(unmap(a, 2 * GRAIN));
        ok(unmap(b, 2 * GRAIN));
        assert_eq!(room - free_bytes(), 2 * GRAIN);
        ok(unmap(half, GRAIN));
        assert_eq!(free_bytes(), room);
    }

    /// "The size must match what was given to memAddressReserve and the ptr given must match what
    /// was returned" (`cuMemAddressFree`).
    pub fn addresses_are_reserved_and_freed_whole() {
        retain(0);
        let at = reserve(4 * GRAIN);
        let give = |at: u64, size: usize| cuda!(cuMemAddressFree(at, size));
        assert_eq!((give(at, GRAIN), give(at + GRAIN as u64, 3 * GRAIN)), (1, 1));
        ok(map(at, GRAIN, create(GRAIN, DEVICE_0).unwrap()));
        assert_eq!(give(at, 4 * GRAIN), 1, "something is mapped");
        ok(unmap(at, GRAIN));
        ok(give(at, 4 * GRAIN));
        assert_eq!(give(at, 4 * GRAIN), 1);
        let reserve = |size: usize, align: usize, hint: u64, flags: u64| {
            let mut at = 0u64;
            let r = cuda!(cuMemAddressReserve(&raw mut at, size, align, hint, flags));
            (r, at)
        };
        // "must be a multiple of the host page size and the alignment must be a power of two".
        assert_eq!(reserve(0, 0, 0, 0).0, 1);
        assert_eq!(reserve(GRAIN + 1, 0, 0, 0).0, 1);
        assert_eq!(reserve(GRAIN, 3 * GRAIN, 0, 0).0, 1);
        assert_eq!(reserve(GRAIN, 0, 0, 1).0, 1);
        let (r, aligned) = reserve(GRAIN, 64 * GRAIN, 0, 0);
        assert_eq!((r, aligned % (64 * GRAIN) as u64), (0, 0));
        assert_eq!(reserve(4 * GRAIN, 0, at, 0), (0, at), "a hint that is free is followed");
        let (r, elsewhere) = reserve(4 * GRAIN, 0, at, 0);
        assert!(r == 0 && elsewhere != at, "a hint that is taken is not");
    }

    /// "The range must be the entire contiguous address range that was mapped to. In other words,
    /// cuMemUnmap cannot unmap a sub-range" (`cuMemUnmap`).
    pub fn only_whole_mappings_are_unmapped() {
        retain(0);
        let (_, at) = mapped(4 * GRAIN, DEVICE_0);
        assert_eq!((unmap(at, GRAIN), unmap(at + GRAIN as u64, 3 * GRAIN)), (1, 1));
        assert_eq!((unmap(at, 8 * GRAIN), unmap(at, 0)), (1, 1));
        ok(unmap(at, 4 * GRAIN));
        assert_eq!(unmap(at, 4 * GRAIN), 1);
    }

    pub fn access_is_set() {
        retain(0);
        let (handle, at) = (create(GRAIN, DEVICE_0).unwrap(), reserve(2 * GRAIN));
        ok(map(at, GRAIN, handle));
        // "The range must be a fully mapped address range".
        assert_eq!(
            (allow(at, 2 * GRAIN, 3), allow(at, GRAIN / 2, 3), allow(at, GRAIN, 2)),
            (1, 1, 1)
        );
        ok(allow(at, GRAIN, 3));
        let set =
            |place: [c_int; 3]| cuda!(cuMemSetAccess(at, GRAIN, (&raw const place).cast(), 1));
        assert_eq!(set([1, 1, 3]), 101, "no peer");
        assert_eq!(set([1, 7, 3]), 101);
        // "Users cannot specify HOST_NUMA accessibility for allocations created on with other
        // location types."
        assert_eq!(set([3, 0, 3]), 1);
    }

    pub fn host_memory_occupies_no_gpu() {
        retain(0);
        let room = free_bytes();
        for location in [[2, 77], [3, 0]] {
            let (handle, at) = mapped(GRAIN, Prop { location, ..DEVICE_0 });
            ok(fill(at, 4, GRAIN));
            let kind = must(|to: *mut u32| cuda!(cuPointerGetAttribute(to.cast(), 2, at)));
            assert_eq!((kind, room), (1, free_bytes()), "CU_MEMORYTYPE_HOST");
            ok(release(handle));
            ok(unmap(at, GRAIN));
        }
    }

    pub fn properties_are_those_it_was_made_with() {
        retain(0);
        let asked = |handle: u64| {
            let mut prop = Prop { kind: 0, ..DEVICE_0 };
            ok(cuda!(cuMemGetAllocationPropertiesFromHandle((&raw mut prop).cast(), handle)));
            prop
        };
        // Compression is a hint, to be validated with the properties of the handle.
        let hint = Prop { flags: [1, 0, 0, 0, 0, 0, 0, 0], ..DEVICE_0 };
        for prop in [DEVICE_0, EXPORTABLE, Prop { location: [1, 1], ..DEVICE_0 }] {
            assert_eq!(asked(create(GRAIN, prop).unwrap()), prop);
        }
        assert_eq!(asked(create(GRAIN, hint).unwrap()), DEVICE_0);
    }

    pub fn memory_of_a_gpu_is_finite() {
        retain(0);
        let room = free_bytes();
        assert_eq!(create(room + GRAIN, DEVICE_0), Err(2));
        let all = create(room, DEVICE_0).unwrap();
        assert_eq!((create(GRAIN, DEVICE_0), alloc(1)), (Err(2), Err(2)));
        create(GRAIN, Prop { location: [1, 1], ..DEVICE_0 }).unwrap();
        ok(release(all));
        ok(free(alloc(room).unwrap()));
    }

    /// "the process must use cuMemMap to map the memory"; "There is no guarantee that the contents
    /// of handle will be the same CUDA memory handle" (`cuMemImportFromShareableHandle`).
    pub fn an_imported_handle_means_the_same_memory() {
        retain(0);
        let room = free_bytes();
        let (handle, at) = mapped(GRAIN, EXPORTABLE);
        let fd = export(handle).unwrap();
        let imported = import(fd).unwrap();
        // SAFETY: the test's own descriptor.
        unsafe { libc::close(fd) };
        ok(fill(at, 6, GRAIN));
        let again = view(imported, GRAIN);
        assert_eq!((read::<1>(again), room - free_bytes()), ([6], GRAIN), "counted once");
        ok(release(handle));
        ok(unmap(at, GRAIN));
        assert_eq!((read::<1>(again), room - free_bytes()), ([6], GRAIN));
        ok(unmap(again, GRAIN));
        ok(release(imported));
        assert_eq!(free_bytes(), room);
        assert_eq!(export(create(GRAIN, DEVICE_0).unwrap()), Err(1), "made without a handle type");
        assert_eq!((import(0), import(-1)), (Err(1), Err(1)));
    }

    fn used_by_me() -> usize {
        let (mut free, mut total) = (0usize, 0usize);
        ok(cuda!(cuMemGetInfo_v2(&raw mut free, &raw mut total)));
        total - free
    }

    pub fn processes_share_memory() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (handle, at) = mapped(2 * GRAIN, EXPORTABLE);
                ok(fill(at, 1, 2 * GRAIN));
                peer.send_fd(descriptor(handle).as_raw_fd());
                peer.meet();
                assert_eq!(read::<2>(at), [2, 1], "the other wrote here");
                peer.meet();
                assert_eq!(used_by_me(), 2 * 64 * MIB + 2 * GRAIN, "counted once");
                ok(release(handle));
                ok(unmap(at, 2 * GRAIN));
                peer.meet();
                peer.until_gone();
                assert_eq!(used_by_me(), 64 * MIB);
            },
            |peer: &Peer| {
                retain(0);
                let fd = peer.receive_fd();
                let handle = import(fd.as_raw_fd()).unwrap();
                drop(fd);
                let at = view(handle, 2 * GRAIN);
                assert_eq!(read::<1>(at), [1]);
                ok(fill(at, 2, 1));
                peer.meet();
                peer.meet();
                peer.meet();
                assert_eq!(used_by_me(), 2 * 64 * MIB + 2 * GRAIN, "the exporter let go");
                assert_eq!(read::<2>(at), [2, 1]);
                ok(release(handle));
                ok(unmap(at, 2 * GRAIN));
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
            },
        );
    }

    /// Memory outlives its maker's death by SIGKILL while an importer lives.
    pub fn memory_moves_to_the_importer_that_survives() {
        pair(
            |peer: &Peer| {
                retain(0);
                let fd = peer.receive_fd();
                let handle = import(fd.as_raw_fd()).unwrap();
                let at = view(handle, GRAIN);
                peer.send(&[1]);
                peer.until_gone();
                let since = std::time::Instant::now();
                while used_by_me() != 64 * MIB + GRAIN {
                    assert!(since.elapsed().as_secs() < 20, "{}", used_by_me());
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
                assert_eq!(read::<1>(at), [7]);
                ok(release(handle));
                ok(unmap(at, GRAIN));
                assert_eq!(used_by_me(), 64 * MIB + GRAIN, "the descriptor is open");
                drop(fd);
                assert_eq!(used_by_me(), 64 * MIB);
            },
            |peer: &Peer| {
                retain(0);
                let (handle, at) = mapped(GRAIN, EXPORTABLE);
                alloc(10 * MIB).unwrap();
                ok(fill(at, 7, GRAIN));
                peer.send_fd(export(handle).unwrap());
                peer.receive::<1>();
                // SAFETY: kills this very process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }

    fn descriptor(handle: u64) -> OwnedFd {
        // SAFETY: exported for the test, which closes it.
        unsafe { OwnedFd::from_raw_fd(export(handle).unwrap()) }
    }

    /// "The memory [is] freed when all outstanding […] references", of which a descriptor is one, on its way in a
    /// message too.
    pub fn an_open_descriptor_keeps_memory() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (handle, at) = mapped(GRAIN, EXPORTABLE);
                ok(fill(at, 7, 1));
                let fd = descriptor(handle);
                ok(release(handle));
                ok(unmap(at, GRAIN));
                assert_eq!(used_by_me(), 64 * MIB + GRAIN);
                peer.send_fd(fd.as_raw_fd());
                drop(fd);
                assert_eq!(used_by_me(), 64 * MIB + GRAIN, "on its way");
                peer.send(&[1]);
                peer.until_gone();
                // Its teardown takes a moment.
                while used_by_me() != 64 * MIB {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            },
            |peer: &Peer| {
                let fd = peer.receive_fd();
                peer.receive::<1>();
                retain(0);
                let handle = import(fd.as_raw_fd()).unwrap();
                assert_eq!(read::<1>(view(handle, GRAIN)), [7]);
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
            },
        );
    }

    pub fn a_descriptor_may_keep_nothing() {
        retain(0);
        let handle = create(GRAIN, EXPORTABLE).unwrap();
        let fd = descriptor(handle);
        ok(release(handle));
        assert_eq!((used_by_me(), import(fd.as_raw_fd())), (64 * MIB, Err(1)));
    }

    /// "All participating devices must be added to the multicast object before memory can be bound
    /// to it" (`cuMulticastCreate`). Bound memory stays until it is unbound or the object is gone.
    pub fn a_multicast_object_keeps_bound_memory() {
        retain(0);
        let room = free_bytes();
        let team = |devices: c_uint, size: usize| {
            let prop =
                CUmulticastObjectProp { numDevices: devices, size, handleTypes: 0, flags: 0 };
            made(|to| cuda!(cuMulticastCreate(to, &raw const prop)))
        };
        assert_eq!((team(0, GRAIN), team(9, GRAIN), team(1, 4096)), (Err(1), Err(1), Err(1)));
        let object = team(1, 2 * GRAIN).unwrap();
        assert_eq!(free_bytes(), room, "an object has no memory of its own");
        let add = |dev: c_int| cuda!(cuMulticastAddDevice(object, dev));
        let bind = |offset: usize, memory: u64, size: usize| {
            cuda!(cuMulticastBindMem(object, offset, memory, 0, size, 0))
        };
        let memory = create(GRAIN, DEVICE_0).unwrap();
        assert_eq!(bind(0, memory, GRAIN), 401, "no device yet");
        ok(add(0));
        assert_eq!((add(0), add(1), add(5)), (1, 1, 101));
        assert_eq!((bind(4096, memory, GRAIN), bind(0, memory, 2 * GRAIN)), (1, 1));
        assert_eq!(bind(2 * GRAIN, memory, GRAIN), 1);
        ok(bind(GRAIN, memory, GRAIN));
        assert_eq!(bind(GRAIN, memory, GRAIN), 1, "taken");
        ok(release(memory));
        assert_eq!(room - free_bytes(), GRAIN);
        let unbind = |offset: usize| cuda!(cuMulticastUnbind(object, 0, offset, GRAIN));
        assert_eq!(unbind(0), 1);
        ok(unbind(GRAIN));
        assert_eq!(free_bytes(), room);
        let (memory, at) = mapped(GRAIN, DEVICE_0);
        ok(cuda!(cuMulticastBindAddr(object, 0, at, GRAIN, 0)));
        ok(release(memory));
        ok(unmap(at, GRAIN));
        let view = reserve(2 * GRAIN);
        ok(map(view, 2 * GRAIN, object));
        ok(allow(view, 2 * GRAIN, 3));
        ok(release(object));
        assert_eq!(room - free_bytes(), GRAIN);
        ok(unmap(view, 2 * GRAIN));
        assert_eq!(free_bytes(), room, "with the object goes what is bound to it");
    }
}
