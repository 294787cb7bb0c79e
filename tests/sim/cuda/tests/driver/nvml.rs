//! What NVML's questions cost the processes that allocate, and what NVML says of their memory.

use crate::harness::*;
use crate::pair::{Peer, pair};
use std::ffi::c_uint;
use std::sync::mpsc;
use std::time::{Duration, Instant};

scenarios! {
    a_list_of_processes_takes_milliseconds
}

configured! {
    allocations_wait_for_a_list_and_memory_figures_do_not = "nvml.process_list_us = 300000.0\n"
    one_who_is_killed_in_a_list_holds_nobody_up_for_longer = "nvml.process_list_us = 300000.0\n"
    lists_may_cost_nothing = "nvml.process_list_us = 0.0\nnvml.memory_info_us = 0.0\n"
}

/// The first GPU, in NVML's eyes.
fn device() -> Handle {
    let mut device = NULL;
    ok(cuda!(nvmlInit_v2()));
    ok(cuda!(nvmlDeviceGetHandleByIndex_v2(0 => c_uint, &raw mut device => *mut Handle)));
    device
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used_bytes: u64,
    instances: [c_uint; 2],
}

/// The processes that compute on it: pid and bytes.
fn processes(device: Handle) -> Vec<(u32, u64)> {
    let mut found = [Process::default(); 8];
    let mut count = 8;
    ok(
        cuda!(nvmlDeviceGetComputeRunningProcesses_v3(device => Handle, &raw mut count => *mut c_uint,
             found.as_mut_ptr() => *mut Process)),
    );
    found[..count as usize].iter().map(|p| (p.pid, p.used_bytes)).collect()
}

/// `nvmlMemory_v2_t`: version, total, reserved, free, used.
fn memory(device: Handle) -> [u64; 5] {
    let mut info = [40 | 2 << 24, 0, 0, 0, 0];
    ok(cuda!(nvmlDeviceGetMemoryInfo_v2(device => Handle, info.as_mut_ptr() => *mut u64)));
    info
}

/// How long `act` takes.
fn time<T>(act: impl FnOnce() -> T) -> Duration {
    let begin = Instant::now();
    act();
    begin.elapsed()
}

/// Begins a list in another thread. When it began at the earliest.
fn begin_a_list() -> (Instant, std::thread::JoinHandle<()>) {
    let (say, hear) = mpsc::channel();
    let lister = std::thread::spawn(move || {
        let device = device();
        say.send(Instant::now()).unwrap();
        processes(device);
    });
    let began = hear.recv().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    (began, lister)
}

mod body {
    use super::*;

    /// 4.49 ms, to count them as well as to tell them, of whichever kind: flightlessmango/MangoHud#2104.
    pub fn a_list_of_processes_takes_milliseconds() {
        retain(0);
        let device = device();
        let (mut count, none) = (0, std::ptr::null_mut::<Process>());
        let list = Duration::from_micros(4_500);
        assert!(time(|| processes(device)) >= list);
        assert!(
            time(|| cuda!(nvmlDeviceGetGraphicsRunningProcesses_v3(device => Handle,
                          &raw mut count => *mut c_uint, none => *mut Process)))
                >= list
        );
        assert!(
            time(|| cuda!(nvmlDeviceGetMPSComputeRunningProcesses_v3(device => Handle,
                          &raw mut count => *mut c_uint, none => *mut Process)))
                >= list
        );
        assert!(
            time(|| cuda!(nvmlDeviceGetProcessUtilization(device => Handle, none => *mut Process,
                          &raw mut count => *mut c_uint, 0 => u64)))
                >= list
        );
        assert!(time(|| memory(device)) >= Duration::from_micros(12));
    }

    /// "The game's render and submission threads were blocking on NVIDIA's global RM lock": the same.
    pub fn allocations_wait_for_a_list_and_memory_figures_do_not() {
        retain(0);
        let list = Duration::from_millis(300);
        let device = device();
        let kept = alloc(10 * MIB).unwrap();
        let calls: [&dyn Fn(); 3] =
            [&|| assert!(alloc(10 * MIB).is_ok()), &|| ok(free(kept)), &|| {
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0 => i32)))
            }];
        for call in calls {
            let (began, lister) = begin_a_list();
            call();
            assert!(began.elapsed() >= list);
            lister.join().unwrap();
        }
        // A busy machine may be slow once.
        assert!((0..50).any(|_| {
            let (began, lister) = begin_a_list();
            memory(device);
            let early = began.elapsed() < list;
            lister.join().unwrap();
            early
        }));
    }

    pub fn one_who_is_killed_in_a_list_holds_nobody_up_for_longer() {
        pair(
            |peer: &Peer| {
                peer.receive::<1>();
                peer.until_gone();
                retain(0);
                ok(free(alloc(10 * MIB).unwrap()));
            },
            |peer: &Peer| {
                begin_a_list();
                peer.send(&[1]);
                // SAFETY: kills this very process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }

    pub fn lists_may_cost_nothing() {
        retain(0);
        let device = device();
        let (mut list, mut info) = (Duration::MAX, Duration::MAX);
        for _ in 0..200 {
            list = list.min(time(|| processes(device)));
            info = info.min(time(|| memory(device)));
        }
        assert!(list < Duration::from_micros(4_500), "{list:?}");
        assert_eq!(processes(device).len(), 1);
    }
}
