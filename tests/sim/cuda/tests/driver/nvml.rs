//! What NVML's questions cost the processes that allocate, and what NVML says of their memory.

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

/// The processes that compute on it: pid and bytes.
fn processes(device: Handle) -> Vec<(u32, u64)> {
    let mut found = [nvmlProcessInfo_t::default(); 8];
    let mut count = 8;
    ok(cuda!(nvmlDeviceGetComputeRunningProcesses_v3(
        device,
        &raw mut count,
        found.as_mut_ptr().cast()
    )));
    found[..count as usize].iter().map(|p| (p.pid, p.usedGpuMemory)).collect()
}

/// `nvmlMemory_v2_t`: version, total, reserved, free, used.
fn memory(device: Handle) -> [u64; 5] {
    let mut info = [40 | 2 << 24, 0, 0, 0, 0];
    ok(cuda!(nvmlDeviceGetMemoryInfo_v2(device, info.as_mut_ptr().cast())));
    info
}

/// Bytes of managed memory that this process shows, and that the GPU has in use, once it has 100 MiB.
fn managed() -> (u64, u64) {
    retain(0);
    let device = device();
    let figures = || (processes(device)[0].1, memory(device)[4]);
    let before = figures();
    let at = must(|to| cuda!(cuMemAllocManaged(to, 100 * MIB, 1)));
    let with = figures();
    ok(free(at));
    assert_eq!(figures(), before);
    (with.0 - before.0, with.1 - before.1)
}

/// How long the memory of a killed process with 4 GiB of device memory and 1 GiB of pinned memory is in use.
fn teardown() -> Duration {
    let mut took = Duration::ZERO;
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
            took = killed.elapsed();
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
    took
}

/// MiB that the driver shows for a maker of 10 MiB and for its importer, contexts left out, and for the GPU.
fn imported() -> [u64; 3] {
    let mut shown = [0; 3];
    pair(
        |peer: &Peer| {
            retain(0);
            let (at, mut name) = (alloc(10 * MIB).unwrap(), named([0; 64]));
            ok(cuda!(cuIpcGetMemHandle(&raw mut name, at)));
            peer.send(&name.reserved);
            let importer = u32::from_ne_bytes(peer.receive());
            let device = device();
            let listed = processes(device);
            let of = |pid| listed.iter().find(|(p, _)| *p == pid).unwrap().1 / MIB as u64 - 64;
            shown = [of(std::process::id()), of(importer), memory(device)[4] / MIB as u64 - 128];
            peer.meet();
        },
        |peer: &Peer| {
            retain(0);
            let (name, mut at) = (named(peer.receive()), 0u64);
            ok(cuda!(cuIpcOpenMemHandle_v2(&raw mut at, name, 1)));
            peer.send(&std::process::id().to_ne_bytes());
            peer.meet();
        },
    );
    shown
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
        let (mut count, none) = (0, std::ptr::null_mut::<nvmlProcessInfo_t>());
        let list = Duration::from_micros(4_500);
        assert!(time(|| processes(device)) >= list);
        assert!(
            time(|| cuda!(nvmlDeviceGetGraphicsRunningProcesses_v3(
                device,
                &raw mut count,
                none.cast()
            ))) >= list
        );
        assert!(
            time(|| cuda!(nvmlDeviceGetMPSComputeRunningProcesses_v3(
                device,
                &raw mut count,
                none.cast()
            ))) >= list
        );
        assert!(
            time(|| cuda!(nvmlDeviceGetProcessUtilization(device, none.cast(), &raw mut count, 0)))
                >= list
        );
        assert!(time(|| memory(device)) >= Duration::from_micros(12));
    }

    /// "The game's render and submission threads were blocking on NVIDIA's global RM lock": the same.
    fn allocations_wait_for_a_list_and_memory_figures_do_not() with "nvml.process_list_us = 300000.0\n" {
        retain(0);
        let list = Duration::from_millis(300);
        let device = device();
        let kept = alloc(10 * MIB).unwrap();
        let calls: [&dyn Fn(); 3] =
            [&|| assert!(alloc(10 * MIB).is_ok()), &|| ok(free(kept)), &|| {
                ok(cuda!(cuDevicePrimaryCtxReset_v2(0)))
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

    /// 60 GB of `cudaMallocManaged` show as 5, of `cudaMalloc` as 58 (gpuopenanalytics/pynvml#63).
    fn managed_memory_is_the_gpus_and_nobodys() {
        assert_eq!(managed(), (0, 100 * MIB as u64));
    }

    fn managed_memory_may_count_for_its_process() with "memory.managed = \"process\"\n" {
        assert_eq!(managed(), (100 * MIB as u64, 100 * MIB as u64));
    }

    /// 0.4 to 0.8 s for 67.5 GB, 25.9 s with 243 GB of pinned memory (sgl-project/sglang#32829).
    fn a_killed_process_s_memory_takes_the_longer_the_more_it_had() {
        assert!(teardown() >= Duration::from_millis(10 + 4 * 8 + 110));
    }

    fn a_killed_process_s_memory_may_come_back_at_once() with "memory.teardown_ms = 0.0\nmemory.teardown_ms_per_gib = 0.0\nmemory.teardown_ms_per_pinned_gib = 0.0\n" {
        assert!((0..20).any(|_| teardown() < Duration::from_millis(10 + 4 * 8 + 110)));
    }

    /// RM has sums of its own for what a process has made, shared and duplicated; which of them NVML adds up is
    /// not public.
    fn an_import_counts_for_its_maker() {
        assert_eq!(imported(), [10, 0, 10]);
    }

    fn an_import_may_count_for_both() with "memory.imports = \"both\"\n" {
        assert_eq!(imported(), [10, 10, 10]);
    }

    fn lists_may_cost_nothing() with "nvml.process_list_us = 0.0\nnvml.memory_info_us = 0.0\n" {
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
