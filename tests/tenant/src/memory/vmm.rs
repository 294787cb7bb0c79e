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

pub fn map(cuda: &Cuda, bytes: usize) -> Result<Mapped, CudaError> {
    let driver = cuda.driver();
    let granularity_of = need("cuMemGetAllocationGranularity", driver.mem_granularity)?;
    let reserve = need("cuMemAddressReserve", driver.mem_address_reserve)?;
    let create = need("cuMemCreate", driver.mem_create)?;
    let map = need("cuMemMap", driver.mem_map)?;
    let access = need("cuMemSetAccess", driver.mem_set_access)?;
    let location = Location::device(cuda.device());
    let prop = AllocationProp {
        kind: PINNED,
        handle_types: 0,
        location,
        metadata: null_mut(),
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    };
    let prop = (&raw const prop).cast();
    let mut granularity = 0;
    // SAFETY: a live out-parameter; every field of the properties is set.
    check("cuMemGetAllocationGranularity", unsafe {
        granularity_of(&raw mut granularity, prop, MINIMUM)
    })?;
    let size = bytes.checked_next_multiple_of(granularity.max(1)).unwrap_or(usize::MAX);
    let mut mapped = Mapped { address: 0, size, handle: 0 };
    // SAFETY: live out-parameters and properties; each step is undone where a later one fails.
    unsafe {
        check("cuMemCreate", create(&raw mut mapped.handle, size, prop, 0))?;
        let reserved =
            check("cuMemAddressReserve", reserve(&raw mut mapped.address, size, 0, 0, 0));
        if let Err(error) = reserved {
            release(cuda, &mapped)?;
            return Err(error);
        }
        let done = check("cuMemMap", map(mapped.address, size, 0, mapped.handle, 0));
        if let Err(error) = done {
            release(cuda, &mapped)?;
            forget(cuda, &mapped)?;
            return Err(error);
        }
        let grant = AccessDesc { location, flags: READ_WRITE };
        let done = access(mapped.address, size, (&raw const grant).cast(), 1);
        if let Err(error) = check("cuMemSetAccess", done) {
            unmap(cuda, &mapped)?;
            return Err(error);
        }
    }
    Ok(mapped)
}

/// Unmaps, gives the physical memory back, and the addresses.
pub fn unmap(cuda: &Cuda, mapped: &Mapped) -> Result<(), CudaError> {
    let unmap = need("cuMemUnmap", cuda.driver().mem_unmap)?;
    // SAFETY: mapped whole by `map`; its owner uses it no more.
    check("cuMemUnmap", unsafe { unmap(mapped.address, mapped.size) })?;
    release(cuda, mapped)?;
    forget(cuda, mapped)
}

fn release(cuda: &Cuda, mapped: &Mapped) -> Result<(), CudaError> {
    let release = need("cuMemRelease", cuda.driver().mem_release)?;
    // SAFETY: created by `map`, released once.
    check("cuMemRelease", unsafe { release(mapped.handle) })
}

fn forget(cuda: &Cuda, mapped: &Mapped) -> Result<(), CudaError> {
    let free = need("cuMemAddressFree", cuda.driver().mem_address_free)?;
    // SAFETY: reserved by `map`, and nothing is mapped there any more.
    check("cuMemAddressFree", unsafe { free(mapped.address, mapped.size) })
}
