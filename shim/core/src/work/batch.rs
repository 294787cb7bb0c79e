//! Batches of copies between addresses, whose arguments do not fit in registers.

use super::direction::{Transfer, sample};
use super::{LONG, memory_type};
use crate::gate::{self, Pass, Stream};
use crate::state;
use crate::thread::{Answer, Call};
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
    /// Whether some copy of it stays on the GPU, by a sample of them.
    unsafe fn is_on_device(
        &self,
        mut memory_type: impl FnMut(CUdeviceptr) -> CUmemorytype,
    ) -> bool {
        !self.dsts.is_null()
            && !self.srcs.is_null()
            && sample(self.count).any(|i| {
                // SAFETY: below `count`; the caller promises `count` addresses in each.
                let ends = unsafe {
                    [ptr::read_unaligned(self.dsts.add(i)), ptr::read_unaligned(self.srcs.add(i))]
                };
                ends.is_on_device(&mut memory_type)
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
        if state::passes() || !unsafe { self.is_on_device(memory_type) } {
            // SAFETY: the caller's promise.
            if unsafe { self.may_be_long() } {
                gate::passing(self.stream);
            }
            return Ok(Pass::Free);
        }
        gate::admit_work(self.stream)
    }
}

/// A batch of copies of either version (CUDA Driver API, "Memory Management").
pub unsafe fn batch(
    call: Call<'_>,
    dsts: *const CUdeviceptr,
    srcs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    stream: Stream,
) -> Answer {
    // SAFETY: the caller's own arguments.
    let _pass = unsafe { Batch { dsts, srcs, sizes, count, stream }.admit() }?;
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pinned pool on the host, and caches on the device.
    fn asked(dsts: &[CUdeviceptr], srcs: &[CUdeviceptr]) -> (bool, usize) {
        const DEVICE: CUdeviceptr = 1 << 40;
        let sizes = vec![LONG; dsts.len()];
        let batch = Batch {
            dsts: dsts.as_ptr(),
            srcs: srcs.as_ptr(),
            sizes: sizes.as_ptr(),
            count: dsts.len(),
            stream: Stream::new(ptr::null_mut(), false),
        };
        let mut questions = 0;
        let memory_type = |at: CUdeviceptr| {
            questions += 1;
            if at < DEVICE { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE }
        };
        // SAFETY: as many of each as `count` says.
        (unsafe { batch.is_on_device(memory_type) }, questions)
    }

    #[test]
    fn a_batch_of_8192_costs_a_few_questions_in_either_direction() {
        for count in [1, 2, 17, 8192] {
            let host: Vec<CUdeviceptr> = (0..count).map(|i| i << 16).collect();
            let device: Vec<CUdeviceptr> = (0..count).map(|i| (1 << 40) + (i << 16)).collect();
            for (dsts, srcs) in [(&device, &host), (&host, &device)] {
                let (on_device, questions) = asked(dsts, srcs);
                assert!(!on_device && questions <= 32, "{count}: {questions}");
            }
            assert_eq!(asked(&device, &device), (true, 2), "{count}");
        }
        assert_eq!(asked(&[], &[]), (false, 0));
    }

    #[test]
    fn a_batch_whose_end_or_every_second_copy_stays_on_the_gpu_is_seen() {
        let host: Vec<CUdeviceptr> = (0..8192).map(|i| i << 16).collect();
        let device: Vec<CUdeviceptr> = host.iter().map(|at| at + (1 << 40)).collect();
        let mut last = host.clone();
        last[8191] = device[8191];
        assert!(asked(&device, &last).0);
        let mixed: Vec<_> =
            (0..8192).map(|i| if i % 2 == 0 { host[i] } else { device[i] }).collect();
        assert!(asked(&device, &mixed).0);
    }
}
