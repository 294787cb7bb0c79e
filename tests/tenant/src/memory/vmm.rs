//! Virtual memory management: an address range, physical memory, a mapping.

use std::ffi::{c_int, c_uchar, c_ushort, c_void};
use std::ptr::null_mut;

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, check, need};
use crate::exit::CudaError;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_int = 0;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

impl Location {
    /// Memory of the device of this ordinal.
    pub fn device(id: c_int) -> Self {
        Self { kind: ON_DEVICE, id }
    }
}

/// `CUmemAllocationProp` (cuda.h 12.9).
#[repr(C)]
struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    metadata: *mut c_void,
    compression: c_uchar,
    rdma: c_uchar,
    usage: c_ushort,
    reserved: [c_uchar; 4],
}
const _: () = assert!(size_of::<AllocationProp>() == 32);

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDesc {
    location: Location,
    flags: c_int,
}

/// Physical memory and where it is mapped.
#[derive(Debug)]
pub struct Mapped {
    address: CUdeviceptr,
    size: usize,
    handle: u64,
}

impl Mapped {
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.size as u64
    }
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

fn prop(cuda: &Cuda) -> AllocationProp {
    AllocationProp {
        kind: PINNED,
        handle_types: 0,
        location: Location::device(cuda.device()),
        metadata: null_mut(),
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

/// To a multiple of the granularity.
fn round_up(cuda: &Cuda, bytes: usize) -> Result<usize, CudaError> {
    let granularity_of = need("cuMemGetAllocationGranularity", cuda.driver().mem_granularity)?;
    let prop = prop(cuda);
    let mut granularity = 0;
    // SAFETY: a live out-parameter; every field of the properties is set.
    check("cuMemGetAllocationGranularity", unsafe {
        granularity_of(&raw mut granularity, (&raw const prop).cast(), MINIMUM)
    })?;
    Ok(bytes.checked_next_multiple_of(granularity.max(1)).unwrap_or(usize::MAX))
}

fn create(cuda: &Cuda, size: usize) -> Result<u64, CudaError> {
    let create = need("cuMemCreate", cuda.driver().mem_create)?;
    let prop = prop(cuda);
    let mut handle = 0;
    // SAFETY: a live out-parameter; every field of the properties is set.
    check("cuMemCreate", unsafe { create(&raw mut handle, size, (&raw const prop).cast(), 0) })?;
    Ok(handle)
}

fn reserve(cuda: &Cuda, size: usize) -> Result<CUdeviceptr, CudaError> {
    let reserve = need("cuMemAddressReserve", cuda.driver().mem_address_reserve)?;
    let mut address = 0;
    // SAFETY: a live out-parameter.
    check("cuMemAddressReserve", unsafe { reserve(&raw mut address, size, 0, 0, 0) })?;
    Ok(address)
}

/// Maps all of `handle`, readable and writable; nothing stays mapped where that fails.
fn map_at(cuda: &Cuda, address: CUdeviceptr, size: usize, handle: u64) -> Result<(), CudaError> {
    let map = need("cuMemMap", cuda.driver().mem_map)?;
    let access = need("cuMemSetAccess", cuda.driver().mem_set_access)?;
    let grant = AccessDesc { location: Location::device(cuda.device()), flags: READ_WRITE };
    // SAFETY: addresses that `reserve` gave and a handle of `create`; a live description.
    unsafe {
        check("cuMemMap", map(address, size, 0, handle, 0))?;
        check("cuMemSetAccess", access(address, size, (&raw const grant).cast(), 1))
            .or_else(|error| unmap_at(cuda, address, size).and(Err(error)))
    }
}

fn unmap_at(cuda: &Cuda, address: CUdeviceptr, size: usize) -> Result<(), CudaError> {
    let unmap = need("cuMemUnmap", cuda.driver().mem_unmap)?;
    // SAFETY: mapped whole by `map_at`; its owner uses it no more.
    check("cuMemUnmap", unsafe { unmap(address, size) })
}

fn release(cuda: &Cuda, handle: u64) -> Result<(), CudaError> {
    let release = need("cuMemRelease", cuda.driver().mem_release)?;
    // SAFETY: a handle of `create`, released once.
    check("cuMemRelease", unsafe { release(handle) })
}

fn forget(cuda: &Cuda, address: CUdeviceptr, size: usize) -> Result<(), CudaError> {
    let free = need("cuMemAddressFree", cuda.driver().mem_address_free)?;
    // SAFETY: reserved by `reserve`, and nothing is mapped there any more.
    check("cuMemAddressFree", unsafe { free(address, size) })
}
