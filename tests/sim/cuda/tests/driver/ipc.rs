//! Memory of one process in another: CUDA Driver API, "Memory Management", `cuIpcGetMemHandle`,
//! `cuIpcOpenMemHandle`, `cuIpcCloseMemHandle` (the comments of cuda.h).

use crate::harness::*;
use std::ffi::{c_uint, c_void};
use std::time::Duration;

fn name(at: u64) -> Outcome<Name> {
    put_over(named([0; 64]), |name| cuda!(cuIpcGetMemHandle(name, at)))
}

fn open(name: Name, flags: c_uint) -> Outcome<u64> {
    made(|to| cuda!(cuIpcOpenMemHandle_v2(to, name, flags)))
}

fn close(at: u64) -> Result {
    cuda!(cuIpcCloseMemHandle(at))
}

// Events of one process in another: `cuIpcGetEventHandle`, `cuIpcOpenEventHandle`. `events` of `tests/programs/waits.c` are two
// processes that wait for each other's.

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

fn create(flags: c_uint) -> Outcome<Handle> {
    made(|to| cuda!(cuEventCreate(to, flags)))
}

fn shared_event() -> Handle {
    create(DISABLE_TIMING | INTERPROCESS).unwrap()
}

fn event_name(event: Handle) -> Outcome<Name> {
    put_over(named([0; 64]), |name| cuda!(cuIpcGetEventHandle(name, event)))
}

fn open_event(name: Name) -> Outcome<Handle> {
    made(|to| cuda!(cuIpcOpenEventHandle(to, name)))
}

fn query(event: Handle) -> Result {
    cuda!(cuEventQuery(event))
}

unsafe extern "C" fn hold(_: *mut c_void) {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

scenarios! {
    /// "If the memory handle has already been opened by the current context, the reference count
    /// on the handle is incremented by 1 and the existing device pointer is returned." What the exporter frees stays as
    /// long as an importer has it open, and counts for that one.
    fn memory_is_seen_by_both_processes() {
        pair(
            |peer: &Peer| {
                retain(0);
                let at = alloc(10 * MIB).unwrap();
                fill(at, 1, 10 * MIB);
                peer.send(&name(at).unwrap().reserved);
                peer.meet();
                assert_eq!((read::<2>(at), used(2)), ([2, 1], 10 * MIB), "counted once");
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
                let name = named(peer.receive());
                // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
                assert_eq!(open(name, 0), Err(1));
                let at = open(name, 1).unwrap();
                assert_eq!(open(name, 1), Ok(at));
                assert_eq!(read::<1>(at), [1]);
                fill(at, 2, 1);
                peer.meet();
                assert_eq!(free(at), 1, "to be closed, not freed");
                peer.meet();
                assert_eq!(read::<2>(at), [2, 1]);
                assert_eq!((close(at), close(at), close(at)), (0, 0, 1));
                peer.meet();
                peer.meet();
            },
        );
    }

    fn small_allocations_share_their_chunk() {
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

    fn only_interprocess_events_have_handles() {
        retain(0);
        assert_eq!(create(INTERPROCESS), Err(1), "only without timing");
        let (plain, event) = (create(DISABLE_TIMING).unwrap(), shared_event());
        assert_eq!(event_name(plain), Err(400));
        let first = event_name(event).unwrap();
        assert_eq!(event_name(event), Ok(first));
        assert_eq!(open_event(first), Err(201), "not in the process that made it");
        assert_eq!(open_event(named([5; 64])), Err(1));
        assert_eq!(query(event), 0, "never recorded");
        record(event, NULL);
        ok(cuda!(cuEventSynchronize(event)));
        assert_eq!(query(event), 0);
        let mut ms = 0f32;
        let elapsed = cuda!(cuEventElapsedTime(&raw mut ms, event, event));
        assert_eq!(elapsed, 400, "it has no time");
    }

    /// Undefined by the manual; nobody hangs here.
    fn an_exporter_that_is_killed_holds_nobody() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (open_event(named(peer.receive())).unwrap(), new_stream());
                assert_eq!(query(event), 600, "not ready");
                ok(cuda!(cuStreamWaitEvent(stream, event, 0)));
                peer.meet();
                ok(cuda!(cuEventSynchronize(event)));
                synchronize(stream);
                record(event, stream);
                assert_eq!(query(event), 0);
            },
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (shared_event(), new_stream());
                ok(cuda!(cuLaunchHostFunc(stream, Some(hold), NULL)));
                record(event, stream);
                peer.send(&event_name(event).unwrap().reserved);
                peer.meet();
                // SAFETY: ends this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }
}
