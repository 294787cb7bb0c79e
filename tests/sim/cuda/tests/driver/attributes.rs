//! What is set and asked without changing any work: stream attributes, ranges of managed memory,
//! clusters, tensor maps, the profiler, logs. The comments of cuda.h.

use crate::harness::*;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

scenarios! {
    stream_attributes_are_kept_and_copied
    advice_and_prefetches_are_answered_for_ranges
    batches_of_prefetches_and_discards
    clusters_fit_on_the_gpu
    tensor_maps_are_checked
    the_profiler_starts_and_stops
    failed_calls_are_logged
}

fn managed(bytes: usize) -> u64 {
    let mut at = 0u64;
    ok(cuda!(cuMemAllocManaged(&raw mut at => *mut u64, bytes => usize, 1 => c_uint)));
    at
}

/// A range attribute of four bytes.
fn range(which: c_int, at: u64, len: usize) -> std::result::Result<c_int, Result> {
    let mut value: c_int = 77;
    match cuda!(cuMemRangeGetAttribute(&raw mut value => *mut c_int, 4 => usize, which => c_int,
                at => u64, len => usize))
    {
        0 => Ok(value),
        e => Err(e),
    }
}

static LOGGED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn logged(data: *mut c_void, level: c_int, _: *mut c_char, len: usize) {
    assert!(data as usize == 5 && level == 0 && len > 10);
    LOGGED.fetch_add(1, Ordering::Relaxed);
}

mod body {
    use super::*;

    pub fn stream_attributes_are_kept_and_copied() {
        retain(0);
        let (s, t) = (new_stream(), new_stream());
        let read = |s: Handle, which: c_int| {
            let mut value = [0xa5a5_a5a5u32; 16];
            let result = cuda!(cuStreamGetAttribute(s => Handle, which => c_int,
                               value.as_mut_ptr() => *mut u32));
            (result, value)
        };
        let write = |s: Handle, which: c_int, value: &[u32; 16]| cuda!(cuStreamSetAttribute(s => Handle, which => c_int, value.as_ptr() => *const u32));
        assert_eq!((read(s, 3).1[0], read(s, 8).1[0], read(s, 10).1[0]), (1, 0, 0));
        assert_eq!((read(s, 2).0, write(s, 2, &[0; 16])), (1, 1), "not of streams");
        let mut value = [0; 16];
        value[0] = 4;
        ok(write(s, 3, &value));
        value[0] = (-3i32).cast_unsigned();
        ok(write(s, 8, &value));
        assert_eq!(read(s, 8).1[1], 0xa5a5_a5a5, "four bytes");
        let mut window = [0u32; 16];
        (window[0], window[2], window[4], window[5]) = (0x1000, 4096, 1f32.to_bits(), 2);
        ok(write(s, 1, &window));
        assert_eq!(read(s, 1).1[..8], window[..8]);
        window[6] = 2;
        assert_eq!(write(s, 1, &window), 1, "misses can't persist");
        ok(cuda!(cuStreamCopyAttributes(t => Handle, s => Handle)));
        assert_eq!((read(t, 3).1[0], read(t, 8).1[0].cast_signed()), (4, -3));
        let mut priority: c_int = 0;
        ok(cuda!(cuStreamGetPriority(t => Handle, &raw mut priority => *mut c_int)));
        assert_eq!(priority, -3);
        ok(cuda!(cuStreamDestroy_v2(s => Handle)));
        assert_eq!(read(new_stream(), 3).1[0], 1, "a new stream has none of it");
    }

