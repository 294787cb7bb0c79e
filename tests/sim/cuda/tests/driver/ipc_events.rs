//! Events of one process in another: CUDA Driver API, `cuIpcGetEventHandle`, `cuIpcOpenEventHandle`
//! (the comments of cuda.h). Work is held by host functions, so nothing depends on time.

use crate::harness::*;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

scenarios! {
    only_interprocess_events_have_handles
    another_process_waits_queries_and_synchronises
    an_importer_records_and_the_exporter_waits
    work_on_another_gpu_waits
    an_exporter_that_is_killed_holds_nobody
    events_that_are_gone_can_not_be_opened
    thousands_of_events_one_after_another
}

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const NOT_READY: Result = 600;

fn create(flags: c_uint) -> Outcome<Handle> {
    made(|to| cuda!(cuEventCreate(to, flags)))
}

fn shared_event() -> Handle {
    create(DISABLE_TIMING | INTERPROCESS).unwrap()
}

fn name(event: Handle) -> Outcome<Name> {
    let mut name = named([0; 64]);
    match cuda!(cuIpcGetEventHandle(&raw mut name, event)) {
        0 => Ok(name),
        e => Err(e),
    }
}

fn open(name: Name) -> Outcome<Handle> {
    made(|to| cuda!(cuIpcOpenEventHandle(to, name)))
}

fn query(event: Handle) -> Result {
    cuda!(cuEventQuery(event))
}

fn wait(stream: Handle, event: Handle) {
    ok(cuda!(cuStreamWaitEvent(stream, event, 0)));
}

fn stream_query(stream: Handle) -> Result {
    cuda!(cuStreamQuery(stream))
}

static LET_GO: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn hold(_: *mut c_void) {
    while !LET_GO.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Holds what is then submitted to the stream until [`LET_GO`].
fn hold_back(stream: Handle) {
    ok(cuda!(cuLaunchHostFunc(stream, Some(hold), NULL)));
}

mod body {
    use super::*;

    pub fn only_interprocess_events_have_handles() {
        retain(0);
        assert_eq!(create(INTERPROCESS), Err(1), "only without timing");
        let (plain, event) = (create(DISABLE_TIMING).unwrap(), shared_event());
        assert_eq!(name(plain), Err(400));
        let first = name(event).unwrap();
        assert_eq!(name(event), Ok(first));
        assert_eq!(open(first), Err(201), "not in the process that made it");
        assert_eq!(open(named([5; 64])), Err(1));
        assert_eq!(query(event), 0, "never recorded");
        record(event, NULL);
        ok(cuda!(cuEventSynchronize(event)));
        assert_eq!(query(event), 0);
        let mut ms = 0f32;
        let elapsed = cuda!(cuEventElapsedTime(&raw mut ms, event, event));
        assert_eq!(elapsed, 400, "it has no time");
    }

    pub fn another_process_waits_queries_and_synchronises() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (shared_event(), new_stream());
                peer.send(&name(event).unwrap().reserved);
                peer.meet();
                hold_back(stream);
                record(event, stream);
                peer.meet();
                peer.meet();
                LET_GO.store(true, Ordering::Release);
                peer.until_gone();
            },
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (open(named(peer.receive())).unwrap(), new_stream());
                let plain = kernel("plain");
                assert_eq!(query(event), 0, "never recorded");
                wait(stream, event);
                synchronize(stream);
                peer.meet();
                peer.meet();
                assert_eq!(query(event), NOT_READY);
                wait(stream, event);
                ok(launch(plain, 1, stream, std::ptr::null_mut()));
                // The GPU is free: only the event is waited for.
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(stream_query(stream), NOT_READY);
                peer.meet();
                ok(cuda!(cuEventSynchronize(event)));
                assert_eq!(query(event), 0);
                synchronize(stream);
                ok(cuda!(cuEventDestroy_v2(event)));
                assert_eq!(query(event), 400);
            },
        );
    }

    pub fn an_importer_records_and_the_exporter_waits() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (shared_event(), new_stream());
                // Its own record is replaced by the other's.
                record(event, stream);
                peer.send(&name(event).unwrap().reserved);
                peer.meet();
                assert_eq!(query(event), NOT_READY);
                wait(stream, event);
                assert_eq!(stream_query(stream), NOT_READY);
                peer.meet();
                synchronize(stream);
                assert_eq!(query(event), 0);
                peer.until_gone();
                ok(cuda!(cuEventSynchronize(event)));
            },
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (open(named(peer.receive())).unwrap(), new_stream());
                assert_eq!(name(event), Err(400), "an import has no handle");
                hold_back(stream);
                record(event, stream);
                peer.meet();
                peer.meet();
                LET_GO.store(true, Ordering::Release);
                synchronize(stream);
            },
        );
    }

    pub fn work_on_another_gpu_waits() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (shared_event(), new_stream());
                hold_back(stream);
                record(event, stream);
                peer.send(&name(event).unwrap().reserved);
                peer.meet();
                LET_GO.store(true, Ordering::Release);
                peer.until_gone();
            },
            |peer: &Peer| {
                retain(1);
                let (event, stream) = (open(named(peer.receive())).unwrap(), new_stream());
                wait(stream, event);
                assert_eq!((stream_query(stream), query(event)), (NOT_READY, NOT_READY));
                peer.meet();
                synchronize(stream);
                assert_eq!(query(event), 0);
            },
        );
    }

    /// Undefined by the manual; nobody hangs here.
    pub fn an_exporter_that_is_killed_holds_nobody() {
        pair(
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (open(named(peer.receive())).unwrap(), new_stream());
                assert_eq!(query(event), NOT_READY);
                wait(stream, event);
                peer.meet();
                ok(cuda!(cuEventSynchronize(event)));
                synchronize(stream);
                record(event, stream);
                assert_eq!(query(event), 0);
            },
            |peer: &Peer| {
                retain(0);
                let (event, stream) = (shared_event(), new_stream());
                hold_back(stream);
                record(event, stream);
                peer.send(&name(event).unwrap().reserved);
                peer.meet();
                // SAFETY: ends this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }

    pub fn events_that_are_gone_can_not_be_opened() {
        pair(
            |peer: &Peer| {
                retain(0);
                let event = shared_event();
                peer.send(&name(event).unwrap().reserved);
                peer.meet();
                ok(cuda!(cuEventDestroy_v2(event)));
                // Another life of the same entry is another event.
                let _next = shared_event();
                peer.meet();
                peer.until_gone();
            },
            |peer: &Peer| {
                retain(0);
                let name = named(peer.receive());
                let event = open(name).unwrap();
                peer.meet();
                peer.meet();
                assert_eq!((open(name), query(event)), (Err(205), 0));
            },
        );
    }

    pub fn thousands_of_events_one_after_another() {
        retain(0);
        for _ in 0..20_000 {
            let event = shared_event();
            record(event, NULL);
            ok(cuda!(cuEventDestroy_v2(event)));
        }
        let mut device: c_int = 7;
        ok(cuda!(cuCtxGetDevice(&raw mut device)));
        assert_eq!(device, 0);
    }
}
