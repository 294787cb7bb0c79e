//! What a pool is made of: `CUmemPoolProps`, `CUmemLocation`.

use crate::driver::Driver;
use crate::errors::Result;
use simgpu::memory::Use;
use std::ffi::c_int;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdevice, CUmemLocation, CUmemPoolProps,
};

const CUDA_ERROR_NOT_PERMITTED: i32 = 800;

/// `CU_MEM_ALLOCATION_TYPE_*`.
pub(crate) const PINNED: c_int = 1;
pub(crate) const MANAGED: c_int = 2;

/// `CU_MEM_HANDLE_TYPE_*`.
pub(crate) const HANDLE_NONE: c_int = 0;
pub(crate) const HANDLE_FD: c_int = 1;
pub(crate) const HANDLE_FABRIC: c_int = 8;

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawAccess {
    pub(crate) location: CUmemLocation,
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE` is 3, `…_READ` 1, `…_NONE` 0.
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<RawAccess>() == 12);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Location {
    /// A GPU, by ordinal.
    Device(CUdevice),
    Host,
    HostNuma(c_int),
    /// None preferred (managed memory).
    None,
}

impl Location {
    pub(crate) fn of(raw: CUmemLocation, driver: &'static Driver) -> Result<Location> {
        match raw.r#type {
            0 => Ok(Location::None),
            1 => driver.device(raw.id).map(|d| Location::Device(d.ordinal)),
            2 => Ok(Location::Host),
            3 if is_node(raw.id, driver) => Ok(Location::HostNuma(raw.id)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// `CU_MEM_LOCATION_TYPE_*` and the id.
    pub(crate) fn raw(self) -> CUmemLocation {
        let (r#type, id) = match self {
            Location::None => (0, 0),
            Location::Device(ordinal) => (1, ordinal),
            Location::Host => (2, 0),
            Location::HostNuma(node) => (3, node),
        };
        CUmemLocation { r#type, id }
    }
}

/// Whether the simulated machine has this NUMA node: node 0, and those of its GPUs.
pub(crate) fn is_node(node: c_int, driver: &Driver) -> bool {
    node == 0 || node > 0 && driver.devices.iter().any(|d| d.config.numa_node == node)
}

#[derive(Clone, Copy)]
pub(crate) struct Props {
    pub allocation: c_int,
    pub location: Location,
    /// Bytes; 0: no maximum.
    pub max_size: u64,
}

impl Default for Props {
    fn default() -> Self {
        Props { allocation: PINNED, location: Location::Host, max_size: 0 }
    }
}

impl Props {
    pub(crate) fn counts_as(&self) -> Use {
        if self.allocation == MANAGED { Use::Managed } else { Use::Pool }
    }

    pub(crate) fn of_device(ordinal: CUdevice) -> Props {
        Props { location: Location::Device(ordinal), ..Props::default() }
    }

    /// Checks what a caller gave (`cuMemPoolCreate`).
    pub(crate) fn check(raw: &CUmemPoolProps, driver: &'static Driver) -> Result<Props> {
        let is_managed = raw.allocType == MANAGED && driver.session.config().cuda_version >= 13_000;
        let pinned_or_managed = raw.allocType == PINNED || is_managed;
        // The first byte is a hint about RDMA since 13.x.
        let unset =
            raw.win32SecurityAttributes.is_null() && raw.reserved[1..].iter().all(|b| *b == 0);
        if !pinned_or_managed || !unset || raw.reserved[0] > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let location = Location::of(raw.location, driver).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        match raw.handleTypes {
            HANDLE_NONE => {}
            // No IMEX channel here.
            HANDLE_FABRIC => return Err(CUDA_ERROR_NOT_PERMITTED),
            // Windows'; and no pool is shared (CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES is 0).
            HANDLE_FD | 2 | 4 => return Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        // "maxSize must be set to zero for managed memory pools".
        let wrong = if is_managed {
            raw.maxSize != 0 || raw.usage != 0
        } else {
            location == Location::None
        };
        if wrong {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // "may be higher than what was initially passed … due to alignment requirements".
        let grain = driver.session.config().memory.granularity_bytes;
        let max_size =
            (raw.maxSize as u64).checked_next_multiple_of(grain).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(Props { allocation: raw.allocType, location, max_size })
    }
}
