//! The hooks themselves. Counts go up and down after the driver's call succeeded; while it is under
//! way the book's entry is pinned.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::book::{Book, Ended, New, Ticket};
use super::tiles::Region;
use super::{create, device_of, home_of, release_unseen};
use crate::place::{self, Look};
use crate::quota;
use crate::real::Real;
use crate::shares;
use crate::state::{self, Process, Standing};
use crate::thread::Depth;
use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use tessera_cuda::types::*;

type Handle = CUmemGenericAllocationHandle;

/// CUDA Driver API, "Virtual Memory Management". Charged to the GPU of the location, not to the
/// current context's.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemCreate(
    real: &Real<
        unsafe extern "C" fn(
            *mut Handle,
            usize,
            *const CUmemAllocationProp,
            c_ulonglong,
        ) -> CUresult,
    >,
    handle: *mut Handle,
    bytes: usize,
    prop: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(handle, bytes, prop, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    if handle.is_null() || prop.is_null() || bytes == 0 {
        return call();
    }
    // SAFETY: not null, and the caller promises a whole structure.
    let location = unsafe { (&raw const (*prop).location).read_unaligned() };
    match device_of(location) {
        Some(device) => create(process, device, bytes as u64, &call, handle),
        None => call(),
    }
}

/// CUDA Driver API, "Virtual Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemRelease(
    real: &Real<unsafe extern "C" fn(Handle) -> CUresult>,
    handle: Handle,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(handle) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let Some(ticket) = process.vmm.book.lock().releasing(handle) else { return call() };
    let result = call();
    let done = result == CUDA_SUCCESS;
    process.vmm.note(process, &mut |book, each| book.released(ticket, done, each));
    result
}

/// What a success changes.
type Done<'a> = &'a dyn Fn(&mut Book, Ticket, &mut dyn FnMut(Ended));

/// Calls the driver with `ticket`'s entry pinned; `done` notes a success.
fn pinned(
    process: &'static Process,
    ticket: Ticket,
    call: &dyn Fn() -> CUresult,
    done: Done<'_>,
) -> CUresult {
    let result = call();
    let done = if result == CUDA_SUCCESS { done } else { &Book::unpin };
    process.vmm.note(process, &mut |book, each| done(book, ticket, each));
    result
}

/// CUDA Driver API, "Virtual Memory Management": one more reference, to be released.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemRetainAllocationHandle(
    real: &Real<unsafe extern "C" fn(*mut Handle, *mut c_void) -> CUresult>,
    handle: *mut Handle,
    address: *mut c_void,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(handle, address) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let ticket = process.vmm.book.lock().pin_at(address.addr() as u64);
    let Some(ticket) = ticket else { return call() };
    pinned(process, ticket, &call, &|book, ticket, each| book.retained(ticket, each))
}

/// CUDA Driver API, "Virtual Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemMap(
    real: &Real<unsafe extern "C" fn(u64, usize, usize, Handle, c_ulonglong) -> CUresult>,
    pointer: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: Handle,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pointer, bytes, offset, handle, flags) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let Some(ticket) = process.vmm.book.lock().pin(handle) else { return call() };
    pinned(process, ticket, &call, &|book, ticket, each| {
        book.mapped(ticket, pointer, bytes as u64, each);
    })
}

/// CUDA Driver API, "Virtual Memory Management". One range may cover several mappings.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemUnmap(
    real: &Real<unsafe extern "C" fn(CUdeviceptr, usize) -> CUresult>,
    pointer: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pointer, bytes) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let before = process.vmm.book.lock().now();
    let result = call();
    if result == CUDA_SUCCESS {
        process
            .vmm
            .note(process, &mut |book, each| book.unmapped(pointer, bytes as u64, before, each));
    }
    result
}

/// What a tile operation is about.
fn region(info: &CUarrayMapInfo) -> Region {
    let [a, b, c, d] = info.subresource;
    // The two halves of a word, in memory's order (little-endian, as all of CUDA's hosts).
    let halves = |word: u64| (word & 0xffff_ffff, word >> 32);
    let resource = info.resource.addr() as u64;
    let (first, second) = halves(a);
    let narrow = |word: u64| u32::try_from(word).unwrap_or(u32::MAX);
    if info.subresourceType == 1 {
        // layer, (padding), offset, size
        let (low, high) = ([b, 0, 0], [b.saturating_add(c), 1, 1]);
        let layer = narrow(first);
        return Region { resource, subresource: Region::TAIL, level: 0, layer, low, high };
    }
    // level, layer, three offsets, three extents
    let (x, y) = halves(b);
    let (z, width) = halves(c);
    let (height, depth) = halves(d);
    Region {
        resource,
        subresource: Region::LEVEL,
        level: narrow(first),
        layer: narrow(second),
        low: [x, y, z],
        high: [x + width, y + height, z + depth],
    }
}

