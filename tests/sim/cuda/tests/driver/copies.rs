//! Batches of copies, and arrays: CUDA Driver API, "Memory Management" (the comments of cuda.h at `cuArray3DCreate`,
//! `cuMipmappedArrayCreate` and `cuMemcpy3D`). `tests/gpu/probes/driver.py` shows that an array takes what a deferred one needs.

use crate::harness::*;
use std::ffi::{c_int, c_uint};
use tessera_cuda::types::{CUDA_ARRAY3D_DESCRIPTOR as Descriptor, CUDA_MEMCPY2D};

/// `CUmemcpyAttributes`: the order, two hints, flags.
const STREAM_ORDER: [c_int; 6] = [1, 0, 0, 0, 0, 0];

fn batch(copies: &mut [(u64, u64, usize)], stream: Handle) -> (Result, usize) {
    let mut dsts: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
    let mut srcs: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
    let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
    let (mut attributes, mut first, mut failed) = (STREAM_ORDER, 0usize, 77usize);
    let result = cuda!(cuMemcpyBatchAsync(
        dsts.as_mut_ptr(),
        srcs.as_mut_ptr(),
        sizes.as_mut_ptr(),
        copies.len(),
        attributes.as_mut_ptr().cast(),
        &raw mut first,
        1,
        &raw mut failed,
        stream
    ));
    (result, failed)
}

const FLOAT: c_int = 0x20;
const BYTE: c_int = 1;

fn floats([width, height, depth]: [usize; 3]) -> Descriptor {
    Descriptor {
        Width: width,
        Height: height,
        Depth: depth,
        Format: FLOAT,
        NumChannels: 1,
        Flags: 0,
    }
}

fn create(d: Descriptor) -> Outcome<Handle> {
    made(|to| cuda!(cuArray3DCreate_v2(to, &raw const d)))
}

fn mipmap(d: Descriptor, levels: c_uint) -> Outcome<Handle> {
    made(|to| cuda!(cuMipmappedArrayCreate(to, &raw const d, levels)))
}

fn destroy(array: Handle) -> Result {
    cuda!(cuArrayDestroy(array))
}

fn destroy_mipmap(array: Handle) -> Result {
    cuda!(cuMipmappedArrayDestroy(array))
}

fn level(mipmap: Handle, n: c_uint) -> Outcome<Handle> {
    made(|to| cuda!(cuMipmappedArrayGetLevel(to, mipmap, n)))
}

// SAFETY: numbers and pointers, for which zero is a value.
const NONE: CUDA_MEMCPY2D = unsafe { std::mem::zeroed() };

/// Copies a part of an array, from row `y` on, to device memory with rows of 64 bytes.
fn down(array: Handle, (x, y): (usize, usize), at: u64, (width, rows): (usize, usize)) {
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: x,
        srcY: y,
        srcMemoryType: 3,
        srcArray: array,
        dstMemoryType: 2,
        dstDevice: at,
        dstPitch: 64,
        WidthInBytes: width,
        Height: rows,
        ..NONE
    };
    ok(cuda!(cuMemcpy2D_v2(&raw const copy)));
}

/// Copies tightly packed rows of the host into an array.
fn up(from: &[u8], array: Handle, width: usize) {
    let copy = CUDA_MEMCPY2D {
        srcMemoryType: 1,
        srcHost: from.as_ptr().cast(),
        dstMemoryType: 3,
        dstArray: array,
        WidthInBytes: width,
        Height: from.len() / width,
        ..NONE
    };
    ok(cuda!(cuMemcpy2D_v2(&raw const copy)));
}

scenarios! {
    fn batches_copy_and_say_which_copy_failed() {
        retain(0);
        let (s, a, b) = (new_stream(), alloc(64).unwrap(), alloc(64).unwrap());
        let mut host = [9u8; 8];
        let at = host.as_mut_ptr() as u64;
        fill(a, 1, 64);
        fill(b, 2, 64);
        assert_eq!(batch(&mut [(b, a, 4), (at, b + 32, 4), (a + 8, at + 4, 4)], s).0, 0);
        synchronize(s);
        assert_eq!(read::<8>(b), [1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(host, [2, 2, 2, 2, 9, 9, 9, 9]);
        assert_eq!(read::<12>(a), [1, 1, 1, 1, 1, 1, 1, 1, 9, 9, 9, 9]);
        assert_eq!(batch(&mut [(b, a, 4), (b, a, 4), (0, a, 4)], s), (1, 2));
        assert_eq!(batch(&mut [], s), (1, usize::MAX), "no copy in particular");
    }

    /// "Must not be legacy NULL stream."
    fn batches_are_not_for_the_legacy_stream_or_a_capture() {
        retain(0);
        let (s, a, mut graph) = (new_stream(), alloc(64).unwrap(), NULL);
        assert_eq!(batch(&mut [(a, a + 8, 4)], NULL).0, 1);
        assert_eq!(batch(&mut [(a, a + 8, 4)], 2 as Handle).0, 0);
        ok(cuda!(cuStreamBeginCapture_v2(s, 2)));
        assert_eq!(batch(&mut [(a, a + 8, 4)], s).0, 900);
        assert_eq!(cuda!(cuStreamEndCapture(s, &raw mut graph)), 901);
    }

    fn copies_to_arrays_are_real() {
        retain(0);
        let array = create(Descriptor { Format: BYTE, ..floats([100, 40, 0]) }).unwrap();
        let there: Vec<u8> = (0..=250u8).cycle().take(4000).collect();
        up(&there, array, 100);
        let at = alloc(4000).unwrap();
        down(array, (10, 5), at, (20, 3));
        let rows = read::<192>(at);
        for y in 0..3 {
            assert_eq!(rows[y * 64..y * 64 + 20], there[(y + 5) * 100 + 10..][..20]);
        }
    }

    /// "the range [1, 1 + floor(log2(max(width, height, depth)))]" (`cuMipmappedArrayCreate`).
    fn a_mipmapped_array_owns_its_levels() {
        retain(0);
        let room = free_bytes();
        let whole = mipmap(floats([1000, 600, 0]), 99).unwrap();
        let first = level(whole, 0).unwrap();
        level(whole, 9).unwrap();
        assert_eq!((level(whole, 10), destroy(first)), (Err(1), 1));
        assert_eq!(level(whole, 0), Ok(first));
        let at = alloc(64).unwrap();
        for n in 0..10u8 {
            up(&[n; 4], level(whole, n.into()).unwrap(), 4);
        }
        for n in 0..10u8 {
            down(level(whole, n.into()).unwrap(), (0, 0), at, (4, 1));
            assert_eq!(read::<4>(at), [n; 4], "levels do not overlap");
        }
        ok(destroy_mipmap(whole));
        ok(free(at));
        assert_eq!((destroy_mipmap(whole), destroy(first)), (400, 400));
        assert_eq!(free_bytes(), room);
    }
}
