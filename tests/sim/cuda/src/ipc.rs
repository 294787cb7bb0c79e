//! Memory and events of one process in another: CUDA Driver API, "Memory Management", `cuIpcGetMemHandle`,
//! `cuIpcGetEventHandle`; and the memory that other processes can map, of whichever API.
//!
//! That is a file without a name (memfd_create(2)), whose descriptor travels as the exported handle, and an object in the
//! shared state that counts its bytes once. The file begins with a header that says which object it is; the bytes follow.
//! The driver maps them at a *home* address, from which they are mapped elsewhere without the descriptor
//! (mremap(2) with an old size of 0), so an application that closes all descriptors harms nothing
//! but later exports.
//!
//! An allocation becomes shared memory when its handle is first asked for, with the chunk that small
//! allocations share; until then nothing is paid for it. The importer opens the exporter's file
//! through `/proc/<pid>/fd`, so the two must see each other's pids and be the same user's.
//!
//! An interprocess event is an entry of the shared state from its creation, and its name says which.
//! It ends with the process that made it, or when that destroys it: what is then done with imports is
//! undefined by the manual; here they read as never recorded.

use crate::abi::{self, Result, exports, resolve};
use crate::arena::{self, Arena, LAZY, READ_WRITE};
use crate::context::{Context, current};
use crate::driver::{Driver, driver, lock};
use crate::event::{CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS, Common, Event};
use crate::memory::Kind;
use simgpu::memory::ObjectId;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr, CUevent, CUipcMemHandle,
};

const CUDA_ERROR_MAP_FAILED: i32 = 205;
const PAGE: u64 = 4096;

/// `cuMemCreate`.
pub(crate) const VIRTUAL: u64 = u64::from_le_bytes(*b"SIMGPUVM");
/// A `cuMemAlloc`ation, or several that share a chunk.
const MEMORY: u64 = u64::from_le_bytes(*b"SIMGPUIP");
const EVENT: u64 = u64::from_le_bytes(*b"SIMGPUEV");

/// Which object it is that a file has or a handle means.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Tag {
    what: u64,
    /// When the shared state was created: another state's objects are not ours.
    state: u64,
    generation: u64,
    index: u64,
}

impl Tag {
    pub(crate) fn new(driver: &Driver, what: u64, id: ObjectId) -> Tag {
        let ObjectId { index, generation } = id;
        Tag { what, state: created(driver), generation, index: index.into() }
    }

    pub(crate) fn id(&self) -> ObjectId {
        let index = u32::try_from(self.index).unwrap_or(u32::MAX);
        ObjectId { index, generation: self.generation }
    }

    pub(crate) fn is(&self, driver: &Driver, what: u64) -> bool {
        self.what == what && self.state == created(driver)
    }
}

/// Bytes before the memory.
const HEADER: u64 = 1 << 16;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Header {
    pub tag: Tag,
    /// Bytes of memory behind the header.
    pub bytes: u64,
    /// `CU_MEM_LOCATION_TYPE_*` and its id; a device by NVML index.
    pub location: [i32; 2],
    /// Handle types, and what else the importer gets.
    pub notes: [u32; 2],
}
const HEADER_BYTES: usize = size_of::<Header>();

fn created(driver: &Driver) -> u64 {
    driver.session.shared().created_ns.load(std::sync::atomic::Ordering::Relaxed)
}

pub(crate) struct SharedFile {
    fd: RawFd,
    /// Device and inode: tells whether the descriptor is still this file's.
    identity: (u64, u64),
}

fn identity_of(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: the file is only asked, and forgotten before it would close the descriptor.
    let file = std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
    file.metadata().ok().map(|m| (m.dev(), m.ino()))
}

impl SharedFile {
    pub(crate) fn create(bytes: u64) -> Option<SharedFile> {
        // SAFETY: a terminated name; the result is checked.
        let fd = unsafe { libc::memfd_create(c"simgpu".as_ptr(), libc::MFD_CLOEXEC) };
        let file = SharedFile { fd, identity: identity_of(fd)? };
        file.resize(bytes).then_some(file)
    }

    /// The file behind an imported descriptor, which stays the caller's.
    pub(crate) fn import(fd: RawFd) -> Option<SharedFile> {
        // SAFETY: fcntl on any number is safe.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        (own >= 0).then_some(())?;
        Some(SharedFile { fd: own, identity: identity_of(own)? })
    }

