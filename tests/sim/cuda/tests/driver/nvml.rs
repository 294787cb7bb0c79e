//! What NVML's questions cost the processes that allocate, and what NVML says of their memory. Whose managed and imported
//! memory is, `tests/gpu/probes/findings.py` shows.

use crate::harness::*;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tessera_cuda::nvml::{nvmlProcessInfo_t, nvmlProcessUtilizationSample_t};

/// The first GPU, in NVML's eyes.
fn device() -> Handle {
    let mut device = NULL;
    ok(cuda!(nvmlInit_v2()));
    ok(cuda!(nvmlDeviceGetHandleByIndex_v2(0, &raw mut device)));
    device
}

/// Of the only process that has used the GPU since `unix_us`.
fn utilisation(device: Handle, since_unix_us: u64) -> Option<nvmlProcessUtilizationSample_t> {
    let (mut found, mut count) = ([nvmlProcessUtilizationSample_t::default(); 2], 2);
    let result = cuda!(nvmlDeviceGetProcessUtilization(
        device,
        found.as_mut_ptr().cast(),
        &raw mut count,
        since_unix_us
    ));
    let not_found = 6;
    assert!(result == not_found || result == 0 && count == 1, "{result} {count}");
    (result == 0).then_some(found[0])
}

/// Asks which processes compute on it.
fn list(device: Handle) {
    let mut found = [nvmlProcessInfo_t::default(); 8];
    let mut count = 8;
    ok(cuda!(nvmlDeviceGetComputeRunningProcesses_v3(
        device,
        &raw mut count,
        found.as_mut_ptr().cast()
    )));
}

/// `nvmlMemory_v2_t`: version, total, reserved, free, used.
fn memory(device: Handle) -> [u64; 5] {
    let mut info = [40 | 2 << 24, 0, 0, 0, 0];
    ok(cuda!(nvmlDeviceGetMemoryInfo_v2(device, info.as_mut_ptr().cast())));
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
        list(device);
    });
    let began = hear.recv().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    (began, lister)
}

scenarios! {
    fn utilisation_is_a_process_s_part_of_the_time_since_the_question_before() {
        retain(0);
        let (device, stream, spin) = (device(), new_stream(), kernel("spin"));
        let work = |times| {
            for _ in 0..times {
                ok(launch_with(spin, stream, [0, 30_000_000]));
                synchronize(stream);
                std::thread::sleep(Duration::from_millis(100));
            }
        };
        work(3);
        let before = utilisation(device, 0).unwrap();
        assert_eq!(before.pid, std::process::id());
        work(20);
        let after = utilisation(device, before.timeStamp).unwrap();
        let part = 20 * 30_000 * 100 / (after.timeStamp - before.timeStamp);
        assert!(u64::from(after.smUtil).abs_diff(part) <= 1, "{} {part}", after.smUtil);
        std::thread::sleep(Duration::from_millis(50));
        assert!(utilisation(device, after.timeStamp).is_none(), "nothing since");
        // Asked in between, and of the time before that.
        let whole = utilisation(device, before.timeStamp).unwrap();
        assert!((1..=after.smUtil).contains(&whole.smUtil), "{}", whole.smUtil);
    }

    /// 4.49 ms, to count them as well as to tell them, of whichever kind: flightlessmango/MangoHud#2104.
    fn a_list_of_processes_takes_milliseconds() {
        retain(0);
        let device = device();
        let none = std::ptr::null_mut::<nvmlProcessInfo_t>();
        let lists: [&dyn Fn(*mut u32) -> Result; 3] = [
            &|n| cuda!(nvmlDeviceGetGraphicsRunningProcesses_v3(device, n, none)),
            &|n| cuda!(nvmlDeviceGetMPSComputeRunningProcesses_v3(device, n, none)),
            &|n| cuda!(nvmlDeviceGetProcessUtilization(device, none.cast(), n, 0)),
        ];
        let long = Duration::from_micros(4_500);
        assert!(time(|| list(device)) >= long);
        for list in lists {
            let mut count = 0;
            assert!(time(|| list(&raw mut count)) >= long);
        }
        assert!(time(|| memory(device)) >= Duration::from_micros(12));
    }

    /// "The game's render and submission threads were blocking on NVIDIA's global RM lock": the same.
    fn allocations_wait_for_a_list_and_memory_figures_do_not() with "nvml.process_list_us = 300000.0\n" {
        retain(0);
        let long = Duration::from_millis(300);
        let device = device();
        let kept = alloc(10 * MIB).unwrap();
        let calls: [&dyn Fn(); 3] =
            [&|| assert!(alloc(10 * MIB).is_ok()), &|| ok(free(kept)), &|| {
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)))
            }];
        for call in calls {
            let (began, lister) = begin_a_list();
            call();
            assert!(began.elapsed() >= long);
            lister.join().unwrap();
        }
        // A busy machine may be slow once.
        assert!((0..50).any(|_| {
            let (began, lister) = begin_a_list();
            memory(device);
            let early = began.elapsed() < long;
            lister.join().unwrap();
            early
        }));
    }

    fn one_who_is_killed_in_a_list_holds_nobody_up_for_longer() with "nvml.process_list_us = 300000.0\n" {
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

    /// 0.4 to 0.8 s for 67.5 GB, 25.9 s with 243 GB of pinned memory (sgl-project/sglang#32829).
    fn a_killed_process_s_memory_takes_the_longer_the_more_it_had() {
        pair(
            |peer: &Peer| {
                peer.receive::<1>();
                let device = device();
                let killed = Instant::now();
                peer.send(&[1]);
                peer.until_gone();
                while memory(device)[4] > 0 {
                    assert!(killed.elapsed() < Duration::from_secs(60));
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(killed.elapsed() >= Duration::from_millis(10 + 4 * 8 + 110));
            },
            |peer: &Peer| {
                retain(0);
                alloc(4096 * MIB).unwrap();
                let _: Handle = must(|to| cuda!(cuMemHostAlloc(to, 1024 * MIB, 0)));
                peer.send(&[1]);
                peer.receive::<1>();
                // SAFETY: kills this very process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        );
    }
}
