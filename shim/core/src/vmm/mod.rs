//! Virtual memory management: memory of `cuMemCreate`, charged to the GPU where it is made until the
//! driver lets go of it (CUDA Driver API, "Virtual Memory Management", "Multicast Object
//! Management").
//!
//! It belongs to no context: "cuCtxDestroy() will not destroy memory allocations by cuMemCreate()".
//! What holds it is kept in a [`book`]; [`tiles`] are the parts of sparse arrays. Imports are charged
//! to the exporter ([`crate::shares`]) and are in the book for their mark alone.

mod book;
pub mod hooks;
mod tiles;

use crate::quota::{self, Asked};
use crate::real;
use crate::shares;
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::{Answer, Call};
use book::{Book, Each, Memory};
use core::mem;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

#[derive(Debug, Default)]
pub struct Vmm {
    book: Spin<Book>,
}

/// What is to be noted. Not generic: these calls are slow anyway, and the shim is in every process.
type Act<'a> = &'a mut dyn FnMut(&mut Book, Each<'_>);

impl Vmm {
    /// Notes in the book what a driver call did, and gives back what ended by it.
    fn note(&self, process: &'static Process, act: Act<'_>) {
        act(&mut self.book.lock(), &mut |memory, export| {
            shares::unmark_import(process, memory.import);
            process.shares.ended(process, memory.gpu, memory.bytes, Kind::Vmm, export);
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
pub(crate) fn device_of(location: CUmemLocation) -> Option<CUdevice> {
    match location.r#type {
        CU_MEM_LOCATION_TYPE_DEVICE => Some(location.id),
        // Two bytes: the device, and which part of its memory.
        CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN => Some(location.id & 0xff),
        _ => None,
    }
}

/// On which device, and of which GPU of the page, the driver says the memory of `handle` is.
fn home_of(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
) -> Option<(CUdevice, u8)> {
    // SAFETY: numbers and pointers, for which zero is a value.
    let nothing: CUmemAllocationProp = unsafe { mem::zeroed() };
    // SAFETY: a valid place for the answer; the handle was just given by the driver.
    let prop = real::cuMemGetAllocationPropertiesFromHandle
        .ask(nothing, |ask, prop| unsafe { ask(prop, handle) });
    let device = device_of(prop.ok()?.location)?;
    Some((device, process.listed(device)??))
}

/// Makes memory on `device` with `call`, which writes `handle`, charged.
fn create(
    process: &'static Process,
    device: CUdevice,
    bytes: u64,
    call: Call<'_>,
    handle: *const CUmemGenericAllocationHandle,
) -> Answer {
    const NAME: &str = "cuMemCreate";
    // A device that the driver does not know, or a driver not initialised: its own error.
    let Some(listed) = process.listed(device) else { return call() };
    let asked = Asked::Bytes(bytes);
    let Some(gpu) = listed else {
        quota::refuse_unlisted(process, NAME, asked);
        // The device is the call's own argument.
        return Err(CUDA_ERROR_INVALID_DEVICE);
    };
    let bytes = crate::memory::footprint(bytes);
    let reservation = quota::reserve_for(process, gpu, bytes, NAME, asked)?;
    quota::insist(process, gpu, bytes, call)?; // the reservation rolls back
    // What was reserved, which never fails.
    let _fits = reservation.commit(bytes, Kind::Vmm);
    // SAFETY: the driver wrote it when it succeeded.
    made(process, NAME, unsafe { *handle }, Memory { gpu, device, bytes, import: 0 })
}

/// Notes what the driver has just made for `name`, or gives it back for want of memory for the book.
fn made(
    process: &'static Process,
    name: &str,
    handle: CUmemGenericAllocationHandle,
    new: Memory,
) -> Answer {
    let mut noted = Ok(());
    process.vmm.note(process, &mut |book, each| noted = book.made(handle, new, each));
    noted.map_err(|_full| {
        release_unseen(handle);
        quota::release(process, new.gpu, new.bytes, Kind::Vmm);
        quota::refuse_unnoted(name)
    })
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
