//! Plain, pitched and managed memory, and copies to and from any address.

use std::ffi::c_uint;

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, Stream, made};
use crate::driver::call;
use crate::exit::CudaError;

/// `CU_MEM_ATTACH_GLOBAL`.
const ATTACH_GLOBAL: c_uint = 1;
/// What rows are rounded up to on every GPU so far, and to a multiple of 512 by contract.
const PITCH: usize = 1024;
/// Pages of the driver; what is larger than half of one takes whole ones.
const PAGE: usize = 2 << 20;

pub fn plain(cuda: &Cuda, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(cuda.driver, mem_alloc(at, bytes)) })
}

pub fn managed(cuda: &Cuda, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(cuda.driver, mem_alloc_managed(at, bytes, ATTACH_GLOBAL)) })
}

/// The address, and the bytes of all rows with their padding.
pub fn pitched(cuda: &Cuda, bytes: usize) -> Result<(CUdeviceptr, u64), CudaError> {
    // Rows that no pitch is equal to. From a page on, some rows less than fit, so that the size is
    // odd and the pages behind it are still those of `bytes`.
    let width = bytes.min(PITCH - 24);
    let rows = bytes / PITCH;
    let height = if bytes >= PAGE { rows - 7 } else { rows.max(1) };
    let (mut address, mut pitch) = (0, 0);
    // SAFETY: live out-parameters.
    unsafe {
        call!(cuda.driver, mem_alloc_pitch(&raw mut address, &raw mut pitch, width, height, 4))
    }?;
    Ok((address, pitch as u64 * height as u64))
}

pub fn free(cuda: &Cuda, address: CUdeviceptr) -> Result<(), CudaError> {
    // SAFETY: made by this module and freed once by its owner.
    unsafe { call!(cuda.driver, mem_free(address)) }
}

pub fn write(cuda: &Cuda, to: CUdeviceptr, data: &[u8]) -> Result<(), CudaError> {
    // SAFETY: source and length are a live slice's; the driver checks the destination.
    unsafe { call!(cuda.driver, copy_to_device(to, data.as_ptr().cast(), data.len())) }
}

pub fn read(cuda: &Cuda, from: CUdeviceptr, data: &mut [u8]) -> Result<(), CudaError> {
    // SAFETY: destination and length are a live, exclusive slice's.
    unsafe { call!(cuda.driver, copy_to_host(data.as_mut_ptr().cast(), from, data.len())) }
}

// === what benches time: bare calls, without the waiting that makes `allocate` and `free` exact ===

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
    pub fn offload(&self, copies: usize) -> Result<Offload, CudaError> {
        const FIRST: usize = 64 << 10;
        const OTHER: usize = 64;
        let bytes = FIRST + copies * OTHER;
        let device = plain(self, bytes)?;
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
    pub fn copy_batch(&self, offload: &mut Offload, stream: Stream) -> Result<(), CudaError> {
        /// `CUmemcpyAttributes` of all of them: `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`, no hints, no flags.
        const ATTRIBUTES: [i32; 6] = [1, 0, 0, 0, 0, 0];
        let (mut attributes, mut first) = (ATTRIBUTES, 0);
        let Offload { to, from, sizes, .. } = offload;
        // SAFETY: arrays of as many entries as the call is told; both ends live until the stream is synchronised.
        unsafe {
            let (count, attributes) = (to.len(), attributes.as_mut_ptr().cast());
            let (to, from, sizes) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr());
            let first = &raw mut first;
            call!(self.driver, copy_batch(to, from, sizes, count, attributes, first, 1, stream.0))
        }
    }

    /// `cuMemAllocAsync` and `cuMemFreeAsync`, ordered on `stream` and not waited for.
    pub fn async_pair(&self, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        let mut address = 0;
        // SAFETY: a live out-parameter; the address is freed once, in the order of its stream.
        unsafe {
            call!(self.driver, mem_alloc_async(&raw mut address, bytes, stream.0))?;
            call!(self.driver, mem_free_async(address, stream.0))
        }
    }
}
