//! Virtual memory management: an address range, physical memory, a mapping.

use std::ffi::c_int;
use std::ptr::null_mut;

use tessera_cuda::types::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE,
    CUdeviceptr, CUmemAllocationProp,
};

use super::pool::on;
use crate::cuda::{Cuda, made};
use crate::driver::call;
use crate::exit::CudaError;

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_int = 0;

#[derive(Debug)]
pub struct Mapped {
    pub address: CUdeviceptr,
    pub size: usize,
    handle: u64,
}

/// Physical memory of at least `bytes`, at addresses of its own.
pub fn map(cuda: &Cuda, bytes: usize) -> Result<Mapped, CudaError> {
    let size = round_up(cuda, bytes)?;
    let handle = create(cuda, size)?;
    let undo = |error| release(cuda, handle).and(Err(error));
    let address = reserve(cuda, size).or_else(undo)?;
    let undo = |error| {
        release(cuda, handle)?;
        forget(cuda, address, size)?;
        Err(error)
    };
    map_at(cuda, address, size, handle).or_else(undo)?;
    Ok(Mapped { address, size, handle })
}

/// Unmaps, gives the physical memory back, and the addresses.
pub fn unmap(cuda: &Cuda, mapped: &Mapped) -> Result<(), CudaError> {
    unmap_at(cuda, mapped.address, mapped.size)?;
    release(cuda, mapped.handle)?;
    forget(cuda, mapped.address, mapped.size)
}

fn prop(cuda: &Cuda) -> CUmemAllocationProp {
    CUmemAllocationProp {
        r#type: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CU_MEM_HANDLE_TYPE_NONE,
        location: on(cuda.device),
        win32HandleMetaData: null_mut(),
        compressionType: 0,
        gpuDirectRDMACapable: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

fn round_up(cuda: &Cuda, bytes: usize) -> Result<usize, CudaError> {
    let prop = prop(cuda);
    let granularity: usize = made(|at| {
        // SAFETY: a live out-parameter; every field of the properties is set.
        unsafe { call!(cuda.driver, mem_granularity(at, &raw const prop, MINIMUM)) }
    })?;
    Ok(bytes.checked_next_multiple_of(granularity.max(1)).unwrap_or(usize::MAX))
}

fn create(cuda: &Cuda, size: usize) -> Result<u64, CudaError> {
    let prop = prop(cuda);
    // SAFETY: a live out-parameter; every field of the properties is set.
    made(|at| unsafe { call!(cuda.driver, mem_create(at, size, &raw const prop, 0)) })
}

fn reserve(cuda: &Cuda, size: usize) -> Result<CUdeviceptr, CudaError> {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(cuda.driver, mem_address_reserve(at, size, 0, 0, 0)) })
}

/// Maps all of `handle`, readable and writable; nothing stays mapped where that fails.
fn map_at(cuda: &Cuda, address: CUdeviceptr, size: usize, handle: u64) -> Result<(), CudaError> {
    // `CUmemAccessDesc`: a location and flags.
    let grant = [CU_MEM_LOCATION_TYPE_DEVICE, cuda.device, READ_WRITE];
    // SAFETY: addresses that `reserve` gave and a handle of `create`; a live description.
    unsafe {
        call!(cuda.driver, mem_map(address, size, 0, handle, 0))?;
        call!(cuda.driver, mem_set_access(address, size, grant.as_ptr().cast(), 1))
            .or_else(|error| unmap_at(cuda, address, size).and(Err(error)))
    }
}

fn unmap_at(cuda: &Cuda, address: CUdeviceptr, size: usize) -> Result<(), CudaError> {
    // SAFETY: mapped whole by `map_at`; its owner uses it no more.
    unsafe { call!(cuda.driver, mem_unmap(address, size)) }
}

fn release(cuda: &Cuda, handle: u64) -> Result<(), CudaError> {
    // SAFETY: a handle of `create`, released once.
    unsafe { call!(cuda.driver, mem_release(handle)) }
}

fn forget(cuda: &Cuda, address: CUdeviceptr, size: usize) -> Result<(), CudaError> {
    // SAFETY: reserved by `reserve`, and nothing is mapped there any more.
    unsafe { call!(cuda.driver, mem_address_free(address, size)) }
}
