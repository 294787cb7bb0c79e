//! Memory that other processes can map: a file without a name (memfd_create(2)), whose descriptor
//! travels as the exported handle, and an object in the shared state that counts its bytes once.
//!
//! The file begins with a header that says which object it is; the bytes follow. The driver maps
//! them at a *home* address, from which they are mapped elsewhere without the descriptor
//! (mremap(2) with an old size of 0), so an application that closes all descriptors harms nothing
//! but later exports.

use crate::driver::{Driver, lock};
use simgpu::memory::ObjectId;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Mutex;

/// Bytes before the memory.
const HEADER: u64 = 1 << 16;
const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUSH");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum What {
    /// `cuMemCreate`.
    Virtual = 1,
    /// A `cuMemAlloc`ation, or several that share a chunk.
    Ipc = 3,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Header {
    magic: u64,
    /// When the shared state was created: another state's objects are not ours.
    state: u64,
    what: u32,
    index: u32,
    generation: u64,
    /// Bytes of memory behind the header.
    pub bytes: u64,
    /// `CU_MEM_LOCATION_TYPE_*` and its id; a device by NVML index.
    pub location: [i32; 2],
    /// Handle types, and what else the importer gets.
    pub notes: [u32; 2],
}
const HEADER_BYTES: usize = size_of::<Header>();

impl Header {
    pub(crate) fn new(driver: &Driver, what: What, id: ObjectId, bytes: u64) -> Header {
        Header {
            magic: MAGIC,
            state: created(driver),
            what: what as u32,
            index: id.index,
            generation: id.generation,
            bytes,
            location: [0; 2],
            notes: [0; 2],
        }
    }

    pub(crate) fn id(&self) -> ObjectId {
        ObjectId { index: self.index, generation: self.generation }
    }

    pub(crate) fn is(&self, driver: &Driver, what: What) -> bool {
        self.magic == MAGIC && self.state == created(driver) && self.what == what as u32
    }
}

/// When the shared state was created: distinguishes it from another.
pub(crate) fn created(driver: &Driver) -> u64 {
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
    let (fd, offset) = file.unwrap_or((-1, 0));
    let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: a new mapping; at a fixed address it replaces a range that the caller owns.
    let mapped = unsafe {
        libc::mmap(
            at.unwrap_or(0) as *mut libc::c_void,
            usize::try_from(len).ok()?,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE | anonymous | fixed,
            fd,
            libc::off_t::try_from(offset).ok()?,
        )
    };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
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
pub(crate) fn replace(at: u64, len: u64, accessible: bool) -> bool {
    let protection = if accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    let Ok(len) = usize::try_from(len) else { return false };
    // SAFETY: a range of addresses that the caller owns.
    let mapped = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            len,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// How often this process holds each object: the shared state knows only whether.
static HELD: Mutex<BTreeMap<ObjectId, u32>> = Mutex::new(BTreeMap::new());

/// Makes an object of memory that this process was charged for; held once.
pub(crate) fn share(driver: &Driver, gpu: usize, kind: Use, bytes: u64) -> Option<ObjectId> {
    let mut held = lock(&HELD);
    let id = driver.session.share(gpu, kind, bytes)?;
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