    /// The file that another process has under a descriptor of its own.
    pub(crate) fn of_process(pid: i32, fd: RawFd) -> Option<SharedFile> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
        let fd = OwnedFd::from(file).into_raw_fd();
        Some(SharedFile { fd, identity: identity_of(fd)? })
    }

    pub(crate) fn resize(&self, bytes: u64) -> bool {
        let Some(file) = self.file() else { return false };
        file.set_len(HEADER + bytes).is_ok()
    }

    /// The descriptor, if the application has not closed it.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        (identity_of(self.fd) == Some(self.identity)).then_some(self.fd)
    }

    fn file(&self) -> Option<std::mem::ManuallyDrop<std::fs::File>> {
        // SAFETY: an open descriptor, which the wrapper does not close.
        self.descriptor()
            .map(|fd| std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) }))
    }

    /// A descriptor that keeps the memory by itself, for the application: of an open file description of its own,
    /// with a lock that lasts as long as that.
    pub(crate) fn export(&self) -> Option<(RawFd, (u64, u64))> {
        let path = format!("/proc/self/fd/{}", self.descriptor()?);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
        let fd = OwnedFd::from(file).into_raw_fd();
        simgpu::lock::share(fd, 0).then_some((fd, self.identity))
    }

    pub(crate) fn write_header(&self, header: &Header) -> bool {
        // SAFETY: a plain structure, read as bytes.
        let bytes: [u8; HEADER_BYTES] = unsafe { std::mem::transmute(*header) };
        self.file().is_some_and(|f| f.write_all_at(&bytes, 0).is_ok())
    }

    pub(crate) fn header(&self) -> Option<Header> {
        let mut bytes = [0u8; HEADER_BYTES];
        self.file()?.read_exact_at(&mut bytes, 0).ok()?;
        // SAFETY: every bit pattern is a Header.
        Some(unsafe { std::mem::transmute::<[u8; HEADER_BYTES], Header>(bytes) })
    }

    /// Maps `len` bytes from `offset` behind the header, at `at` or anywhere.
    pub(crate) fn map(&self, offset: u64, len: u64, at: Option<u64>) -> Option<u64> {
        let size = self.file()?.metadata().ok()?.len();
        // Beyond the end there is nothing to map; an access would be a SIGBUS.
        (HEADER.checked_add(offset)?.checked_add(len)? <= size).then_some(())?;
        map(Some((self.descriptor()?, HEADER + offset)), len, at)
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        if let Some(fd) = self.descriptor() {
            // SAFETY: our own descriptor, still of our file.
            unsafe { libc::close(fd) };
        }
    }
}

/// Maps shared memory: of a file from an offset, else anonymous.
fn map(file: Option<(RawFd, u64)>, len: u64, at: Option<u64>) -> Option<u64> {
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | fixed;
    // SAFETY: at a fixed address it replaces a range that the caller owns.
    unsafe { arena::map(at.unwrap_or(0), len, READ_WRITE, flags, file) }
}

/// Shared memory without a file, for memory that can't be exported.
pub(crate) fn map_anonymous(len: u64) -> Option<u64> {
    map(None, len, None)
}

/// Maps `len` bytes of the shared mapping at `from` a second time, at `to`.
pub(crate) fn map_again(from: u64, len: u64, to: u64) -> bool {
    let Ok(len) = usize::try_from(len) else { return false };
    // SAFETY: `from` lies in a shared mapping of ours, `to` in a range that the caller owns; an old
    // size of 0 leaves the old mapping as it is.
    let at = unsafe {
        libc::mremap(
            from as *mut libc::c_void,
            0,
            len,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            to as *mut libc::c_void,
        )
    };
    at != libc::MAP_FAILED
}

pub(crate) fn unmap(at: u64, len: u64) {
    if let Ok(len) = usize::try_from(len) {
        // SAFETY: a mapping of ours that nothing refers to any more.
        unsafe { libc::munmap(at as *mut libc::c_void, len) };
    }
}

/// Replaces a range by reserved addresses without memory, or by fresh private memory.
pub(crate) fn replace(at: u64, len: u64, accessible: bool) {
    let protection = if accessible { READ_WRITE } else { libc::PROT_NONE };
    // SAFETY: a range of addresses that the caller owns.
    unsafe { arena::map(at, len, protection, LAZY | libc::MAP_FIXED, None) };
}

/// How often this process holds each object: the shared state knows only whether.
static HELD: Mutex<BTreeMap<ObjectId, u32>> = Mutex::new(BTreeMap::new());

/// Makes an object of memory that this process was charged for; held once.
pub(crate) fn share(driver: &Driver, gpu: usize, bytes: u64) -> Option<ObjectId> {
    let mut held = lock(&HELD);
    let id = driver.session.share(gpu, bytes)?;
    held.insert(id, 1);
    Some(id)
}

pub(crate) fn hold(driver: &Driver, id: ObjectId) -> Option<(usize, u64)> {
    let mut held = lock(&HELD);
    let found = driver.session.hold(id)?;
    *held.entry(id).or_default() += 1;
    Some(found)
}

pub(crate) fn let_go(driver: &Driver, id: ObjectId) {
    let mut held = lock(&HELD);
    if let Some(count) = held.get_mut(&id) {
        *count -= 1;
        if *count == 0 {
            held.remove(&id);
            driver.session.let_go(id);
        }
    }
}

/// The descriptor's number as an application hands it in: an `int` in a pointer.
pub(crate) fn descriptor_in(handle: *mut std::ffi::c_void) -> Option<RawFd> {
    RawFd::try_from(handle as isize).ok().filter(|fd| *fd >= 0)
}

