//! Virtual memory management: memory of `cuMemCreate`, charged to the GPU where it is made until the
//! driver lets go of it (CUDA Driver API, "Virtual Memory Management", "Multicast Object
//! Management").
//!
//! It belongs to no context: "cuCtxDestroy() will not destroy memory allocations by cuMemCreate()".
//! What holds it is kept in a [`book`]; [`tiles`] are the parts of sparse arrays. Imports are charged
//! to the exporter ([`crate::shares`]) and are in the book for their mark alone.

pub mod book;
pub(crate) mod hooks;
pub mod tiles;

use crate::quota::{self, Asked};
use crate::real;
use crate::shares;
use crate::spin::Spin;
use crate::state::Process;
use book::{Book, Ended};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// The memory of this process.
#[derive(Debug)]
pub struct Vmm {
    book: Spin<Book>,
}

/// What is to be noted. Not generic: these calls are slow anyway, and the shim is in every process.
type Act<'a> = &'a mut dyn FnMut(&mut Book, &mut dyn FnMut(Ended));

impl Default for Vmm {
    fn default() -> Self {
        Self::new()
    }
}

impl Vmm {
    /// None yet.
    pub const fn new() -> Self {
        Self { book: Spin::new(Book::new()) }
    }

    /// Notes in the book what a driver call did, and gives back what ended by it.
    fn note(&self, process: &'static Process, act: Act<'_>) {
        act(&mut self.book.lock(), &mut |ended| {
            shares::unmark_import(process, ended.import);
            process.shares.ended(process, ended.gpu, ended.bytes, Kind::Vmm, ended.export);
        });
        process.shares.look_again(process);
    }

    /// An array is gone, and its tiles with it.
    pub(crate) fn array_ended(&self, process: &'static Process, array: CUarray) {
        if self.book.lock().has_tiles() {
            self.note(process, &mut |book, each| book.array_ended(array.addr() as u64, each));
        }
    }

    /// A context is gone, its arrays and their tiles with it. Memory of `cuMemCreate` stays.
    pub(crate) fn context_ended(&self, process: &'static Process, serial: u32) {
        if self.book.lock().has_tiles() {
            self.note(process, &mut |book, each| book.context_ended(serial, each));
        }
    }
}

/// The device of a location in device memory; `None` for the host's. The locations of drivers yet to
/// come are taken for the host's, and NVML sees what is not.
fn device_of(location: CUmemLocation) -> Option<CUdevice> {
    match location.r#type {
        CU_MEM_LOCATION_TYPE_DEVICE => Some(location.id),
        CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN => Some(location.id & 0xff),
        _ => None,
    }
}

/// On which device, and of which GPU of the page, the driver says the memory of `handle` is.
fn home_of(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
) -> Option<(CUdevice, u8)> {
    let ask = real::cuMemGetAllocationPropertiesFromHandle.get()?;
    let mut prop = core::mem::MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: a valid place for the answer; the handle was just given by the driver.
    if unsafe { ask(prop.as_mut_ptr(), handle) } != CUDA_SUCCESS {
        return None;
    }
    // SAFETY: zero is valid for all of it, and the driver filled it in.
    let device = device_of(unsafe { prop.assume_init() }.location)?;
    Some((device, process.listed(device)??))
}

/// Makes memory on `device` with `call`, which writes `handle`, charged.
fn create(
    process: &'static Process,
    device: CUdevice,
    bytes: u64,
    call: &dyn Fn() -> CUresult,
    handle: *const CUmemGenericAllocationHandle,
) -> CUresult {
    const NAME: &str = "cuMemCreate";
    // A device that the driver does not know, or a driver not initialised: its own error.
    let Some(listed) = process.listed(device) else { return call() };
    let asked = Asked::Bytes(bytes);
    let Some(gpu) = listed else {
        quota::refuse_unlisted(process, NAME, asked);
        // The device is the call's own argument.
        return CUDA_ERROR_INVALID_DEVICE;
    };
    let bytes = crate::memory::footprint(bytes);
    let reservation = match quota::reserve(process, gpu, bytes) {
        Ok(reservation) => reservation,
        Err(refused) => return quota::refuse(process, NAME, asked, &refused),
    };
    let result = quota::insist(process, gpu, bytes, &call);
    if result != CUDA_SUCCESS {
        return result; // the reservation rolls back
    }
    // What was reserved, which never fails.
    if reservation.commit(bytes, Kind::Vmm).is_err() {
        return CUDA_SUCCESS;
    }
    // SAFETY: the driver wrote it when it succeeded.
    let handle = unsafe { *handle };
    let new = book::New { gpu, device, bytes, import: 0 };
    let mut noted = Ok(());
    process.vmm.note(process, &mut |book, each| noted = book.made(handle, new, each));
    if noted.is_ok() {
        return CUDA_SUCCESS;
    }
    // No memory for the book.
    release_unseen(handle);
    quota::release(process, gpu, bytes, Kind::Vmm);
    quota::refuse_unnoted(NAME)
}

/// Releases a handle that nobody but the shim has seen.
fn release_unseen(handle: CUmemGenericAllocationHandle) {
    if let Some(release) = real::cuMemRelease.get() {
        // SAFETY: the driver has just made it.
        unsafe { release(handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_locations_on_devices_are_device_memory() {
        let at = |r#type, id| device_of(CUmemLocation { r#type, id });
        assert_eq!(at(CU_MEM_LOCATION_TYPE_DEVICE, 3), Some(3));
        // Device 3, locality domain 1.
        assert_eq!(at(CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, 0x0103), Some(3));
        for host in [
            CU_MEM_LOCATION_TYPE_NONE,
            CU_MEM_LOCATION_TYPE_HOST,
            CU_MEM_LOCATION_TYPE_HOST_NUMA,
            CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
            CU_MEM_LOCATION_TYPE_INVISIBLE,
        ] {
            assert_eq!(at(host, 0), None, "{host}");
        }
    }
}
