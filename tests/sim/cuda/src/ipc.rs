//! Memory of one process in another: CUDA Driver API, "Memory Management", `cuIpcGetMemHandle`.
//!
//! An allocation becomes shared memory when its handle is first asked for, with the chunk that small
//! allocations share; until then nothing is paid for it. The importer opens the exporter's file
//! through `/proc/<pid>/fd`, so the two must see each other's pids and be the same user's.

use crate::abi::{exports, put};
use crate::arena::Arena;
use crate::context::{Context, current};
use crate::driver::{Driver, driver, lock};
use crate::errors::Result;
use crate::shared::{self, Header, SharedFile, What};
use simgpu::memory::ObjectId;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr, CUipcMemHandle,
};

const CUDA_ERROR_MAP_FAILED: i32 = 205;
const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUIP");
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER: c_uint = 1;

/// What a handle says.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Name {
    magic: u64,
    pid: i32,
    fd: i32,
    index: u32,
    gpu: u32,
    generation: u64,
    /// The allocation in the shared range.
    offset: u64,
    size: u64,
    zero: [u64; 2],
}
const _: () = assert!(size_of::<Name>() == size_of::<CUipcMemHandle>());

/// A range of this process's device memory that others may map.
pub(crate) struct Exported {
    len: u64,
    file: SharedFile,
    object: ObjectId,
}

/// Exported ranges by address; part of the process's memory.
pub(crate) type Exports = BTreeMap<u64, Exported>;

/// Another process's memory, by the address at which it was opened.
struct Opened {
    name: Name,
    context: &'static Context,
    base: u64,
    len: u64,
    count: u32,
}

static OPENED: Mutex<BTreeMap<u64, Opened>> = Mutex::new(BTreeMap::new());

/// Makes the range that an allocation lies in shared memory, with what is in it.
fn export(
    driver: &Driver,
    exports: &mut Exports,
    gpu: usize,
    (start, len): (u64, u64),
) -> Result<()> {
    if exports.contains_key(&start) {
        return Ok(());
    }
    let file = SharedFile::create(len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let copy = file.map(0, len, None).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    const PAGE: u64 = 4096;
    for at in (0..len).step_by(4096) {
        // SAFETY: whole pages of an allocation's range, and of the fresh mapping of that length.
        unsafe {
            let from = std::slice::from_raw_parts((start + at) as *const u64, 512);
            if from.iter().any(|word| *word != 0) {
                let to = (copy + at) as *mut u64;
                std::ptr::copy_nonoverlapping(from.as_ptr(), to, 512);
            }
        }
    }
    debug_assert!(len.is_multiple_of(PAGE));
    shared::unmap(copy, len);
    let object =
        shared::share(driver, gpu, Use::Allocation, len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let header = Header::new(driver, What::Ipc, object, len);
    if !file.write_header(&header) || file.map(0, len, Some(start)).is_none() {
        // The object stays counted for this process until it ends, as the memory would be.
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    exports.insert(start, Exported { len, file, object });
    Ok(())
}

/// A range of chunks came free: if others may hold it, they keep the memory, and the addresses get
/// fresh memory. Whether it was such a range; then it is not this process's to give back.
pub(crate) fn withdraw(driver: &Driver, exports: &mut Exports, start: u64) -> bool {
    let Some(exported) = exports.remove(&start) else { return false };
    shared::replace(start, exported.len, true);
    shared::let_go(driver, exported.object);
    true
}

fn name(address: u64) -> Result<Name> {
    let driver = driver()?;
    current()?;
    let mut memory = driver.memory();
    let (gpu, size) = memory.exportable(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (start, len) = Arena::range_of(memory.chunk(), address, size);
    if !start.is_multiple_of(4096) || !len.is_multiple_of(4096) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    export(driver, &mut memory.exports, gpu, (start, len))?;
    let exported = memory.exports.get(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(Name {
        magic: MAGIC,
        // SAFETY: getpid has no preconditions.
        pid: unsafe { libc::getpid() },
        fd: exported.file.descriptor().ok_or(CUDA_ERROR_MAP_FAILED)?,
        index: exported.object.index,
        gpu: u32::try_from(gpu).unwrap_or(u32::MAX),
        generation: exported.object.generation,
        offset: address - start,
        size,
        zero: [0; 2],
    })
}

fn open(name: Name) -> Result<u64> {
    let driver = driver()?;
    let context = current()?;
    if name.magic != MAGIC {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: getpid has no preconditions.
    if name.pid == unsafe { libc::getpid() } {
        // A process does not open its own handles.
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    // The devices are no peers.
    if context.device.gpu != name.gpu as usize {
        return Err(CUDA_ERROR_MAP_FAILED);
    }
    let mut opened = lock(&OPENED);
    // "the reference count on the handle is incremented by 1 and the existing device pointer is
    // returned".
    let known = opened.iter_mut().find(|(_, o)| o.name == name && std::ptr::eq(o.context, context));
    if let Some((&at, o)) = known {
        o.count += 1;
        return Ok(at);
    }
    let object = ObjectId { index: name.index, generation: name.generation };
    let file = SharedFile::of_process(name.pid, name.fd).ok_or(CUDA_ERROR_MAP_FAILED)?;
    let header = file
        .header()
        .filter(|h| h.is(driver, What::Ipc) && h.id() == object)
        .ok_or(CUDA_ERROR_MAP_FAILED)?;
    let end = name.offset.checked_add(name.size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if end > header.bytes {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let base = file.map(0, header.bytes, None).ok_or(CUDA_ERROR_MAP_FAILED)?;
    if shared::hold(driver, object).is_none() {
        shared::unmap(base, header.bytes);
        return Err(CUDA_ERROR_MAP_FAILED);
    }
    let at = base + name.offset;
    opened.insert(at, Opened { name, context, base, len: header.bytes, count: 1 });
    driver.memory().insert_imported(at, name.size, context);
    Ok(at)
}

/// "When the reference count reaches 0, this API unmaps the memory."
fn close(driver: &Driver, at: u64) -> Result<()> {
    let mut opened = lock(&OPENED);
    let found = opened.get_mut(&at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    found.count -= 1;
    if found.count == 0 {
        end(driver, &mut opened, at);
    }
    Ok(())
}

fn end(driver: &Driver, opened: &mut BTreeMap<u64, Opened>, at: u64) {
    let Some(o) = opened.remove(&at) else { return };
    driver.memory().remove_mapped(at);
    shared::unmap(o.base, o.len);
    shared::let_go(driver, ObjectId { index: o.name.index, generation: o.name.generation });
}

pub(crate) fn close_all_of(driver: &Driver, context: &'static Context) {
    let mut opened = lock(&OPENED);
    let mine: Vec<u64> = opened
        .iter()
        .filter(|(_, o)| std::ptr::eq(o.context, context))
        .map(|(at, _)| *at)
        .collect();
    for at in mine {
        end(driver, &mut opened, at);
    }
}

exports! {
    fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, address: CUdeviceptr) {
        driver()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: 64 bytes for 64 bytes.
        put(out, unsafe { std::mem::transmute::<Name, CUipcMemHandle>(name(address)?) })
    }
    fn cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2(out: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) {
        driver()?;
        // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
        if out.is_null() || flags != LAZY_PEER {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: 64 bytes for 64 bytes; every bit pattern is a Name.
        put(out, open(unsafe { std::mem::transmute::<CUipcMemHandle, Name>(handle) })?)
    }
    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        close(driver()?, address)
    }
}