/// CUDA Driver API, "Virtual Memory Management". In stream order, but noted at once.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemMapArrayAsync(
    real: &Real<unsafe extern "C" fn(*mut CUarrayMapInfo, c_uint, CUstream) -> CUresult>,
    list: *mut CUarrayMapInfo,
    count: c_uint,
    stream: CUstream,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(list, count, stream) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || list.is_null() {
        return result;
    }
    let Some(process) = state::armed() else { return result };
    let context = match place::of_stream(process, stream) {
        Look::At(place) => place.serial,
        _ => 0,
    };
    for index in 0..count as usize {
        // SAFETY: the caller promises `count` whole entries.
        let info = unsafe { list.add(index).read_unaligned() };
        let handle = (info.memOperationType == CU_MEM_OPERATION_TYPE_MAP).then_some(info.memHandle);
        process
            .vmm
            .note(process, &mut |book, each| book.tile(region(&info), handle, context, each));
    }
    result
}

/// CUDA Driver API, "Virtual Memory Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemExportToShareableHandle(
    real: &Real<unsafe extern "C" fn(*mut c_void, Handle, c_int, c_ulonglong) -> CUresult>,
    shareable: *mut c_void,
    handle: Handle,
    handle_type: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(shareable, handle, handle_type, flags) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || shareable.is_null() {
        return result;
    }
    let Some(process) = state::armed() else { return result };
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
    result
}

/// CUDA Driver API, "Virtual Memory Management". The exporter is charged; here it is marked.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemImportFromShareableHandle(
    real: &Real<unsafe extern "C" fn(*mut Handle, *mut c_void, c_int) -> CUresult>,
    handle: *mut Handle,
    shareable: *mut c_void,
    handle_type: CUmemAllocationHandleType,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(handle, shareable, handle_type) };
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    let mut mark = match handle_type {
        CU_MEM_HANDLE_TYPE_FABRIC if !shareable.is_null() => {
            // SAFETY: the caller promises 64 bytes for this type.
            shares::name(&unsafe { shareable.cast::<[u8; 64]>().read_unaligned() })
        }
        _ => shares::descriptor(None),
    };
    shares::mark_import(process, mark);
    let result = call();
    if result != CUDA_SUCCESS || handle.is_null() {
        shares::unmark_import(process, mark);
        return result;
    }
    // SAFETY: the driver wrote it.
    let handle = unsafe { *handle };
    let home = home_of(process, handle);
    if let Some((_, gpu)) = home
        && handle_type != CU_MEM_HANDLE_TYPE_FABRIC
    {
        let turned_out = shares::on_gpu(mark, gpu);
        shares::mark_import(process, turned_out);
        shares::unmark_import(process, mark);
        mark = turned_out;
    }
    // Multicast objects and host memory are no device memory of anybody's.
    let (device, gpu) = home.unwrap_or((-1, 0));
    let import = if home.is_some() { mark } else { 0 };
    let new = New { gpu, device, bytes: 0, import };
    let mut noted = Ok(false);
    process.vmm.note(process, &mut |book, each| noted = book.imported(handle, new, each));
    if noted != Ok(true) || import == 0 {
        shares::unmark_import(process, mark);
    }
    if noted.is_err() {
        release_unseen(handle);
        return quota::refuse_unnoted("cuMemImportFromShareableHandle");
    }
    result
}

/// CUDA Driver API, "Memory Management": a dma-buf keeps what is behind the address alive.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMemGetHandleForAddressRange(
    real: &Real<unsafe extern "C" fn(*mut c_void, u64, usize, c_int, c_ulonglong) -> CUresult>,
    handle: *mut c_void,
    pointer: CUdeviceptr,
    bytes: usize,
    handle_type: CUmemRangeHandleType,
    flags: c_ulonglong,
) -> CUresult {
    /// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
    const DMA_BUF_FD: CUmemRangeHandleType = 1;
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(handle, pointer, bytes, handle_type, flags) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || handle.is_null() || handle_type != DMA_BUF_FD {
        return result;
    }
    let Some(process) = state::armed() else { return result };
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
        && let Some(base) = crate::ipc::base_of(process, pointer)
        && process.shares.export(base, |export| export.opened(fd)).is_err()
    {
        // SAFETY: the driver has just opened it, and nobody else has seen it.
        unsafe { libc::close(fd) };
        return quota::refuse_unnoted("cuMemGetHandleForAddressRange");
    }
    result
}

/// CUDA Driver API, "Multicast Object Management": it owns no memory, and holds what is bound to it.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMulticastCreate(
    real: &Real<unsafe extern "C" fn(*mut Handle, *const CUmulticastObjectProp) -> CUresult>,
    object: *mut Handle,
    prop: *const CUmulticastObjectProp,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(object, prop) };
    let Some(_depth) = Depth::enter() else { return result };
    if result != CUDA_SUCCESS || object.is_null() {
        return result;
    }
    let Some(process) = state::armed() else { return result };
    // SAFETY: the driver wrote it.
    let handle = unsafe { *object };
    let new = New { gpu: 0, device: -1, bytes: 0, import: 0 };
    let mut noted = Ok(());
    process.vmm.note(process, &mut |book, each| noted = book.made(handle, new, each));
    if noted.is_err() {
        // What is bound to it would not be seen to live on.
        release_unseen(handle);
        return quota::refuse_unnoted("cuMulticastCreate");
    }
    result
}

