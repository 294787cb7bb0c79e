//! What benches time: bare calls, without the waiting that makes `allocate` and `free` exact.

use tessera_cuda::types::CUdeviceptr;

use super::vmm;
use crate::cuda::{Cuda, Stream, check};
use crate::exit::CudaError;

/// Addresses of the process that nothing is mapped at between two cycles.
#[derive(Debug)]
pub struct Range {
    address: CUdeviceptr,
    size: usize,
}

impl Cuda {
    /// `cuMemAllocAsync` and `cuMemFreeAsync`, ordered on `stream` and not waited for.
    ///
    /// # Errors
    /// The driver's.
    pub fn async_pair(&self, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        let mut address = 0;
        // SAFETY: a live out-parameter; the address is freed once, in the order of its stream.
        unsafe {
            let allocate = self.driver().mem_alloc_async;
            check("cuMemAllocAsync", allocate(&raw mut address, bytes, stream.raw()))?;
            check("cuMemFreeAsync", (self.driver().mem_free_async)(address, stream.raw()))
        }
    }

    /// Addresses for [`Self::vmm_cycle`], of at least `bytes`.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` where it has no virtual memory management.
    pub fn reserve(&self, bytes: usize) -> Result<Range, CudaError> {
        let size = vmm::round_up(self, bytes)?;
        Ok(Range { address: vmm::reserve(self, size)?, size })
    }

    /// `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`, `cuMemUnmap`, `cuMemRelease`.
    ///
    /// # Errors
    /// The driver's.
    pub fn vmm_cycle(&self, range: &Range) -> Result<(), CudaError> {
        let handle = vmm::create(self, range.size)?;
        vmm::map_at(self, range.address, range.size, handle)?;
        vmm::unmap_at(self, range.address, range.size)?;
        vmm::release(self, handle)
    }
}
