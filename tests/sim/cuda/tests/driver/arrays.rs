//! Arrays against CUDA's documentation: CUDA Driver API, "Memory Management" (the comments of
//! cuda.h at `cuArray3DCreate`, `cuMipmappedArrayCreate`, `cuArrayGetMemoryRequirements` and
//! `cuMemcpy3D`).

use crate::harness::*;
use std::ffi::{c_int, c_uint};

scenarios! {
    arrays_take_memory_and_give_it_back
    impossible_arrays_are_refused
    only_deferred_arrays_tell_their_size
    the_size_reported_is_the_size_taken
    copies_to_arrays_are_real
    copies_stay_inside_an_array
    a_mipmapped_array_owns_its_levels
    a_context_takes_its_arrays_with_it
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

type Outcome = std::result::Result<Handle, Result>;

fn create(d: Descriptor) -> Outcome {
    let mut array = NULL;
    match cuda!(cuArray3DCreate_v2(&raw mut array => *mut Handle, &raw const d => *const Descriptor))
    {
        0 => Ok(array),
        e => Err(e),
    }
}

fn mipmap(d: Descriptor, levels: c_uint) -> Outcome {
    let mut array = NULL;
    match cuda!(cuMipmappedArrayCreate(&raw mut array => *mut Handle,
                &raw const d => *const Descriptor, levels => c_uint))
    {
        0 => Ok(array),
        e => Err(e),
    }
}

fn destroy(array: Handle) -> Result {
    cuda!(cuArrayDestroy(array => Handle))
}

fn destroy_mipmap(array: Handle) -> Result {
    cuda!(cuMipmappedArrayDestroy(array => Handle))
}

fn level(mipmap: Handle, n: c_uint) -> Outcome {
    let mut array = NULL;
    match cuda!(cuMipmappedArrayGetLevel(&raw mut array => *mut Handle, mipmap => Handle,
                n => c_uint))
    {
        0 => Ok(array),
        e => Err(e),
    }
}

/// Size and alignment.
fn needs(array: Handle) -> std::result::Result<[usize; 2], Result> {
    let mut answer = [0usize; 4];
    match cuda!(cuArrayGetMemoryRequirements(answer.as_mut_ptr() => *mut usize, array => Handle,
                0 => c_int))
    {
        0 => Ok([answer[0], answer[1]]),
        e => Err(e),
    }
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Copy2d {
    src_x: usize,
    src_y: usize,
    src_kind: c_uint,
    src_host: usize,
    src_device: u64,
    src_array: usize,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_kind: c_uint,
    dst_host: usize,
    dst_device: u64,
    dst_array: usize,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

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

    /// The table of valid extents (`cuArray3DCreate`).
    pub fn impossible_arrays_are_refused() {
        retain(0);
        for d in [
            floats([0, 1, 1]),
            floats([131_073, 0, 0]),
            floats([8, 0, 8]),
            Descriptor { channels: 3, ..floats([8, 8, 0]) },
            Descriptor { channels: 0, ..floats([8, 8, 0]) },
            Descriptor { format: 0x77, ..floats([8, 8, 0]) },
            // "Width must be equal to Height, and Depth must be six".
            Descriptor { flags: 4, ..floats([8, 9, 6]) },
            Descriptor { flags: 4, ..floats([8, 8, 7]) },
        ] {
            assert_eq!(create(d), Err(1), "{d:?}");
            assert_eq!(mipmap(d, 2), Err(1), "{d:?}");
        }
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
        let copy = cuda!(cuMemcpyDtoA_v2(deferred => Handle, 0 => usize,
                         alloc(4).unwrap() => u64, 4 => usize));
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
                    answer.as_mut_ptr() => *mut usize, twin => Handle, 0 => c_int)));
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
        let all = Copy2d {
            src_kind: 1,
            src_host: there.as_ptr().addr(),
            dst_kind: 3,
            dst_array: array.addr(),
            width: 100,
            height: 40,
            ..Copy2d::default()
        };
        ok(cuda!(cuMemcpy2D_v2(&raw const all => *const Copy2d)));
        // A part of it back, to device memory, at a pitch.
        let at = alloc(4000).unwrap();
        let part = Copy2d {
            src_x: 10,
            src_y: 5,
            src_kind: 3,
            src_array: array.addr(),
            dst_kind: 2,
            dst_device: at,
            dst_pitch: 64,
            width: 20,
            height: 3,
            ..Copy2d::default()
        };
        ok(cuda!(cuMemcpy2D_v2(&raw const part => *const Copy2d)));
        let rows = read::<192>(at);
        for y in 0..3 {
            assert_eq!(rows[y * 64..y * 64 + 20], there[(y + 5) * 100 + 10..][..20]);
        }
        // Array to array, and linear copies that cross rows.
        let other = create(Descriptor { format: BYTE, ..floats([100, 40, 0]) }).unwrap();
        ok(cuda!(cuMemcpyAtoA_v2(other => Handle, 150 => usize, array => Handle, 50 => usize,
                 1000 => usize)));
        ok(cuda!(cuMemcpyAtoD_v2(at + 1024 => u64, other => Handle, 150 => usize, 1000 => usize)));
        assert_eq!(read::<1000>(at + 1024)[..], there[50..1050]);
        ok(cuda!(cuMemcpyDtoA_v2(array => Handle, 0 => usize, at => u64, 20 => usize)));
        ok(cuda!(cuMemcpyAtoD_v2(at + 512 => u64, array => Handle, 0 => usize, 20 => usize)));
        assert_eq!(read::<20>(at + 512)[..], rows[..20]);
    }

    pub fn copies_stay_inside_an_array() {
        retain(0);
        let array = create(Descriptor { format: BYTE, ..floats([100, 40, 0]) }).unwrap();
        let there = numbers(8000);
        for (dst_x, dst_y, width, height) in
            [(0, 0, 101, 1), (1, 0, 100, 1), (0, 1, 1, 40), (0, 40, 1, 1)]
        {
            let copy = Copy2d {
                src_kind: 1,
                src_host: there.as_ptr().addr(),
                dst_x,
                dst_y,
                dst_kind: 3,
                dst_array: array.addr(),
                width,
                height,
                ..Copy2d::default()
            };
            assert_eq!(cuda!(cuMemcpy2D_v2(&raw const copy => *const Copy2d)), 1);
        }
        let at = alloc(64).unwrap();
        let linear = |offset: usize, len: usize| cuda!(cuMemcpyDtoA_v2(array => Handle, offset => usize, at => u64, len => usize));
        assert_eq!((linear(3999, 1), linear(3999, 2), linear(4000, 1)), (0, 1, 1));
        let no_array = cuda!(cuMemcpyDtoA_v2(NULL => Handle, 0 => usize, at => u64, 1 => usize));
        assert_eq!(no_array, 400);
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
            ok(cuda!(cuMemsetD32_v2(at => u64, n => c_uint, 1 => usize)));
            ok(cuda!(cuMemcpyDtoA_v2(level => Handle, 0 => usize, at => u64, 4 => usize)));
        }
        for n in 0..10 {
            let level = level(whole, n).unwrap();
            ok(cuda!(cuMemcpyAtoD_v2(at => u64, level => Handle, 0 => usize, 4 => usize)));
            assert_eq!(read::<4>(at), n.to_le_bytes(), "levels do not overlap");
        }
        ok(destroy_mipmap(whole));
        ok(free(at));
        assert_eq!((destroy_mipmap(whole), destroy(first)), (400, 400));
        assert_eq!(free_bytes(), room);
    }

    pub fn a_context_takes_its_arrays_with_it() {
        retain(0);
        let room = free_bytes();
        let mut context = NULL;
        ok(cuda!(cuCtxCreate_v2(&raw mut context => *mut Handle, 0 => c_uint, 0 => c_int)));
        let array = create(floats([4096, 4096, 0])).unwrap();
        mipmap(floats([4096, 4096, 0]), 3).unwrap();
        ok(cuda!(cuCtxDestroy_v2(context => Handle)));
        assert_eq!((free_bytes(), destroy(array)), (room, 400));
    }
}
