//! Pools and their allocations in other processes: `cuMemPoolExportToShareableHandle` and the like.
//!
//! An exportable pool's chunks lie in one shared file, whose descriptor is the pool's handle; a chunk
//! becomes an object of the shared state when an allocation in it is first exported.

use super::Pool;
use super::props::{HANDLE_FABRIC, HANDLE_FD, HANDLE_NONE, Location, Props};
use crate::abi::{exports, get, put};
use crate::context::current;
use crate::driver::{Driver, driver, lock};
use crate::errors::Result;
use crate::handle::{handle, resolve};
use crate::shared::{self, Header, SharedFile, What, descriptor_in};
use simgpu::memory::Use;
use simgpu::objects::ObjectId;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr,
    CUmemoryPool,
};

const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUPP");

/// Where an exportable pool's chunks are.
pub(super) struct Shared {
    file: SharedFile,
    len: u64,
    /// By address: where in the file, and the object once it is one.
    chunks: BTreeMap<u64, (u64, Option<ObjectId>)>,
    /// Made by another process: nothing is allocated from it.
    pub(super) imported: bool,
}

impl Shared {
    /// For a pool that can be exported.
    pub(super) fn create(props: &Props) -> Option<Shared> {
        (props.handles & HANDLE_FD != 0).then_some(())?;
        let file = SharedFile::create(0)?;
        Some(Shared { file, len: 0, chunks: BTreeMap::new(), imported: false })
    }

    /// Backs a new chunk.
    pub(super) fn add(&mut self, start: u64, len: u64) -> bool {
        let offset = self.len;
        let mapped =
            self.file.resize(offset + len) && self.file.map(offset, len, Some(start)).is_some();
        if mapped {
            self.len += len;
            self.chunks.insert(start, (offset, None));
        }
        mapped
    }

    /// A chunk goes; whether its bytes are an object's, and so not the pool's to give back.
    pub(super) fn remove(&mut self, driver: &Driver, start: u64, len: u64) -> bool {
        let object = self.chunks.remove(&start).and_then(|(_, object)| object);
        if object.is_none() {
            shared::discard(start, len);
        }
        shared::replace(start, len, true);
        if let Some(object) = object {
            shared::let_go(driver, object);
        }
        object.is_some()
    }
}

/// `CUmemPoolPtrExportData`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PointerData {
    magic: u64,
    generation: u64,
    index: u32,
    zero: u32,
    chunk_offset: u64,
    chunk_len: u64,
    offset: u64,
    size: u64,
    rest: u64,
}
const _: () = assert!(size_of::<PointerData>() == 64);

/// Imported allocations by address: the mapping and the object.
static IMPORTED: Mutex<BTreeMap<u64, (u64, u64, ObjectId)>> = Mutex::new(BTreeMap::new());

/// Frees an imported allocation; whether there was one.
pub(crate) fn free_imported(driver: &Driver, at: u64) -> bool {
    let Some((base, len, object)) = lock(&IMPORTED).remove(&at) else { return false };
    driver.memory().remove_mapped(at);
    shared::unmap(base, len);
    shared::let_go(driver, object);
    true
}

fn export(driver: &Driver, pool: &'static Pool) -> Result<c_int> {
    let inner = lock(&pool.inner);
    let shared = inner.shared.as_ref().filter(|s| !s.imported).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let none = ObjectId { index: u32::MAX, generation: 0 };
    let mut header = Header::new(driver, What::Pool, none, 0);
    let place = inner.props.location.raw();
    let gpu = inner.device.and_then(|d| i32::try_from(d.gpu).ok());
    header.location = [place.r#type, gpu.unwrap_or(place.id)];
    if !shared.file.write_header(&header) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    shared.file.duplicate().ok_or(CUDA_ERROR_OUT_OF_MEMORY)
}

fn import(driver: &'static Driver, fd: c_int) -> Result<&'static Pool> {
    let file = SharedFile::import(fd).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let header =
        file.header().filter(|h| h.is(driver, What::Pool)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let location = match header.location {
        [1, gpu] => {
            let device = driver.devices.iter().find(|d| i32::try_from(d.gpu) == Ok(gpu));
            Location::Device(device.ok_or(CUDA_ERROR_NOT_SUPPORTED)?.ordinal)
        }
        [3, node] => Location::HostNuma(node),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    // "For imported pools this value is always CU_MEM_HANDLE_TYPE_NONE".
    let props = Props { handles: HANDLE_NONE, location, ..Props::default() };
    let pool = Pool::create(driver, props, false)?;
    lock(&pool.inner).shared =
        Some(Shared { file, len: 0, chunks: BTreeMap::new(), imported: true });
    Ok(pool)
}

fn export_pointer(driver: &Driver, at: u64) -> Result<PointerData> {
    let (pool, size) = driver.memory().pooled(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut inner = lock(&pool.inner);
    let device = inner.device.ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    let start = inner.space.chunk_of(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let len = inner.space.chunk_len(start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let shared = inner.shared.as_mut().filter(|s| !s.imported).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (chunk_offset, object) = shared.chunks.get_mut(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let id = match *object {
        Some(id) => id,
        None => *object.insert(
            shared::share(driver, device.gpu, Use::Pool, len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?,
        ),
    };
    Ok(PointerData {
        magic: MAGIC,
        generation: id.generation,
        index: id.index,
        zero: 0,
        chunk_offset: *chunk_offset,
        chunk_len: len,
        offset: at - start,
        size,
        rest: 0,
    })
}

fn import_pointer(driver: &Driver, pool: &'static Pool, data: &PointerData) -> Result<u64> {
    let context = current()?;
    let inner = lock(&pool.inner);
    let shared = inner.shared.as_ref().filter(|s| s.imported).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let end = data.offset.checked_add(data.size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if data.magic != MAGIC || end > data.chunk_len {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let object = ObjectId { index: data.index, generation: data.generation };
    let base =
        shared.file.map(data.chunk_offset, data.chunk_len, None).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if shared::hold(driver, object).is_none() {
        shared::unmap(base, data.chunk_len);
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let at = base + data.offset;
    lock(&IMPORTED).insert(at, (base, data.chunk_len, object));
    driver.memory().insert_imported(at, data.size, context);
    Ok(at)
}

fn kind(handle_type: c_int, flags: c_ulonglong) -> Result<()> {
    match (handle_type, flags) {
        (HANDLE_FD, 0) => Ok(()),
        // No IMEX channel here.
        (HANDLE_FABRIC, 0) => Err(800),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

exports! {
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, pool: CUmemoryPool, handle_type: c_int, flags: c_ulonglong) {
        let driver = driver()?;
        kind(handle_type, flags)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out.cast::<c_int>(), export(driver, resolve(pool)?)?)
    }
    fn cuMemPoolImportFromShareableHandle(out: *mut CUmemoryPool, shareable: *mut c_void, handle_type: c_int, flags: c_ulonglong) {
        let driver = driver()?;
        kind(handle_type, flags)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let fd = descriptor_in(shareable).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(out, handle(import(driver, fd)?))
    }
    fn cuMemPoolExportPointer(out: *mut PointerData, at: CUdeviceptr) {
        put(out, export_pointer(driver()?, at)?)
    }
    fn cuMemPoolImportPointer(out: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut PointerData) {
        let driver = driver()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, import_pointer(driver, resolve(pool)?, &get(data)?)?)
    }
}