/// Which memory is bound.
enum Bound {
    Handle(Handle),
    At(CUdeviceptr),
}

fn bind(
    object: Handle,
    device: Option<CUdevice>,
    memory: &Bound,
    offset: usize,
    call: &dyn Fn() -> CUresult,
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let tickets = {
        let mut book = process.vmm.book.lock();
        let memory = match *memory {
            Bound::Handle(handle) => book.pin(handle),
            Bound::At(pointer) => book.pin_at(pointer),
        };
        memory.map(|memory| (memory, book.pin(object)))
    };
    let Some((memory, object)) = tickets else { return call() };
    let result = call();
    process.vmm.note(process, &mut |book, each| match object {
        Some(object) if result == CUDA_SUCCESS => {
            book.bound(object, memory, device, offset as u64, each);
        }
        object => {
            book.unpin(memory, each);
            if let Some(object) = object {
                book.unpin(object, each);
            }
        }
    });
    result
}

/// CUDA Driver API, "Multicast Object Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMulticastBindMem(
    real: &Real<unsafe extern "C" fn(Handle, usize, Handle, usize, usize, c_ulonglong) -> CUresult>,
    object: Handle,
    object_offset: usize,
    memory: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    bind(object, None, &Bound::Handle(memory), object_offset, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(object, object_offset, memory, offset, bytes, flags) }
    })
}

/// CUDA Driver API, "Multicast Object Management" (from 13.1).
///
/// # Safety
/// As the driver's.
#[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
pub unsafe fn cuMulticastBindMem_v2(
    real: &Real<
        unsafe extern "C" fn(
            Handle,
            CUdevice,
            usize,
            Handle,
            usize,
            usize,
            c_ulonglong,
        ) -> CUresult,
    >,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    memory: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    bind(object, Some(dev), &Bound::Handle(memory), object_offset, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(object, dev, object_offset, memory, offset, bytes, flags) }
    })
}

/// CUDA Driver API, "Multicast Object Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMulticastBindAddr(
    real: &Real<unsafe extern "C" fn(Handle, usize, u64, usize, c_ulonglong) -> CUresult>,
    object: Handle,
    object_offset: usize,
    pointer: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    bind(object, None, &Bound::At(pointer), object_offset, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(object, object_offset, pointer, bytes, flags) }
    })
}

/// CUDA Driver API, "Multicast Object Management" (from 13.1).
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMulticastBindAddr_v2(
    real: &Real<unsafe extern "C" fn(Handle, CUdevice, usize, u64, usize, c_ulonglong) -> CUresult>,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    pointer: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    bind(object, Some(dev), &Bound::At(pointer), object_offset, &|| {
        // SAFETY: the caller's own arguments.
        unsafe { real(object, dev, object_offset, pointer, bytes, flags) }
    })
}

/// CUDA Driver API, "Multicast Object Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuMulticastUnbind(
    real: &Real<unsafe extern "C" fn(Handle, CUdevice, usize, usize) -> CUresult>,
    object: Handle,
    dev: CUdevice,
    object_offset: usize,
    bytes: usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(object, dev, object_offset, bytes) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let before = process.vmm.book.lock().now();
    let result = call();
    if result == CUDA_SUCCESS {
        process.vmm.note(process, &mut |book, each| {
            let range = (object_offset as u64, bytes as u64);
            book.unbound(object, dev, range, before, each);
        });
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    fn info(subresource_type: c_int, words: [u32; 8]) -> CUarrayMapInfo {
        let pair = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        CUarrayMapInfo {
            resourceType: 0,
            resource: ptr::without_provenance_mut(7),
            subresourceType: subresource_type,
            subresource: [pair(0), pair(2), pair(4), pair(6)],
            memOperationType: CU_MEM_OPERATION_TYPE_MAP,
            memHandleType: 0,
            memHandle: 1,
            offset: 0,
            deviceBitMask: 1,
            flags: 0,
            reserved: [0; 2],
        }
    }

    #[test]
    fn tiles_are_read_as_the_header_lays_them_out() {
        let level = region(&info(0, [2, 3, 64, 128, 1, 32, 16, 8]));
        assert_eq!((level.resource, level.level, level.layer), (7, 2, 3));
        assert_eq!((level.low, level.high), ([64, 128, 1], [96, 144, 9]));
        // layer 5, offset 65536, size 131072
        let tail = region(&info(1, [5, 0, 65536, 0, 131_072, 0, 9, 9]));
        assert_eq!((tail.subresource, tail.layer), (Region::TAIL, 5));
        assert_eq!((tail.low[0], tail.high[0]), (65536, 196_608));
    }
}
