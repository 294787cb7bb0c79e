//! Virtual memory management: memory of `cuMemCreate`, charged to the GPU where it is made until the
//! driver lets go of it (CUDA Driver API, "Virtual Memory Management", "Multicast Object
//! Management").
//!
//! It belongs to no context: "cuCtxDestroy() will not destroy memory allocations by cuMemCreate()".
//! What holds it is kept in a [`book`], parts of sparse arrays among it. Imports are charged
//! to the exporter ([`crate::shares`]) and are in the book for their mark alone.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

mod book;

use crate::gate::Stream;
use crate::quota::{self, Asked};
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::{Answer, Call, entered, tenant};
use crate::{place, real, shares};
use book::{Book, Each, Memory, Ticket};
use core::ffi::{c_int, c_uint, c_void};
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
            process.account.unmark_import(memory.import);
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
    // SAFETY: the driver has just made it.
    real::cuMemRelease.tell(|release| unsafe { release(handle) });
}

// The hooks themselves. Counts go up and down after the driver's call succeeded; while it is under
// way the book's entry is pinned.

type Handle = CUmemGenericAllocationHandle;

/// CUDA Driver API, "Virtual Memory Management". Charged to the GPU of the location, not to the
/// current context's.
pub unsafe fn cuMemCreate(
    call: Call<'_>,
    handle: *mut Handle,
    bytes: usize,
    prop: *const CUmemAllocationProp,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    if handle.is_null() || prop.is_null() || bytes == 0 {
        return call();
    }
    // SAFETY: not null, and the caller promises a whole structure.
    let location = unsafe { (&raw const (*prop).location).read_unaligned() };
    match device_of(location) {
        Some(device) => create(process, device, bytes as u64, call, handle),
        None => call(),
    }
}

pub unsafe fn cuMemRelease(call: Call<'_>, handle: Handle) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(ticket) = process.vmm.book.lock().releasing(handle) else { return call() };
    let answer = call();
    process.vmm.note(process, &mut |book, each| book.released(ticket, answer.is_ok(), each));
    answer
}

type Done<'a> = &'a dyn Fn(&mut Book, Ticket, Each<'_>);

/// Calls the driver with `ticket`'s entry pinned; `done` notes a success.
fn pinned(process: &'static Process, ticket: Ticket, call: Call<'_>, done: Done<'_>) -> Answer {
    let answer = call();
    let done = if answer.is_ok() { done } else { &Book::unpin };
    process.vmm.note(process, &mut |book, each| done(book, ticket, each));
    answer
}

/// CUDA Driver API, "Virtual Memory Management": one more reference, to be released.
pub unsafe fn cuMemRetainAllocationHandle(call: Call<'_>, address: *mut c_void) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let ticket = process.vmm.book.lock().pin_at(address.addr() as u64);
    let Some(ticket) = ticket else { return call() };
    pinned(process, ticket, call, &|book, ticket, each| book.retained(ticket, each))
}

pub unsafe fn cuMemMap(
    call: Call<'_>,
    pointer: CUdeviceptr,
    bytes: usize,
    handle: Handle,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(ticket) = process.vmm.book.lock().pin(handle) else { return call() };
    pinned(process, ticket, call, &|book, ticket, each| {
        book.mapped(ticket, pointer, bytes as u64, each);
    })
}

/// CUDA Driver API, "Virtual Memory Management". One range may cover several mappings.
pub unsafe fn cuMemUnmap(call: Call<'_>, pointer: CUdeviceptr, bytes: usize) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let before = process.vmm.book.lock().now();
    call()?;
    let range = (pointer, bytes as u64);
    process.vmm.note(process, &mut |book, each| book.unmapped(range, before, each));
    Ok(())
}

/// CUDA Driver API, "Virtual Memory Management". In stream order, but noted at once.
pub unsafe fn cuMemMapArrayAsync(
    call: Call<'_>,
    list: *mut CUarrayMapInfo,
    count: c_uint,
    stream: Stream,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    if list.is_null() {
        return Ok(());
    }
    let context = place::of_stream(process, stream).serial();
    for index in 0..count as usize {
        // SAFETY: the caller promises `count` whole entries.
        let info = unsafe { list.add(index).read_unaligned() };
        if info.memOperationType == CU_MEM_OPERATION_TYPE_MAP {
            let array = info.resource.addr() as u64;
            process.vmm.book.lock().tile(array, info.memHandle, context);
        }
    }
    Ok(())
}

pub unsafe fn cuMemExportToShareableHandle(
    call: Call<'_>,
    shareable: *mut c_void,
    handle: Handle,
    handle_type: CUmemAllocationHandleType,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    if shareable.is_null() {
        return Ok(());
    }
    if let Some(export) = process.vmm.book.lock().export_of(handle) {
        match handle_type {
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
                // SAFETY: for this type the driver wrote an int.
                export.passed(unsafe { shareable.cast::<c_int>().read_unaligned() });
            }
            CU_MEM_HANDLE_TYPE_FABRIC => {
                // SAFETY: for this type the driver wrote 64 bytes.
                let name = unsafe { shareable.cast::<[u8; 64]>().read_unaligned() };
                export.named(shares::name(&name));
            }
            _ => {}
        }
    }
    Ok(())
}

