//! What benches time: bare calls, without the waiting that makes `allocate` and `free` exact.

use tessera_cuda::types::{CUDA_ERROR_NOT_FOUND, CUdeviceptr};

use crate::cuda::{Cuda, Stream, check};
use crate::exit::CudaError;

/// Copies to the device by one call, as vLLM's offloading of its cache makes them: many pieces, each of which may be
/// any memory.
#[derive(Debug)]
pub struct Offload {
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    sizes: Vec<usize>,
    _host: Box<[u8]>,
}

impl Cuda {
    /// So many copies, the first of 64 KiB, the others small: the call is timed, not the copying.
    ///
    /// # Errors
    /// The driver's.
    pub fn offload(&self, copies: usize) -> Result<Offload, CudaError> {
        const FIRST: usize = 64 << 10;
        const OTHER: usize = 64;
        let bytes = FIRST + copies * OTHER;
        let mut device = 0;
        // SAFETY: a valid place for an address, which lives as long as the context.
        check("cuMemAlloc", unsafe { (self.driver().mem_alloc)(&raw mut device, bytes) })?;
        let host = vec![0u8; bytes].into_boxed_slice();
        let places =
            |base: CUdeviceptr| (0..copies).map(move |at| base + (FIRST + at * OTHER) as u64);
        let (mut to, mut from): (Vec<_>, Vec<_>) =
            (places(device).collect(), places(host.as_ptr() as u64).collect());
        let mut sizes = vec![OTHER; copies];
        (to[0], from[0], sizes[0]) = (device, host.as_ptr() as u64, FIRST);
        Ok(Offload { to, from, sizes, _host: host })
    }

    /// Makes them by one `cuMemcpyBatchAsync`, not waited for.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` before CUDA 13.
    pub fn copy_batch(&self, offload: &mut Offload, stream: Stream) -> Result<(), CudaError> {
        /// `CUmemcpyAttributes` of all of them: `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`, no hints, no flags.
        const ATTRIBUTES: [i32; 6] = [1, 0, 0, 0, 0, 0];
        let (mut attributes, mut first) = (ATTRIBUTES, 0);
        let Some(copy) = self.driver().copy_batch else {
            return check("cuMemcpyBatchAsync", CUDA_ERROR_NOT_FOUND);
        };
        let Offload { to, from, sizes, .. } = offload;
        // SAFETY: arrays of as many entries as the call is told; both ends live until the stream is synchronised.
        check("cuMemcpyBatchAsync", unsafe {
            let (to, from, sizes) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr());
            let count = offload.to.len();
            copy(
                to,
                from,
                sizes,
                count,
                attributes.as_mut_ptr().cast(),
                &raw mut first,
                1,
                stream.raw(),
            )
        })
    }

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
}