// Memory by handle.

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER: c_uint = 1;
/// `CUipcEventHandle`: of the same form as the handles of memory.
type CUipcEventHandle = CUipcMemHandle;

/// What a handle says.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct Name {
    tag: Tag,
    pid: i32,
    fd: i32,
    gpu: u64,
    /// The allocation in the shared range.
    offset: u64,
    size: u64,
}
const _: () = assert!(size_of::<Name>() == size_of::<CUipcMemHandle>());

impl Name {
    fn new(driver: &Driver, what: u64, id: ObjectId) -> Name {
        let pid = std::process::id().cast_signed();
        Name { tag: Tag::new(driver, what, id), pid, ..Name::default() }
    }

    fn packed(self) -> CUipcMemHandle {
        // SAFETY: 64 bytes for 64 bytes.
        unsafe { std::mem::transmute::<Name, CUipcMemHandle>(self) }
    }

    /// What another process named. A process does not open its own handles.
    fn of(driver: &Driver, what: u64, handle: CUipcMemHandle) -> Result<Name> {
        // SAFETY: 64 bytes for 64 bytes; every bit pattern is a Name.
        let name = unsafe { std::mem::transmute::<CUipcMemHandle, Name>(handle) };
        if !name.tag.is(driver, what) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let is_own = name.pid == std::process::id().cast_signed();
        if is_own { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(name) }
    }
}

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
    unmap(copy, len);
    let object = share(driver, gpu, len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let tag = Tag::new(driver, MEMORY, object);
    let header = Header { tag, bytes: len, location: [0; 2], notes: [0; 2] };
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
    replace(start, exported.len, true);
    let_go(driver, exported.object);
    true
}

fn name(address: u64) -> Result<Name> {
    let driver = driver()?;
    current()?;
    let mut memory = driver.memory();
    let (gpu, size) = memory.exportable(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (start, len) = Arena::range_of(memory.chunk(), address, size);
    if !start.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    export(driver, &mut memory.exports, gpu, (start, len))?;
    let exported = memory.exports.get(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(Name {
        fd: exported.file.descriptor().ok_or(CUDA_ERROR_MAP_FAILED)?,
        gpu: gpu as u64,
        offset: address - start,
        size,
        ..Name::new(driver, MEMORY, exported.object)
    })
}

fn open(handle: CUipcMemHandle) -> Result<u64> {
    let driver = driver()?;
    let context = current()?;
    let name = Name::of(driver, MEMORY, handle)?;
    // The devices are no peers.
    if context.device.gpu as u64 != name.gpu {
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
    let object = name.tag.id();
    let file = SharedFile::of_process(name.pid, name.fd).ok_or(CUDA_ERROR_MAP_FAILED)?;
    let header = file.header().filter(|h| h.tag == name.tag).ok_or(CUDA_ERROR_MAP_FAILED)?;
    let end = name.offset.checked_add(name.size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if end > header.bytes {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let base = file.map(0, header.bytes, None).ok_or(CUDA_ERROR_MAP_FAILED)?;
    if hold(driver, object).is_none() {
        unmap(base, header.bytes);
        return Err(CUDA_ERROR_MAP_FAILED);
    }
    let at = base + name.offset;
    opened.insert(at, Opened { name, context, base, len: header.bytes, count: 1 });
    driver.memory().insert(at, name.size, Kind::Imported, context, 0);
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
    driver.memory().remove(at);
    unmap(o.base, o.len);
    let_go(driver, o.name.tag.id());
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

fn name_event(event: CUevent) -> Result<Name> {
    let event: &'static Event = resolve(event)?;
    // "This event must have been created with the CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING
    // flags set."
    let common = event.common().filter(|c| !c.imported).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    Ok(Name::new(driver()?, EVENT, common.id))
}

fn open_event(handle: CUipcEventHandle) -> Result<&'static Event> {
    let driver = driver()?;
    current()?;
    let id = Name::of(driver, EVENT, handle)?.tag.id();
    let gpu = driver.session.event_gpu(id).ok_or(CUDA_ERROR_MAP_FAILED)?;
    let home = driver.devices.iter().find(|d| d.gpu == gpu).ok_or(CUDA_ERROR_MAP_FAILED)?;
    // "behaves like a locally created event with the CU_EVENT_DISABLE_TIMING flag specified".
    let flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    Ok(Event::create(flags, Some(Common { id, home, imported: true })))
}

exports! {
    fn cuIpcGetMemHandle(address: CUdeviceptr) -> CUipcMemHandle { Ok(name(address)?.packed()) }
    fn cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2(handle: CUipcMemHandle, flags: c_uint) -> CUdeviceptr {
        // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
        if flags == LAZY_PEER { open(handle) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
    fn cuIpcCloseMemHandle(address: CUdeviceptr) { close(driver()?, address) }
    fn cuIpcGetEventHandle(event: CUevent) -> CUipcEventHandle { Ok(name_event(event)?.packed()) }
    fn cuIpcOpenEventHandle(name: CUipcEventHandle) -> CUevent { open_event(name).map(abi::handle) }
}
