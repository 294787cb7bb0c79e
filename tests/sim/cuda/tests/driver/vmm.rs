//! Virtual memory management against CUDA's documentation: CUDA Driver API, "Virtual Memory
//! Management" (the comments of cuda.h). The probes of `tests/gpu` show how long memory lives (`driver.py`) and that an import
//! counts once (`importer.py`).

use crate::harness::*;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
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
    let handle = create(size, prop).unwrap();
    (handle, view(handle, size))
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

scenarios! {
    fn memory_is_created_mapped_and_accessed() {
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
        assert_eq!(create(room, DEVICE_0), Err(2));
        let at = reserve(4 * GRAIN);
        assert_eq!(at % GRAIN as u64, 0);
        ok(map(at, 4 * GRAIN, handle));
        ok(allow(at, 4 * GRAIN, 3));
        ok(fill(at, 5, 4 * GRAIN));
        assert_eq!(read::<2>(at + 4 * GRAIN as u64 - 2), [5, 5]);
        assert_eq!(free(at), 1, "not cuMemAlloc's");
        assert_eq!((export(handle), import(0), import(-1)), (Err(1), Err(1), Err(1)), "no descriptors");
        ok(unmap(at, 4 * GRAIN));
        ok(release(handle));
        assert_eq!((release(handle), map(at, 4 * GRAIN, handle)), (1, 1), "it is gone");
        ok(cuda!(cuMemAddressFree(at, 4 * GRAIN)));
        assert_eq!(free_bytes(), room);
    }

    /// "calling cuMemMap does not make the address accessible" (`cuMemMap`); "all mappings start
    /// with no accessibility setup" (`cuMemUnmap`).
    fn copies_need_access() {
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

    fn host_memory_occupies_no_gpu() {
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

    /// "The memory [is] freed when all outstanding […] references", of which a descriptor is one, on its way in a
    /// message too.
    fn an_open_descriptor_keeps_memory() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (handle, at) = mapped(GRAIN, EXPORTABLE);
                ok(fill(at, 7, 1));
                // SAFETY: exported for the test, which closes it.
                let fd = unsafe { OwnedFd::from_raw_fd(export(handle).unwrap()) };
                ok(release(handle));
                ok(unmap(at, GRAIN));
                assert_eq!(used(1), GRAIN);
                peer.send_fd(fd.as_raw_fd());
                drop(fd);
                assert_eq!(used(1), GRAIN, "on its way");
                peer.send(&[1]);
                peer.until_gone();
                // Its teardown takes a moment.
                while used(1) != 0 {
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
}