    pub fn advice_and_prefetches_are_answered_for_ranges() {
        retain(0);
        let (at, page) = (managed(8 * MIB), 65_536);
        assert_eq!(
            (range(1, at, MIB), range(2, at, MIB), range(4, at, MIB)),
            (Ok(0), Ok(-2), Ok(-2))
        );
        let advise = |at: u64, len: usize, what: c_int, device: c_int| cuda!(cuMemAdvise(at => u64, len => usize, what => c_int, device => c_int));
        ok(advise(at, 4 * MIB, 1, 0));
        assert_eq!((range(1, at, 4 * MIB), range(1, at, 5 * MIB)), (Ok(1), Ok(0)), "all of it");
        ok(advise(at + page as u64, page, 2, 0));
        assert_eq!((range(1, at, page), range(1, at, 4 * MIB)), (Ok(1), Ok(0)));
        ok(advise(at, 8 * MIB, 3, 1));
        assert_eq!(
            (range(2, at, 8 * MIB), range(5, at, MIB), range(6, at, MIB)),
            (Ok(1), Ok(1), Ok(1))
        );
        ok(advise(at, 8 * MIB, 3, -1));
        assert_eq!((range(2, at, MIB), range(5, at, MIB)), (Ok(-1), Ok(2)), "CU_DEVICE_CPU");
        ok(advise(at, MIB, 5, 1));
        let mut by = [9 as c_int; 3];
        ok(cuda!(cuMemRangeGetAttribute(by.as_mut_ptr() => *mut c_int, 12 => usize, 3 => c_int,
                 at => u64, MIB => usize)));
        assert_eq!(by, [1, -2, -2]);
        ok(cuda!(cuMemPrefetchAsync(at => u64, MIB => usize, 0 => c_int, NULL => Handle)));
        assert_eq!(
            (range(4, at, MIB), range(4, at, 2 * MIB), range(7, at, MIB)),
            (Ok(0), Ok(-2), Ok(1))
        );
        let (mut a, mut b): (c_int, c_int) = (9, 9);
        let mut outs = [(&raw mut a).cast::<c_void>(), (&raw mut b).cast()];
        ok(cuda!(cuMemRangeGetAttributes(outs.as_mut_ptr() => *mut *mut c_void,
                 [4usize, 4].as_ptr() => *const usize, [1 as c_int, 4].as_ptr() => *const c_int,
                 2 => usize, at => u64, page => usize)));
        assert_eq!((a, b), (1, 0));
        assert_eq!((range(1, at, 9 * MIB), range(1, alloc(64).unwrap(), 64)), (Err(1), Err(1)));
        assert_eq!((advise(at, MIB, 9, 0), advise(at, MIB, 3, 7)), (1, 101));
        ok(free(at));
        assert_eq!(managed(8 * MIB), at);
        assert_eq!(
            (range(1, at, page), range(2, at, MIB)),
            (Ok(0), Ok(-2)),
            "it went with the memory"
        );
    }

    pub fn batches_of_prefetches_and_discards() {
        retain(0);
        let (a, b) = (managed(MIB), managed(MIB));
        let (at, sizes) = ([a, b, a], [4096usize, 8192, MIB]);
        let places = [[1 as c_int, 0], [2, 0]];
        let batch = |indices: &[usize]| {
            cuda!(cuMemPrefetchBatchAsync(at.as_ptr() => *const u64, sizes.as_ptr() => *const usize,
                  2 => usize, places.as_ptr() => *const [c_int; 2],
                  indices.as_ptr() => *const usize, indices.len() => usize, 0 => u64,
                  NULL => Handle))
        };
        ok(batch(&[0, 1]));
        assert_eq!((range(4, a, 4096), range(4, b, 8192)), (Ok(0), Ok(-1)));
        assert_eq!((batch(&[1]), batch(&[0, 2]), batch(&[0, 0])), (1, 1, 1));
        ok(cuda!(cuMemDiscardBatchAsync(at.as_ptr() => *const u64, sizes.as_ptr() => *const usize,
                 3 => usize, 0 => u64, NULL => Handle)));
        ok(cuda!(cuMemDiscardAndPrefetchBatchAsync(at.as_ptr() => *const u64,
                 sizes.as_ptr() => *const usize, 3 => usize, places.as_ptr() => *const [c_int; 2],
                 [0usize].as_ptr() => *const usize, 1 => usize, 0 => u64, NULL => Handle)));
        assert_eq!(range(4, a, MIB), Ok(0));
        let device = [alloc(4096).unwrap()];
        let not_managed = cuda!(cuMemDiscardBatchAsync(device.as_ptr() => *const u64,
                                sizes.as_ptr() => *const usize, 1 => usize, 0 => u64, NULL => Handle));
        assert_eq!(not_managed, 1);
    }

