//! Stream-ordered memory, from the device's pool and from one of this process.
//!
//! A free is waited for: at a synchronisation the driver gives back what its pool holds beyond the
//! release threshold, which is 0 unless set (cuda.h, `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use tessera_cuda::types::{CUdeviceptr, CUmemoryPool};

use super::vmm::Location;
use crate::cuda::{Cuda, Stream, check, need};
use crate::exit::CudaError;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;

/// `CUmemPoolProps` (cuda.h 12.9).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProps {
    allocation_type: c_int,
    handle_types: c_int,
    location: Location,
    security_attributes: *mut c_void,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}
const _: () = assert!(size_of::<PoolProps>() == 88);

impl PoolProps {
    /// Memory of a device, not to be shared.
    pub fn of(device: c_int) -> Self {
        Self {
            allocation_type: PINNED,
            handle_types: 0,
            location: Location::device(device),
            security_attributes: null_mut(),
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// The process's own pool, made when it is first asked of.
#[derive(Debug, Default)]
pub struct OwnPool(OnceLock<Handle>);

#[derive(Clone, Copy, Debug)]
struct Handle(CUmemoryPool);
// SAFETY: a pool belongs to the device, and any thread may use it (CUDA C Programming Guide,
// "Stream Ordered Memory Allocator").
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl OwnPool {
    fn get(&self, cuda: &Cuda) -> Result<CUmemoryPool, CudaError> {
        if let Some(pool) = self.0.get() {
            return Ok(pool.0);
        }
        let create = need("cuMemPoolCreate", cuda.driver().mem_pool_create)?;
        let props = PoolProps::of(cuda.device());
        let mut pool = null_mut();
        // SAFETY: a live out-parameter; every field of the properties is set.
        check("cuMemPoolCreate", unsafe { create(&raw mut pool, (&raw const props).cast()) })?;
        if self.0.set(Handle(pool)).is_err() {
            // Another thread was sooner.
            let destroy = need("cuMemPoolDestroy", cuda.driver().mem_pool_destroy)?;
            // SAFETY: made above and known to nobody else.
            check("cuMemPoolDestroy", unsafe { destroy(pool) })?;
        }
        Ok(self.0.get().map_or(pool, |pool| pool.0))
    }
}

pub fn from_default(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let mut address = 0;
    // SAFETY: a live out-parameter; a `Stream` is null or made by the driver.
    check("cuMemAllocAsync", unsafe {
        (cuda.driver().mem_alloc_async)(&raw mut address, bytes, stream.raw())
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn from_own(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let pool = cuda.own_pool().get(cuda)?;
    let allocate = need("cuMemAllocFromPoolAsync", cuda.driver().mem_alloc_from_pool)?;
    let mut address = 0;
    // SAFETY: a live out-parameter; the pool lives as long as the process.
    check("cuMemAllocFromPoolAsync", unsafe {
        allocate(&raw mut address, bytes, pool, stream.raw())
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn free(cuda: &Cuda, address: CUdeviceptr, stream: Stream) -> Result<(), CudaError> {
    // SAFETY: made by this module and freed once by its owner.
    check("cuMemFreeAsync", unsafe { (cuda.driver().mem_free_async)(address, stream.raw()) })?;
    cuda.synchronise(stream)
}

/// `cuMemPoolTrimTo(…, 0)` for both pools.
pub fn trim(cuda: &Cuda) -> Result<(), CudaError> {
    let Some(trim) = cuda.driver().mem_pool_trim else { return Ok(()) };
    if let Some(default_of) = cuda.driver().default_mem_pool {
        let mut pool = null_mut();
        // SAFETY: a live out-parameter.
        check("cuDeviceGetDefaultMemPool", unsafe { default_of(&raw mut pool, cuda.device()) })?;
        // SAFETY: the pool that the driver just named.
        check("cuMemPoolTrimTo", unsafe { trim(pool, 0) })?;
    }
    if let Some(pool) = cuda.own_pool().0.get() {
        // SAFETY: made by `OwnPool::get` and never destroyed.
        check("cuMemPoolTrimTo", unsafe { trim(pool.0, 0) })?;
    }
    Ok(())
}
