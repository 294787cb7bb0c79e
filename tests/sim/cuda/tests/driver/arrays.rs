//! Arrays against CUDA's documentation: CUDA Driver API, "Memory Management" (the comments of
//! cuda.h at `cuArray3DCreate`, `cuMipmappedArrayCreate`, `cuArrayGetMemoryRequirements` and
//! `cuMemcpy3D`).

use crate::harness::*;
use std::ffi::{c_int, c_uint};
use tessera_cuda::types::CUDA_MEMCPY2D;

scenarios! {
    arrays_take_memory_and_give_it_back
    only_deferred_arrays_tell_their_size
    the_size_reported_is_the_size_taken
    copies_to_arrays_are_real
    a_mipmapped_array_owns_its_levels
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Descriptor {
    extent: [usize; 3],
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

const FLOAT: c_int = 0x20;
const BYTE: c_int = 1;
const DEFERRED: c_uint = 0x80;

fn floats(extent: [usize; 3]) -> Descriptor {
    Descriptor { extent, format: FLOAT, channels: 1, flags: 0 }
}

fn create(d: Descriptor) -> Outcome<Handle> {
    made(|to| cuda!(cuArray3DCreate_v2(to, (&raw const d).cast())))
}

fn mipmap(d: Descriptor, levels: c_uint) -> Outcome<Handle> {
    made(|to| cuda!(cuMipmappedArrayCreate(to, (&raw const d).cast(), levels)))
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

/// Size and alignment.
fn needs(array: Handle) -> Outcome<[usize; 2]> {
    let mut answer = [0usize; 4];
    match cuda!(cuArrayGetMemoryRequirements(answer.as_mut_ptr().cast(), array, 0)) {
        0 => Ok([answer[0], answer[1]]),
        e => Err(e),
    }
}

// SAFETY: numbers and pointers, for which zero is a value.
const NONE: CUDA_MEMCPY2D = unsafe { std::mem::zeroed() };

mod body {
    use super::*;

    pub fn arrays_take_memory_and_give_it_back() {
        retain(0);
        let room = free_bytes();
        let big = create(floats([4096, 4096, 0])).unwrap();
        assert_eq!(room - free_bytes(), 64 * MIB);
        let small: Vec<Handle> = (0..10).map(|_| create(floats([16, 16, 0])).unwrap()).collect();
        assert_eq!(room - free_bytes(), 66 * MIB, "small arrays share a chunk");
        let cube = create(Descriptor { flags: 4, ..floats([256, 256, 6]) }).unwrap();
        let layers = create(Descriptor { flags: 1, ..floats([1000, 0, 7]) }).unwrap();
        let solid = create(floats([128, 128, 128])).unwrap();
        for array in small.into_iter().chain([big, cube, layers, solid]) {
            ok(destroy(array));
        }
        assert_eq!((free_bytes(), destroy(big)), (room, 400));
        assert_eq!(create(floats([16_384, 16_384, 16_384])), Err(2));
        assert_eq!(free_bytes(), room);
    }

    /// "If the CUDA array is not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING
    /// CUDA_ERROR_INVALID_VALUE will be returned." (`cuArrayGetMemoryRequirements`).
    pub fn only_deferred_arrays_tell_their_size() {
        retain(0);
        let room = free_bytes();
        let plain = create(floats([64, 64, 0])).unwrap();
        assert_eq!(needs(plain), Err(1));
        ok(destroy(plain));
        let deferred = create(Descriptor { flags: DEFERRED, ..floats([4096, 4096, 0]) }).unwrap();
        assert_eq!(free_bytes(), room, "no memory of its own");
        assert_eq!(needs(deferred), Ok([64 * MIB, 64 << 10]));
        let copy = cuda!(cuMemcpyDtoA_v2(deferred, 0, alloc(4).unwrap(), 4));
        assert_eq!(copy, 1, "nothing to copy to");
        ok(destroy(deferred));
    }

    /// What `cuArrayGetMemoryRequirements` reports is what an array of that shape takes.
    pub fn the_size_reported_is_the_size_taken() {
        retain(0);
        let room = free_bytes();
        for (d, levels) in [
            (floats([3000, 2000, 0]), 0),
            (Descriptor { channels: 4, ..floats([2000, 1000, 0]) }, 5),
            (Descriptor { format: 0x91, channels: 4, ..floats([4000, 4000, 0]) }, 12),
            (Descriptor { format: 0xb0, channels: 3, ..floats([4096, 2160, 0]) }, 0),
            (Descriptor { flags: 1, ..floats([600, 600, 20]) }, 3),
            (floats([200, 300, 100]), 0),
        ] {
            let twin = Descriptor { flags: d.flags | DEFERRED, ..d };
            let (size, taken) = if levels > 0 {
                let twin = mipmap(twin, levels).unwrap();
                let mut answer = [0usize; 4];
                ok(cuda!(cuMipmappedArrayGetMemoryRequirements(
                    answer.as_mut_ptr().cast(),
                    twin,
                    0
                )));
                ok(destroy_mipmap(twin));
                let array = mipmap(d, levels).unwrap();
                let taken = room - free_bytes();
                ok(destroy_mipmap(array));
                (answer[0], taken)
            } else {
                let twin = create(twin).unwrap();
                let size = needs(twin).unwrap()[0];
                ok(destroy(twin));
                let array = create(d).unwrap();
                let taken = room - free_bytes();
                ok(destroy(array));
                (size, taken)
            };
            assert_eq!(size % (64 << 10), 0);
            assert_eq!(taken, size.next_multiple_of(2 * MIB), "{d:?}");
        }
        assert_eq!(free_bytes(), room);
    }

    fn numbers(n: usize) -> Vec<u8> {
        (0..=250u8).cycle().take(n).collect()
    }

    pub fn copies_to_arrays_are_real() {
        retain(0);
        let array = create(Descriptor { format: BYTE, ..floats([100, 40, 0]) }).unwrap();
        let there = numbers(4000);
        // All of it, rows tightly packed on the host.
        let all = CUDA_MEMCPY2D {
            srcMemoryType: 1,
            srcHost: there.as_ptr().cast(),
            dstMemoryType: 3,
            dstArray: array,
            WidthInBytes: 100,
            Height: 40,
            ..NONE
        };
        ok(cuda!(cuMemcpy2D_v2(&raw const all)));
        // A part of it back, to device memory, at a pitch.
        let at = alloc(4000).unwrap();
        let part = CUDA_MEMCPY2D {
            srcXInBytes: 10,
            srcY: 5,
            srcMemoryType: 3,
            srcArray: array,
            dstMemoryType: 2,
            dstDevice: at,
            dstPitch: 64,
            WidthInBytes: 20,
            Height: 3,
            ..NONE
        };
        ok(cuda!(cuMemcpy2D_v2(&raw const part)));
        let rows = read::<192>(at);
        for y in 0..3 {
            assert_eq!(rows[y * 64..y * 64 + 20], there[(y + 5) * 100 + 10..][..20]);
        }
        // Array to array, and linear copies that cross rows.
        let other = create(Descriptor { format: BYTE, ..floats([100, 40, 0]) }).unwrap();
        ok(cuda!(cuMemcpyAtoA_v2(other, 150, array, 50, 1000)));
        ok(cuda!(cuMemcpyAtoD_v2(at + 1024, other, 150, 1000)));
        assert_eq!(read::<1000>(at + 1024)[..], there[50..1050]);
        ok(cuda!(cuMemcpyDtoA_v2(array, 0, at, 20)));
        ok(cuda!(cuMemcpyAtoD_v2(at + 512, array, 0, 20)));
        assert_eq!(read::<20>(at + 512)[..], rows[..20]);
    }

    /// "the range [1, 1 + floor(log2(max(width, height, depth)))]" (`cuMipmappedArrayCreate`).
    pub fn a_mipmapped_array_owns_its_levels() {
        retain(0);
        let room = free_bytes();
        let whole = mipmap(floats([1000, 600, 0]), 99).unwrap();
        let first = level(whole, 0).unwrap();
        level(whole, 9).unwrap();
        assert_eq!((level(whole, 10), destroy(first)), (Err(1), 1));
        assert_eq!(level(whole, 0), Ok(first));
        let at = alloc(64).unwrap();
        for n in 0..10 {
            let level = level(whole, n).unwrap();
            ok(cuda!(cuMemsetD32_v2(at, n, 1)));
            ok(cuda!(cuMemcpyDtoA_v2(level, 0, at, 4)));
        }
        for n in 0..10 {
            let level = level(whole, n).unwrap();
            ok(cuda!(cuMemcpyAtoD_v2(at, level, 0, 4)));
            assert_eq!(read::<4>(at), n.to_le_bytes(), "levels do not overlap");
        }
        ok(destroy_mipmap(whole));
        ok(free(at));
        assert_eq!((destroy_mipmap(whole), destroy(first)), (400, 400));
        assert_eq!(free_bytes(), room);
    }
}
