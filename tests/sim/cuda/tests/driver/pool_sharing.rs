//! Memory pools in other processes: CUDA Driver API, "Stream Ordered Memory Allocator",
//! `cuMemPoolExportToShareableHandle` and its relatives (the comments of cuda.h).

use crate::harness::*;
use crate::pair::{Peer, pair};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

scenarios! {
    an_allocation_is_imported_by_another_process
    only_pools_made_for_it_are_exported
}

type Outcome<T> = std::result::Result<T, Result>;

fn pool(handles: c_int) -> Handle {
    /// `CUmemPoolProps`.
    #[repr(C)]
    struct Props {
        kind: c_int,
        handles: c_int,
        location: [c_int; 2],
        rest: [u64; 9],
    }
    let (mut pool, props) = (NULL, Props { kind: 1, handles, location: [1, 0], rest: [0; 9] });
    ok(cuda!(cuMemPoolCreate(&raw mut pool => *mut Handle, &raw const props => *const Props)));
    pool
}

fn alloc_from(pool: Handle, bytes: usize) -> Outcome<u64> {
    let mut at = 0u64;
    match cuda!(cuMemAllocFromPoolAsync(&raw mut at => *mut u64, bytes => usize, pool => Handle,
                NULL => Handle))
    {
        0 => Ok(at),
        e => Err(e),
    }
}

fn export(pool: Handle) -> Outcome<c_int> {
    let mut fd = -1;
    match cuda!(cuMemPoolExportToShareableHandle(&raw mut fd => *mut c_int, pool => Handle,
                1 => c_int, 0 => u64))
    {
        0 => Ok(fd),
        e => Err(e),
    }
}

fn import(fd: c_int) -> Outcome<Handle> {
    let mut pool = NULL;
    let fd = std::ptr::without_provenance_mut(usize::try_from(fd).unwrap_or(usize::MAX));
    match cuda!(cuMemPoolImportFromShareableHandle(&raw mut pool => *mut Handle,
                fd => *mut c_void, 1 => c_int, 0 => u64))
    {
        0 => Ok(pool),
        e => Err(e),
    }
}

fn export_pointer(at: u64) -> Outcome<[u8; 64]> {
    let mut data = [0u8; 64];
    match cuda!(cuMemPoolExportPointer(data.as_mut_ptr() => *mut u8, at => u64)) {
        0 => Ok(data),
        e => Err(e),
    }
}

fn import_pointer(pool: Handle, data: [u8; 64]) -> Outcome<u64> {
    let mut at = 0u64;
    match cuda!(cuMemPoolImportPointer(&raw mut at => *mut u64, pool => Handle,
                data.as_ptr() => *const u8))
    {
        0 => Ok(at),
        e => Err(e),
    }
}

fn fill(at: u64, value: u8, len: usize) {
    ok(cuda!(cuMemsetD8_v2(at => u64, value => u8, len => usize)));
}

fn synchronise() {
    ok(cuda!(cuCtxSynchronize()));
}

mod body {
    use super::*;

    /// "The imported memory must be freed from all importing processes before being freed in the
    /// exporting process. The pointer may be freed with cuMemFree or cuMemFreeAsync."
    /// (`cuMemPoolImportPointer`).
    pub fn an_allocation_is_imported_by_another_process() {
        pair(
            |peer: &Peer| {
                retain(0);
                let pool = pool(1);
                let other = alloc_from(pool, MIB).unwrap();
                let at = alloc_from(pool, MIB).unwrap();
                fill(other, 9, MIB);
                fill(at, 1, MIB);
                peer.send_fd(export(pool).unwrap());
                peer.send(&export_pointer(at).unwrap());
                peer.meet();
                let used = free_bytes();
                assert_eq!((read::<2>(at), read::<1>(other)), ([2, 1], [9]));
                ok(cuda!(cuMemFreeAsync(at => u64, NULL => Handle)));
                ok(cuda!(cuMemFreeAsync(other => u64, NULL => Handle)));
                synchronise();
                assert_eq!(free_bytes(), used, "the importer has the chunk still");
                peer.meet();
                peer.meet();
                assert_eq!(free_bytes() - used, 32 * MIB);
                let again = alloc_from(pool, MIB).unwrap();
                assert_eq!(read::<1>(again), [0]);
                peer.meet();
            },
            |peer: &Peer| {
                retain(0);
                let fd = peer.receive_fd();
                let pool = import(fd.as_raw_fd()).unwrap();
                let data = peer.receive();
                let at = import_pointer(pool, data).unwrap();
                assert_eq!(read::<1>(at), [1]);
                fill(at, 2, 1);
                // "Imported memory pools do not support creating new allocations."
                assert_eq!(alloc_from(pool, 1), Err(1));
                assert_eq!(cuda!(cuDeviceSetMemPool(0 => c_int, pool => Handle)), 1);
                assert_eq!(export(pool), Err(1), "nor can they be exported again");
                peer.meet();
                peer.meet();
                assert_eq!(read::<2>(at), [2, 1]);
                ok(cuda!(cuMemFreeAsync(at => u64, NULL => Handle)));
                assert_eq!(free(at), 1);
                ok(cuda!(cuMemPoolDestroy(pool => Handle)));
                peer.meet();
                peer.meet();
            },
        );
    }

    /// "To create an IPC capable mempool, create a mempool with a CUmemAllocationHandleType other
    /// than CU_MEM_HANDLE_TYPE_NONE." (`cuMemPoolExportToShareableHandle`).
    pub fn only_pools_made_for_it_are_exported() {
        retain(0);
        let plain = pool(0);
        assert_eq!(export(plain), Err(1));
        assert_eq!(export_pointer(alloc_from(plain, 1).unwrap()), Err(1));
        assert_eq!(export_pointer(alloc(1).unwrap()), Err(1));
        assert_eq!((import(0), import(-1)), (Err(1), Err(1)));
        let room = free_bytes();
        let own = pool(1);
        let at = alloc_from(own, MIB).unwrap();
        fill(at, 3, MIB);
        ok(free(at));
        synchronise();
        assert_eq!(free_bytes(), room);
        assert_eq!(import_pointer(own, [0; 64]), Err(1));
    }
}
