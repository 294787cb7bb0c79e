//! Batches of copies between addresses, whose arguments do not fit in registers.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]
#![allow(clippy::too_many_arguments, reason = "the driver's signatures")]

use super::direction::Transfer;
use super::{LONG, memory_type};
use crate::gate::{self, Pass, Stream};
use crate::real::Real;
use crate::state;
use core::ptr;
use tessera_cuda::types::*;

/// As the driver gives a batch.
struct Batch {
    dsts: *const CUdeviceptr,
    srcs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    stream: Stream,
}

impl Batch {
    /// Whether some copy of it stays on the GPU.
    unsafe fn is_on_device(&self) -> bool {
        !self.dsts.is_null()
            && !self.srcs.is_null()
            && (0..self.count).any(|i| {
                // SAFETY: the caller promises `count` addresses in each.
                let ends = unsafe {
                    [ptr::read_unaligned(self.dsts.add(i)), ptr::read_unaligned(self.srcs.add(i))]
                };
                ends.is_on_device(memory_type)
            })
    }

    /// Whether some copy of it may take long.
    unsafe fn may_be_long(&self) -> bool {
        !self.sizes.is_null()
            // SAFETY: the caller promises `count` sizes.
            && (0..self.count).any(|i| unsafe { ptr::read_unaligned(self.sizes.add(i)) } >= LONG)
    }

    /// Waits until the gate lets it pass.
    #[inline(never)]
    unsafe fn admit(&self) -> Result<Pass, CUresult> {
        // SAFETY: the caller's promise.
        if !unsafe { self.may_be_long() }
            && let Some(busy) = gate::admit_at_once(self.stream, false)
        {
            return Ok(Pass::Flag(busy));
        }
        // SAFETY: the caller's promise.
        if state::passes() || !unsafe { self.is_on_device() } {
            return Ok(Pass::Free);
        }
        gate::admit_work(self.stream)
    }
}

macro_rules! batches {
    ($($name:ident ($dsts:ident: $at:ty, $srcs:ident: $from:ty, $sizes:ident: $size:ty, $count:ident: usize
        $(, $arg:ident: $ty:ty)*; $stream:ident: CUstream);)+) => {
        $(
            /// CUDA Driver API, "Memory Management".
            ///
            /// # Safety
            /// As the driver's.
            pub unsafe fn $name(
                real: &Real<
                    unsafe extern "C" fn($at, $from, $size, usize $(, $ty)*, CUstream) -> CUresult,
                >,
                $dsts: $at,
                $srcs: $from,
                $sizes: $size,
                $count: usize,
                $($arg: $ty,)*
                $stream: CUstream,
            ) -> CUresult {
                let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
                let stream = Stream::new($stream, real.symbol().work.per_thread);
                let batch = Batch { dsts: $dsts, srcs: $srcs, sizes: $sizes, count: $count, stream };
                // SAFETY: the caller's own arguments.
                match unsafe { batch.admit() } {
                    // SAFETY: as above.
                    Ok(_pass) => unsafe { function($dsts, $srcs, $sizes, $count $(, $arg)*, $stream) },
                    Err(refusal) => refusal,
                }
            }
        )+
    };
}

batches! {
    cuMemcpyBatchAsync(
        dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
        attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize,
        failed: *mut usize; stream: CUstream
    );
    cuMemcpyBatchAsync_v2(
        dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
        attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize;
        stream: CUstream
    );
}