    pub fn clusters_fit_on_the_gpu() {
        retain(0);
        let function = kernel("plain");
        let ask = |size: u32, threads: u32| {
            let mut attribute = [0u32; 18];
            (attribute[0], attribute[2], attribute[3], attribute[4]) = (4, size, 1, 1);
            let config: [u64; 7] = [
                1 | 1 << 32,
                1 | u64::from(threads) << 32,
                1 | 1 << 32,
                0,
                0,
                attribute.as_ptr() as u64,
                1,
            ];
            let (mut clusters, mut most): (c_int, c_int) = (-1, -1);
            let result = cuda!(cuOccupancyMaxActiveClusters(&raw mut clusters => *mut c_int,
                               function => Handle, config.as_ptr() => *const u64));
            ok(cuda!(cuOccupancyMaxPotentialClusterSize(&raw mut most => *mut c_int,
                     function => Handle, config.as_ptr() => *const u64)));
            (result, clusters, most)
        };
        // Two blocks of 1024 threads on each of 132: 8 groups of 16, and 4.
        assert_eq!(ask(8, 1024), (0, 8 * 4 + 1, 8));
        assert_eq!(ask(2, 1024).1, 132);
        assert_eq!(ask(16, 1024).0, 912, "not portable");
        ok(cuda!(cuFuncSetAttribute(function => Handle, 14 => c_int, 1 => c_int)));
        assert_eq!(ask(16, 1024), (0, 8 * 2, 16));
    }

    pub fn tensor_maps_are_checked() {
        #[repr(align(64))]
        #[derive(Clone, Copy, PartialEq, Debug)]
        struct Map([u64; 16]);
        retain(0);
        let at = alloc(MIB).unwrap();
        let encode =
            |map: &mut Map, address: u64, rank: u32, box_0: u32, swizzle: u32, step: u32| {
                cuda!(cuTensorMapEncodeTiled(&raw mut *map => *mut Map, 6 => c_uint, rank => c_uint,
                  address => u64, [256u64, 64, 1, 1, 1].as_ptr() => *const u64,
                  [512u64, 512, 512, 512].as_ptr() => *const u64,
                  [box_0, 16, 1, 1, 1].as_ptr() => *const u32,
                  [1, step, 1, 1, 1].as_ptr() => *const u32, 0 => c_uint, swizzle => c_uint,
                  0 => c_uint, 0 => c_uint))
            };
        let mut map = Map([0; 16]);
        ok(encode(&mut map, at, 2, 64, 3, 1));
        let before = map;
        assert_eq!(encode(&mut map, at + 8, 2, 64, 3, 1), 1, "not aligned");
        assert_eq!(encode(&mut map, at, 0, 64, 3, 1), 1, "no rank");
        assert_eq!(encode(&mut map, at, 6, 64, 3, 1), 1, "rank 6");
        assert_eq!(encode(&mut map, at, 2, 65, 0, 1), 1, "no multiple of 16 bytes");
        assert_eq!(encode(&mut map, at, 2, 128, 3, 1), 1, "beyond the swizzle");
        assert_eq!(encode(&mut map, at, 2, 64, 3, 9), 1, "too far a step");
        assert_eq!(map, before, "a refusal writes nothing");
        ok(cuda!(cuTensorMapReplaceAddress(&raw mut map => *mut Map, at + 4096 => u64)));
        let mut moved = Map([0; 16]);
        ok(encode(&mut moved, at + 4096, 2, 64, 3, 1));
        assert_eq!(map, moved);
        let im2col = |lower: [c_int; 2]| {
            let mut map = Map([0; 16]);
            cuda!(cuTensorMapEncodeIm2col(&raw mut map => *mut Map, 6 => c_uint, 4 => c_uint,
                  at => u64, [64u64, 32, 32, 2].as_ptr() => *const u64,
                  [128u64, 4096, 131_072].as_ptr() => *const u64, lower.as_ptr() => *const c_int,
                  [1 as c_int, 1].as_ptr() => *const c_int, 64 => c_uint, 128 => c_uint,
                  [1u32; 4].as_ptr() => *const u32, 0 => c_uint, 3 => c_uint, 0 => c_uint, 0 => c_uint))
        };
        assert_eq!((im2col([-1, -1]), im2col([-129, 0])), (0, 1));
        let wide = cuda!(cuTensorMapEncodeIm2colWide(&raw mut map => *mut Map, 6 => c_uint,
                         4 => c_uint, at => u64, [64u64, 32, 32, 2].as_ptr() => *const u64,
                         [128u64, 4096, 131_072].as_ptr() => *const u64, 0 => c_int, 0 => c_int,
                         64 => c_uint, 128 => c_uint, [1u32; 4].as_ptr() => *const u32, 0 => c_uint,
                         0 => c_uint, 3 => c_uint, 0 => c_uint, 0 => c_uint));
        assert_eq!(wide, 801, "compute capability 10.0");
    }