/// CUDA Driver API, "Virtual Memory Management". The exporter is charged; here it is marked.
pub unsafe fn cuMemImportFromShareableHandle(
    call: Call<'_>,
    handle: *mut Handle,
    shareable: *mut c_void,
    handle_type: CUmemAllocationHandleType,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    let mark = match handle_type {
        CU_MEM_HANDLE_TYPE_FABRIC if !shareable.is_null() => {
            // SAFETY: the caller promises 64 bytes for this type.
            shares::name(&unsafe { shareable.cast::<[u8; 64]>().read_unaligned() })
        }
        _ => shares::descriptor(),
    };
    process.account.mark_import(mark);
    let answer = call();
    if answer.is_err() || handle.is_null() {
        process.account.unmark_import(mark);
        return answer;
    }
    // SAFETY: the driver wrote it.
    let handle = unsafe { *handle };
    let home = home_of(process, handle);
    // Multicast objects and host memory are no device memory of anybody's.
    let (device, gpu) = home.unwrap_or((-1, 0));
    let import = if home.is_some() { mark } else { 0 };
    let new = Memory { gpu, device, bytes: 0, import };
    let mut noted = Ok(false);
    process.vmm.note(process, &mut |book, each| noted = book.imported(handle, new, each));
    if noted != Ok(true) || import == 0 {
        process.account.unmark_import(mark);
    }
    noted.map(|_| ()).map_err(|_full| {
        release_unseen(handle);
        quota::refuse_unnoted("cuMemImportFromShareableHandle")
    })
}

/// CUDA Driver API, "Memory Management": a dma-buf keeps what is behind the address alive.
pub unsafe fn cuMemGetHandleForAddressRange(
    call: Call<'_>,
    handle: *mut c_void,
    pointer: CUdeviceptr,
    bytes: usize,
    handle_type: CUmemRangeHandleType,
) -> Answer {
    /// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
    const DMA_BUF_FD: CUmemRangeHandleType = 1;
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    if handle.is_null() || handle_type != DMA_BUF_FD {
        return Ok(());
    }
    // SAFETY: for this type the driver wrote an int.
    let fd = unsafe { handle.cast::<c_int>().read_unaligned() };
    let end = pointer.saturating_add(bytes as u64);
    let mut book = process.vmm.book.lock();
    // All memory behind the range, if it is mapped; else it is one allocation.
    let (mut at, mut any) = (pointer, false);
    while let Some((export, next)) = book.export_at(at).filter(|_| at < end) {
        export.opened(fd);
        (at, any) = (next, true);
    }
    drop(book);
    if !any
        && let Some(base) = shares::base_of(process, pointer)
        && process.shares.export(base, |export| export.opened(fd)).is_err()
    {
        // SAFETY: the driver has just opened it, and nobody else has seen it.
        unsafe { libc::close(fd) };
        return Err(quota::refuse_unnoted("cuMemGetHandleForAddressRange"));
    }
    Ok(())
}

/// CUDA Driver API, "Multicast Object Management": it owns no memory, and holds what is bound to it.
pub unsafe fn cuMulticastCreate(call: Call<'_>, object: *mut Handle) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver wrote it.
    let Some(&handle) = (unsafe { object.as_ref() }) else { return Ok(()) };
    let object = Memory { gpu: 0, device: -1, bytes: 0, import: 0 };
    // Unseen, what is bound to it would live on.
    made(process, "cuMulticastCreate", handle, object)
}

/// Binds what `pin` finds in the book to `object`.
fn bind(
    call: Call<'_>,
    object: Handle,
    device: Option<CUdevice>,
    offset: usize,
    pin: impl FnOnce(&mut Book) -> Option<Ticket>,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let tickets = {
        let mut book = process.vmm.book.lock();
        pin(&mut book).map(|memory| (memory, book.pin(object)))
    };
    let Some((memory, object)) = tickets else { return call() };
    let answer = call();
    process.vmm.note(process, &mut |book, each| {
        if let Some(object) = object {
            if answer.is_ok() {
                book.bound(object, memory, device, offset as u64);
            }
            book.unpin(object, each);
        }
        book.unpin(memory, each);
    });
    answer
}

pub unsafe fn cuMulticastBindMem(
    call: Call<'_>,
    object: Handle,
    object_offset: usize,
    memory: Handle,
) -> Answer {
    bind(call, object, None, object_offset, |book| book.pin(memory))
}

/// CUDA Driver API, "Multicast Object Management" (from 13.1).
pub unsafe fn cuMulticastBindMem_v2(
    call: Call<'_>,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    memory: Handle,
) -> Answer {
    bind(call, object, Some(dev), object_offset, |book| book.pin(memory))
}

pub unsafe fn cuMulticastBindAddr(
    call: Call<'_>,
    object: Handle,
    object_offset: usize,
    pointer: CUdeviceptr,
) -> Answer {
    bind(call, object, None, object_offset, |book| book.pin_at(pointer))
}

/// CUDA Driver API, "Multicast Object Management" (from 13.1).
pub unsafe fn cuMulticastBindAddr_v2(
    call: Call<'_>,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    pointer: CUdeviceptr,
) -> Answer {
    bind(call, object, Some(dev), object_offset, |book| book.pin_at(pointer))
}

pub unsafe fn cuMulticastUnbind(
    call: Call<'_>,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    bytes: usize,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let before = process.vmm.book.lock().now();
    call()?;
    let range = (object_offset as u64, bytes as u64);
    process.vmm.note(process, &mut |book, each| book.unbound(object, dev, range, before, each));
    Ok(())
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
