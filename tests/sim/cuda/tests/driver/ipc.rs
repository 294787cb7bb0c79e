//! Memory of one process in another: CUDA Driver API, "Memory Management", `cuIpcGetMemHandle`,
//! `cuIpcOpenMemHandle`, `cuIpcCloseMemHandle` (the comments of cuda.h).

use crate::harness::*;
use std::ffi::c_uint;

scenarios! {
    only_allocations_have_handles
    memory_is_seen_by_both_processes
    an_import_keeps_memory_that_its_exporter_freed
    small_allocations_share_their_chunk
    an_importer_that_is_killed_lets_go
}

fn name(at: u64) -> Outcome<Name> {
    let mut name = named([0; 64]);
    match cuda!(cuIpcGetMemHandle(&raw mut name, at)) {
        0 => Ok(name),
        e => Err(e),
    }
}

fn open(name: Name, flags: c_uint) -> Outcome<u64> {
    made(|to| cuda!(cuIpcOpenMemHandle_v2(to, name, flags)))
}

fn close(at: u64) -> Result {
    cuda!(cuIpcCloseMemHandle(at))
}

fn fill(at: u64, value: u8, len: usize) {
    ok(cuda!(cuMemsetD8_v2(at, value, len)));
}

/// Device memory that this process and its pair use beyond `contexts` contexts.
fn used(contexts: usize) -> usize {
    let (mut free, mut total) = (0usize, 0usize);
    ok(cuda!(cuMemGetInfo_v2(&raw mut free, &raw mut total)));
    total - free - contexts * 64 * MIB
}

mod body {
    use super::*;

    pub fn only_allocations_have_handles() {
        retain(0);
        let at = alloc(10 * MIB).unwrap();
        fill(at, 9, 10 * MIB);
        let first = name(at).unwrap();
        assert_eq!(name(at), Ok(first));
        assert_eq!(read::<2>(at + 5 * MIB as u64), [9, 9], "what is in it stays");
        assert_eq!(open(first, 1), Err(201), "not in the process that made it");
        assert_eq!((name(at + 1), name(0x1000)), (Err(1), Err(1)));
        assert_eq!((open(named([3; 64]), 1), close(at)), (Err(1), 1));
        assert_eq!(used(1), 10 * MIB);
        ok(free(at));
        assert_eq!(used(1), 0);
        let again = alloc(10 * MIB).unwrap();
        assert_eq!(read::<1>(again), [0]);
    }

    /// "If the memory handle has already been opened by the current context, the reference count
    /// on the handle is incremented by 1 and the existing device pointer is returned."
    pub fn memory_is_seen_by_both_processes() {
        pair(
            |peer: &Peer| {
                retain(0);
                let at = alloc(10 * MIB).unwrap();
                fill(at, 1, 10 * MIB);
                peer.send(&name(at).unwrap().reserved);
                peer.meet();
                assert_eq!((read::<2>(at), used(2)), ([2, 1], 10 * MIB), "counted once");
                peer.meet();
                peer.until_gone();
                assert_eq!((read::<2>(at), used(1)), ([2, 1], 10 * MIB));
                ok(free(at));
                assert_eq!(used(1), 0);
            },
            |peer: &Peer| {
                retain(0);
                let name = named(peer.receive());
                // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
                assert_eq!(open(name, 0), Err(1));
                let at = open(name, 1).unwrap();
                assert_eq!(open(name, 1), Ok(at));
                assert_eq!(read::<1>(at), [1]);
                fill(at, 2, 1);
                peer.meet();
                assert_eq!(free(at), 1, "to be closed, not freed");
                assert_eq!((close(at), close(at), close(at)), (0, 0, 1));
                peer.meet();
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
            },
        );
    }

    /// What the exporter frees stays as long as an importer has it open, and counts for that one.
    pub fn an_import_keeps_memory_that_its_exporter_freed() {
        pair(
            |peer: &Peer| {
                retain(0);
                let at = alloc(10 * MIB).unwrap();
                fill(at, 1, 10 * MIB);
                peer.send(&name(at).unwrap().reserved);
                peer.meet();
                ok(free(at));
                assert_eq!(used(2), 10 * MIB);
                let again = alloc(10 * MIB).unwrap();
                assert_eq!(used(2), 20 * MIB);
                fill(again, 5, 10 * MIB);
                peer.meet();
                peer.meet();
                assert_eq!((used(2), read::<1>(again)), (10 * MIB, [5]));
                peer.meet();
            },
            |peer: &Peer| {
                retain(0);
                let at = open(named(peer.receive()), 1).unwrap();
                peer.meet();
                peer.meet();
                assert_eq!(read::<2>(at), [1, 1]);
                ok(close(at));
                peer.meet();
                peer.meet();
            },
        );
    }

    pub fn small_allocations_share_their_chunk() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (a, b) = (alloc(1000).unwrap(), alloc(1000).unwrap());
                fill(b, 7, 1000);
                peer.send(&name(a).unwrap().reserved);
                peer.send(&name(b).unwrap().reserved);
                peer.meet();
                assert_eq!(used(2), 2 * MIB);
                assert_eq!((read::<1>(a), read::<1>(b)), ([3], [7]));
                ok(free(a));
                ok(free(b));
                assert_eq!(used(2), 2 * MIB);
                peer.meet();
                peer.meet();
                assert_eq!(used(2), 0);
                peer.meet();
            },
            |peer: &Peer| {
                retain(0);
                let a = open(named(peer.receive()), 1).unwrap();
                let b = open(named(peer.receive()), 1).unwrap();
                assert_eq!(read::<1>(b), [7]);
                fill(a, 3, 1000);
                peer.meet();
                peer.meet();
                // Contexts close what they opened.
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)));
                retain(0);
                peer.meet();
                peer.meet();
            },
        );
    }

    pub fn an_importer_that_is_killed_lets_go() {
        pair(
            |peer: &Peer| {
                retain(0);
                let at = alloc(10 * MIB).unwrap();
                peer.send(&name(at).unwrap().reserved);
                peer.meet();
                ok(free(at));
                assert_eq!(used(2), 10 * MIB);
                peer.send(&[1]);
                peer.until_gone();
                let since = std::time::Instant::now();
                while used(1) != 0 {
                    assert!(since.elapsed().as_secs() < 20);
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            },
            |peer: &Peer| {
                retain(0);
                open(named(peer.receive()), 1).unwrap();
                peer.meet();
                peer.receive::<1>();
                // SAFETY: kills this very process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }
}