    pub fn the_profiler_starts_and_stops() {
        ok(cuda!(cuInit(0 => c_uint)));
        assert_eq!((cuda!(cuProfilerStart()), cuda!(cuProfilerStop())), (201, 201));
        retain(0);
        assert_eq!((cuda!(cuProfilerStart()), cuda!(cuProfilerStop())), (0, 0));
    }

    pub fn failed_calls_are_logged() {
        retain(0);
        let mut from = 0u32;
        ok(cuda!(cuLogsCurrent(&raw mut from => *mut u32, 0 => c_uint)));
        let mut registered = NULL;
        type Logged = unsafe extern "C" fn(*mut c_void, c_int, *mut c_char, usize);
        ok(cuda!(cuLogsRegisterCallback(logged => Logged, 5 as Handle => Handle,
                 &raw mut registered => *mut Handle)));
        assert_eq!((free(0x1234), alloc(1 << 45).err()), (1, Some(2)));
        assert_eq!(LOGGED.load(Ordering::Relaxed), 2);
        let read = |from: &mut u32, room: usize| {
            let (mut text, mut size) = (vec![0u8; 30_000], room);
            let result = cuda!(cuLogsDumpToMemory(&raw mut *from => *mut u32,
                               text.as_mut_ptr() => *mut u8, &raw mut size => *mut usize, 0 => c_uint));
            text.truncate(size);
            (result, String::from_utf8(text).unwrap())
        };
        let mut again = from;
        let (_, text) = read(&mut from, 30_000);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(
            text.contains("CUDA_ERROR_OUT_OF_MEMORY") && text.contains("cuMemAlloc_v2"),
            "{text}"
        );
        assert_eq!(read(&mut from, 30_000), (0, String::new()), "the iterator moved");
        let (result, last) = read(&mut again, 130);
        assert!(
            result == 0 && last.contains("cuMemAlloc_v2") && !last.contains("cuMemFree"),
            "{last}"
        );
        ok(cuda!(cuLogsUnregisterCallback(registered => Handle)));
        for _ in 0..1000 {
            assert_eq!(free(0x1234), 1);
        }
        assert_eq!(LOGGED.load(Ordering::Relaxed), 2);
        let (_, all) = read(&mut 0, 30_000);
        assert!(all.len() <= 25_600 + 100 && all.starts_with("[CUDA][W]"), "{}", all.len());
    }
}
