//! Device memory that no public function obtained: what NVIDIA's own libraries take through private
//! export tables (`cuGetExportTable`). The simulator has one table of its own, so that tests can have
//! memory which only NVML's count per process shows.

use crate::driver::driver;
use crate::errors::Result;
use crate::pool;
use simgpu::memory::Use;
use std::ffi::c_int;
use tessera_cuda::types::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUresult, CUuuid};

/// The table's id.
pub(crate) const ID: CUuuid = CUuuid { bytes: *b"simgpu private 1" };

/// The table: its size, then functions that take and give back bytes of a GPU's memory, in whole
/// `granularity`s, without an address.
#[repr(C)]
pub(crate) struct Table {
    size: usize,
    take: extern "C" fn(dev: CUdevice, bytes: usize) -> CUresult,
    give: extern "C" fn(dev: CUdevice, bytes: usize) -> CUresult,
}

pub(crate) static TABLE: Table = Table { size: size_of::<Table>(), take, give };

fn change(dev: CUdevice, bytes: usize, taking: bool) -> Result<()> {
    let driver = driver()?;
    let gpu = driver.device(dev)?.gpu;
    let grain = driver.session.config().memory.granularity_bytes;
    let bytes = (bytes as u64).checked_next_multiple_of(grain).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    if !taking {
        driver.session.uncharge(gpu, Use::Private, bytes);
    } else if !pool::charge(driver, gpu, Use::Private, bytes) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    Ok(())
}

fn code(result: Result<()>) -> c_int {
    result.err().unwrap_or(CUDA_SUCCESS)
}

extern "C" fn take(dev: CUdevice, bytes: usize) -> CUresult {
    code(change(dev, bytes, true))
}

extern "C" fn give(dev: CUdevice, bytes: usize) -> CUresult {
    code(change(dev, bytes, false))
}
