//! CUDA Driver API, "Stream memory operations": streams wait for and write words of memory.

use crate::harness::*;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const GEQ: c_uint = 0;
const EQ: c_uint = 1;
const AND: c_uint = 2;
const NOR: c_uint = 3;

fn pinned() -> (u64, &'static [AtomicU32]) {
    let host = must(|to| cuda!(cuMemHostAlloc(to, 4096, 0)));
    // SAFETY: 4096 writable bytes, aligned to a page, never freed.
    let words = unsafe {
        std::ptr::write_bytes(host.cast::<u8>(), 0, 4096);
        std::slice::from_raw_parts(host.cast::<AtomicU32>(), 1024)
    };
    (host as u64, words)
}

fn wait(s: Handle, at: u64, value: u32, flags: c_uint) -> Result {
    cuda!(cuStreamWaitValue32_v2(s, at, value, flags))
}

scenarios! {
    /// What watches the words here calls no driver, and no thread of the driver's is there that would.
    fn the_gpu_writes_and_waits_without_a_thread_of_the_process() {
        let _gpu = simgpu::channel::GpuThread::start(simgpu::Session::open().unwrap()).unwrap();
        retain(0);
        let (s, (at, words)) = (new_stream(), pinned());
        let begun = Instant::now();
        let until = |word: usize, value: u32| {
            while words[word].load(Ordering::Acquire) != value {
                assert!(begun.elapsed() < Duration::from_secs(120), "{value}");
                std::thread::yield_now();
            }
        };
        // More than there is room for at once.
        for n in 1..=600u32 {
            ok(launch(kernel("plain"), 1, s, std::ptr::null_mut()));
            ok(cuda!(cuStreamWriteValue32_v2(s, at + 4, n, 0)));
        }
        until(1, 600);
        for n in 1..=300u32 {
            ok(wait(s, at, n, [GEQ, EQ][n as usize % 2]));
            ok(cuda!(cuStreamWriteValue32_v2(s, at + 4, n, 0)));
            assert_ne!(words[1].load(Ordering::Acquire), n, "it waits");
            words[0].store(n, Ordering::Release);
            until(1, n);
        }
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = threads.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap());
        let names: Vec<String> = names.collect();
        assert!(!names.iter().any(|name| name.trim() == "simgpu-host"), "{names:?}");
    }

    /// On hardware within microseconds; here a look at each word took up to half a millisecond while the GPU worked.
    fn a_stream_that_waits_for_anothers_word_goes_on_at_once() {
        let _gpu = simgpu::channel::GpuThread::start(simgpu::Session::open().unwrap()).unwrap();
        let stream = |gpu| {
            retain(gpu);
            keep_busy(kernel("spin"), new_stream());
            new_stream()
        };
        let (other, one) = (stream(1), stream(0));
        let ((at, _), before, after) = (pinned(), new_event(), new_event());
        record(before, one);
        for n in 1..=100 {
            ok(cuda!(cuStreamWriteValue32_v2(one, at, n, 0)));
            ok(wait(other, at, n, GEQ));
            ok(cuda!(cuStreamWriteValue32_v2(other, at + 4, n, 0)));
            ok(wait(one, at + 4, n, GEQ));
        }
        record(after, one);
        synchronize(one);
        let took_us = elapsed_us(before, after);
        assert!(took_us < 25_000.0, "200 waits took {took_us} us");
    }

    /// Where nobody is the GPU, for who synchronises, and for who merely watches.
    fn a_stream_writes_memory_when_it_gets_there() {
        retain(0);
        let (s, (at, words)) = (new_stream(), pinned());
        let write = |word: u64, value: u32| {
            keep_busy(kernel("spin"), s);
            ok(cuda!(cuStreamWriteValue32_v2(s, at + 4 * word, value, 0)));
        };
        write(0, 7);
        assert_eq!(words[0].load(Ordering::SeqCst), 0, "not before the kernel is done");
        synchronize(s);
        assert_eq!(words[0].load(Ordering::SeqCst), 7);
        write(1, 8);
        let since = Instant::now();
        while words[1].load(Ordering::SeqCst) == 0 {
            assert!(since.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(words[1].load(Ordering::SeqCst), 8);
        assert_eq!(cuda!(cuStreamWriteValue32_v2(s, at + 2, 1, 0)), 1, "misaligned");
    }

    fn a_stream_waits_until_the_host_writes() {
        retain(0);
        let (s, (at, words)) = (new_stream(), pinned());
        let (device, plain) = (alloc(64).unwrap(), kernel("plain"));
        ok(wait(s, at, 1, GEQ));
        // Behind the wait, and submitted without waiting for it: a fill, a copy back, a kernel.
        ok(cuda!(cuMemsetD32Async(device, 7, 1, s)));
        ok(cuda!(cuMemcpyDtoHAsync_v2((at + 8) as *mut c_void, device, 4, s)));
        ok(launch(plain, 1, s, std::ptr::null_mut()));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((query(s), words[2].load(Ordering::SeqCst)), (600, 0));
        words[0].store(1, Ordering::SeqCst);
        synchronize(s);
        assert_eq!(words[2].load(Ordering::SeqCst), 7);
    }

    fn a_kernel_runs_until_the_host_writes() {
        retain(0);
        let (s, (at, words)) = (new_stream(), pinned());
        let run = |address: u64| launch_with(kernel("until"), s, [address, 2]);
        assert_eq!((run(0), run(at + 2)), (1, 1), "no word, and none that is aligned");
        let (before, after) = (new_event(), new_event());
        record(before, s);
        ok(run(at));
        record(after, s);
        words[0].store(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(query(s), 600);
        words[0].store(2, Ordering::SeqCst);
        synchronize(s);
        assert!(elapsed_us(before, after) >= 20_000.0, "it had the GPU all the time");
        // Nobody watches for a graph.
        ok(cuda!(cuStreamBeginCapture_v2(s, 2)));
        assert_eq!(run(at), 801);
    }

    /// `CUstreamWaitValue_flags`.
    fn each_comparison_is_as_documented() {
        retain(0);
        let (s, (at, words)) = (new_stream(), pinned());
        let cases = [
            // "(int32_t)(*addr - value) >= 0 … a cyclic comparison"
            (GEQ, 5, vec![4, 0x8000_0006], 5),
            (GEQ, 0xffff_fff0, vec![0xffff_ffef], 3),
            (EQ, 5, vec![4, 6], 5),
            (AND, 6, vec![1, 8], 2),
            // "~(*addr | value) != 0"
            (NOR, 0xffff_fff0, vec![0xf, 0xffff_ffff], 7),
        ];
        for (flags, value, unmet, met) in cases {
            for value_now in unmet {
                words[0].store(value_now, Ordering::SeqCst);
                ok(wait(s, at, value, flags));
                std::thread::sleep(Duration::from_millis(3));
                assert_eq!(query(s), 600, "{flags}: {value_now} and {value}");
                words[0].store(met, Ordering::SeqCst);
                synchronize(s);
            }
        }
        // SAFETY: within pinned memory that is never freed.
        let double = unsafe { &*((at + 64) as *const AtomicU64) };
        ok(cuda!(cuStreamWaitValue64_v2(s, at + 64, 1 << 40, EQ)));
        assert_eq!(query(s), 600);
        double.store(1 << 40, Ordering::SeqCst);
        synchronize(s);
    }
}
