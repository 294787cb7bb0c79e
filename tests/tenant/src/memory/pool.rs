//! Stream-ordered memory, from the device's pool and from one of this process.
//!
//! A free is waited for: at a synchronisation the driver gives back what its pool holds beyond the
//! release threshold, which is 0 unless set (cuda.h, `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use tessera_cuda::types::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE,
    CUdeviceptr, CUmemLocation, CUmemPoolProps, CUmemoryPool,
};

use crate::cuda::{Cuda, Stream, made};
use crate::driver::call;
use crate::exit::CudaError;

pub fn on(device: c_int) -> CUmemLocation {
    CUmemLocation { r#type: CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Memory of a device, not to be shared.
pub fn props(device: c_int) -> CUmemPoolProps {
    CUmemPoolProps {
        allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: CU_MEM_HANDLE_TYPE_NONE,
        location: on(device),
        win32SecurityAttributes: null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    }
}

/// The address of the process's own pool, made when it is first asked of.
pub type OwnPool = Mutex<Option<usize>>;

fn own(cuda: &Cuda) -> Result<CUmemoryPool, CudaError> {
    let mut pool = cuda.own_pool().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = *pool {
        return Ok(pool as CUmemoryPool);
    }
    let props = props(cuda.device());
    let new: CUmemoryPool = made(|at| {
        // SAFETY: a live out-parameter; every field of the properties is set.
        unsafe { call!(cuda.driver(), mem_pool_create(at, &raw const props)) }
    })?;
    *pool = Some(new as usize);
    Ok(new)
}

pub fn from_default(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let address = made(|at| {
        // SAFETY: a live out-parameter; a `Stream` is null or made by the driver.
        unsafe { call!(cuda.driver(), mem_alloc_async(at, bytes, stream.raw())) }
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn from_own(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let pool = own(cuda)?;
    let address = made(|at| {
        // SAFETY: a live out-parameter; the pool lives as long as the process.
        unsafe { call!(cuda.driver(), mem_alloc_from_pool(at, bytes, pool, stream.raw())) }
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn free(cuda: &Cuda, address: CUdeviceptr, stream: Stream) -> Result<(), CudaError> {
    // SAFETY: made by this module and freed once by its owner.
    unsafe { call!(cuda.driver(), mem_free_async(address, stream.raw())) }?;
    cuda.synchronise(stream)
}

/// `cuMemPoolTrimTo(…, 0)` for both pools.
pub fn trim(cuda: &Cuda) -> Result<(), CudaError> {
    if cuda.driver().mem_pool_trim.pointer.is_none() {
        return Ok(());
    }
    let default = made(|at| {
        // SAFETY: a live out-parameter.
        unsafe { call!(cuda.driver(), default_mem_pool(at, cuda.device())) }
    })?;
    let own = *cuda.own_pool().lock().unwrap_or_else(PoisonError::into_inner);
    for pool in [Some(default), own.map(|pool| pool as CUmemoryPool)].into_iter().flatten() {
        // SAFETY: a pool that the driver named, or that was made here and is never destroyed.
        unsafe { call!(cuda.driver(), mem_pool_trim(pool, 0)) }?;
    }
    Ok(())
}
