//! Copies and fills in all their forms: CUDA Driver API, "Memory Management".

use crate::harness::*;
use std::ffi::{c_int, c_uint};
use tessera_cuda::types::CUDA_MEMCPY2D_v1;

scenarios! {
    batches_copy_and_say_which_copy_failed
    batches_are_not_for_the_legacy_stream_or_a_capture
    copies_with_attributes_are_copies
    operands_may_be_arrays
    the_forms_of_cuda_2_work_below_4_gib
}

/// `CUmemcpyAttributes`: the order, two hints, flags.
type Attributes = [c_int; 6];
const STREAM_ORDER: Attributes = [1, 0, 0, 0, 0, 0];

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
struct Operation {
    src: Operand,
    dst: Operand,
    extent: [usize; 3],
    order: c_int,
    flags: c_uint,
}
#[repr(C)]
struct Operand {
    kind: c_int,
    op: [u64; 4],
}

fn pointer(at: u64, row: u64) -> Operand {
    Operand { kind: 1, op: [at, row, 0, 0] }
}

mod body {
    use super::*;

    fn fill(at: u64, value: u8, count: usize) {
        ok(cuda!(cuMemsetD8_v2(at, value, count)));
    }

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

    pub fn batches_copy_and_say_which_copy_failed() {
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
    pub fn batches_are_not_for_the_legacy_stream_or_a_capture() {
        retain(0);
        let (s, a, mut graph) = (new_stream(), alloc(64).unwrap(), NULL);
        assert_eq!(batch(&mut [(a, a + 8, 4)], NULL).0, 1);
        assert_eq!(batch(&mut [(a, a + 8, 4)], 2 as Handle).0, 0);
        ok(cuda!(cuStreamBeginCapture_v2(s, 2)));
        assert_eq!(batch(&mut [(a, a + 8, 4)], s).0, 900);
        assert_eq!(cuda!(cuStreamEndCapture(s, &raw mut graph)), 901);
    }

    pub fn copies_with_attributes_are_copies() {
        retain(0);
        let (s, a, b) = (new_stream(), alloc(64).unwrap(), alloc(64).unwrap());
        fill(a, 3, 64);
        fill(b, 0, 64);
        let copy = |mut attributes: Attributes| {
            cuda!(cuMemcpyWithAttributesAsync(b, a, 4, attributes.as_mut_ptr().cast(), s))
        };
        assert_eq!(copy([0; 6]), 1, "no order");
        ok(copy(STREAM_ORDER));
        // Two rows of three bytes, eight apart on one side, packed on the other.
        let mut op = Operation {
            src: pointer(a, 8),
            dst: pointer(b + 16, 0),
            extent: [3, 2, 1],
            order: 1,
            flags: 0,
        };
        ok(cuda!(cuMemcpy3DWithAttributesAsync((&raw mut op).cast(), 0, s)));
        synchronize(s);
        assert_eq!(read::<5>(b), [3, 3, 3, 3, 0]);
        assert_eq!(read::<7>(b + 16), [3, 3, 3, 3, 3, 3, 0]);
    }

    pub fn operands_may_be_arrays() {
        retain(0);
        // CUDA_ARRAY_DESCRIPTOR: 8 by 4 of one 32-bit number.
        let (mut array, descriptor) = (NULL, [8usize, 4, 3 | 1 << 32]);
        ok(cuda!(cuArrayCreate_v2(&raw mut array, descriptor.as_ptr().cast())));
        let (s, a) = (new_stream(), alloc(256).unwrap());
        fill(a, 5, 256);
        let of_array = |x: u64, y: u64| Operand { kind: 2, op: [array as u64, x, y, 0] };
        let op =
            |src, dst, width| Operation { src, dst, extent: [width, 1, 1], order: 1, flags: 0 };
        let mut ops = [op(pointer(a, 0), of_array(2, 1), 3)];
        let run = |ops: &mut [Operation]| {
            cuda!(cuMemcpy3DBatchAsync_v2(ops.len(), ops.as_mut_ptr().cast(), 0, s))
        };
        ok(run(&mut ops));
        fill(a, 0, 256);
        ok(run(&mut [op(of_array(3, 1), pointer(a, 0), 2)]));
        synchronize(s);
        assert_eq!(read::<9>(a), [5, 5, 5, 5, 5, 5, 5, 5, 0], "two elements of four bytes");
        assert_eq!(run(&mut [op(of_array(7, 1), pointer(a, 0), 2)]), 1, "past the row");
    }

    pub fn the_forms_of_cuda_2_work_below_4_gib() {
        retain(0);
        let at = must(|to| cuda!(cuMemAlloc(to, 256)));
        ok(cuda!(cuMemsetD8(at, 7, 64)));
        ok(cuda!(cuMemsetD16(at + 8, 0x0102, 1)));
        ok(cuda!(cuMemsetD2D32(at + 128, 8, 9, 1, 2)));
        ok(cuda!(cuMemcpyDtoD(at + 64, at, 12)));
        assert_eq!(read::<12>(u64::from(at) + 64), [7, 7, 7, 7, 7, 7, 7, 7, 2, 1, 7, 7]);
        assert_eq!(read::<12>(u64::from(at) + 128)[8..], [9, 0, 0, 0]);
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut copy: CUDA_MEMCPY2D_v1 = unsafe { std::mem::zeroed() };
        (copy.srcMemoryType, copy.srcDevice, copy.srcPitch) = (2, at, 4);
        (copy.dstMemoryType, copy.dstDevice, copy.dstPitch) = (2, at + 192, 8);
        (copy.WidthInBytes, copy.Height) = (4, 2);
        ok(cuda!(cuMemcpy2D(&raw const copy)));
        assert_eq!(read::<12>(u64::from(at) + 192), [7, 7, 7, 7, 0, 0, 0, 0, 7, 7, 7, 7]);
    }
}
