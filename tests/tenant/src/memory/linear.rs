//! Plain, pitched and managed memory, and copies to and from any address.

use std::ffi::c_uint;

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, check};
use crate::exit::CudaError;

/// `CU_MEM_ATTACH_GLOBAL`.
const ATTACH_GLOBAL: c_uint = 1;
/// What rows are rounded up to on every GPU so far, and to a multiple of 512 by contract.
const PITCH: usize = 1024;
/// Pages of the driver; what is larger than half of one takes whole ones.
const PAGE: usize = 2 << 20;

pub fn plain(cuda: &Cuda, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    let mut address = 0;
    // SAFETY: a live out-parameter.
    check("cuMemAlloc", unsafe { (cuda.driver().mem_alloc)(&raw mut address, bytes) })?;
    Ok(address)
}

pub fn managed(cuda: &Cuda, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    let mut address = 0;
    // SAFETY: a live out-parameter.
    check("cuMemAllocManaged", unsafe {
        (cuda.driver().mem_alloc_managed)(&raw mut address, bytes, ATTACH_GLOBAL)
    })?;
    Ok(address)
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
    check("cuMemAllocPitch", unsafe {
        (cuda.driver().mem_alloc_pitch)(&raw mut address, &raw mut pitch, width, height, 4)
    })?;
    Ok((address, pitch as u64 * height as u64))
}

pub fn free(cuda: &Cuda, address: CUdeviceptr) -> Result<(), CudaError> {
    // SAFETY: made by this module and freed once by its owner.
    check("cuMemFree", unsafe { (cuda.driver().mem_free)(address) })
}

pub fn write(cuda: &Cuda, to: CUdeviceptr, data: &[u8]) -> Result<(), CudaError> {
    // SAFETY: source and length are a live slice's; the driver checks the destination.
    check("cuMemcpyHtoD", unsafe {
        (cuda.driver().copy_to_device)(to, data.as_ptr().cast(), data.len())
    })
}

pub fn read(cuda: &Cuda, from: CUdeviceptr, data: &mut [u8]) -> Result<(), CudaError> {
    // SAFETY: destination and length are a live, exclusive slice's.
    check("cuMemcpyDtoH", unsafe {
        (cuda.driver().copy_to_host)(data.as_mut_ptr().cast(), from, data.len())
    })
}
