//! The few system calls this crate makes, safely wrapped: open, `fstat`, `mmap`,
//! open-file-description locks, clock, sleep. Each retries `EINTR`, and none allocates.

use core::ffi::CStr;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::time::Duration;
use libc::c_int;

/// A descriptor of this process's own; std's, on the side that has std. Closed when dropped.
#[derive(Debug)]
pub(crate) struct Fd(c_int);

impl Fd {
    /// # Safety
    /// Open, and nobody else's.
    pub(crate) unsafe fn new(fd: c_int) -> Self {
        Self(fd)
    }

    pub(crate) fn as_raw_fd(&self) -> c_int {
        self.0
    }

    /// Leaves it open, to the caller.
    pub(crate) fn into_raw_fd(self) -> c_int {
        core::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: by `new`'s contract our own, and it goes out of use here.
        unsafe { libc::close(self.0) };
    }
}

#[cfg(feature = "std")]
impl From<Fd> for std::fs::File {
    fn from(fd: Fd) -> Self {
        let fd = core::mem::ManuallyDrop::new(fd);
        // SAFETY: open and nobody else's, and not closed by its old owner any more.
        unsafe { std::os::fd::FromRawFd::from_raw_fd(fd.0) }
    }
}

/// `errno` of the last failed call.
fn errno() -> i32 {
    // SAFETY: this thread's own, always there.
    unsafe { *libc::__errno_location() }
}

/// Repeats `call` while a signal interrupts it; `-1` becomes `errno`.
fn retry(mut call: impl FnMut() -> c_int) -> Result<c_int, i32> {
    loop {
        match call() {
            -1 => match errno() {
                libc::EINTR => {}
                error => return Err(error),
            },
            value => return Ok(value),
        }
    }
}

/// Opens without following a final symlink, and without ever waiting: for another's lease
/// (`EWOULDBLOCK`, see `fcntl(2)` F_SETLEASE) or for a FIFO's other end.
pub(crate) fn open(path: &CStr, access: c_int) -> Result<Fd, i32> {
    let flags = access | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: `path` is NUL-terminated and outlives the call; no O_CREAT, so no mode is read.
    let fd = retry(|| unsafe { libc::open(path.as_ptr(), flags) })?;
    // SAFETY: `open` just returned this descriptor; nobody else owns it.
    Ok(unsafe { Fd::new(fd) })
}

/// A file in memory of so many bytes, which nobody can shorten, lengthen or unseal (`memfd_create(2)`).
pub(crate) fn sealed(name: &CStr, bytes: u64) -> Result<Fd, i32> {
    /// `MFD_NOEXEC_SEAL` (Linux 6.3), which some systems insist on and older ones refuse.
    const NOEXEC_SEAL: libc::c_uint = 8;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let make = |flags: libc::c_uint| {
        // By number: C libraries have it since glibc 2.27 only.
        // SAFETY: `name` is NUL-terminated and outlives the call.
        retry(|| unsafe {
            c_int::try_from(libc::syscall(libc::SYS_memfd_create, name.as_ptr(), flags))
                .unwrap_or(-1)
        })
    };
    let fd = make(flags | NOEXEC_SEAL).or_else(|_| make(flags))?;
    // SAFETY: just made; nobody else owns it.
    let file = unsafe { Fd::new(fd) };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let bytes = libc::off_t::try_from(bytes).unwrap_or(libc::off_t::MAX);
    // SAFETY: our own descriptor; no pointers.
    retry(|| unsafe { libc::ftruncate(fd, bytes) })?;
    // SAFETY: as above.
    retry(|| unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) })?;
    Ok(file)
}

/// The seals of a file in memory; `None`: it is another file. Nothing is asked of a file system, so it never waits.
#[cfg(feature = "std")]
pub(crate) fn seals(fd: c_int) -> Option<c_int> {
    // SAFETY: no pointers.
    retry(|| unsafe { libc::fcntl(fd, libc::F_GET_SEALS) }).ok()
}

/// What `fstat` says, as far as this crate cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Which file this is on this machine.
    pub inode: (u64, u64),
    pub size: u64,
    /// Bytes of it that have memory behind them.
    #[cfg(feature = "std")]
    pub held: u64,
    pub kind: FileKind,
    /// Permission bits.
    #[cfg(feature = "std")]
    pub mode: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Regular,
    Directory,
    Other,
}

pub(crate) fn fstat(fd: c_int) -> Result<Stat, i32> {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` is writable memory of the size `fstat` fills.
    retry(|| unsafe { libc::fstat(fd, stat.as_mut_ptr()) })?;
    // SAFETY: `fstat` succeeded, so it filled the structure.
    let stat = unsafe { stat.assume_init() };
    Ok(Stat {
        inode: (stat.st_dev, stat.st_ino),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        #[cfg(feature = "std")]
        held: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        kind: match stat.st_mode & libc::S_IFMT {
            libc::S_IFREG => FileKind::Regular,
            libc::S_IFDIR => FileKind::Directory,
            _ => FileKind::Other,
        },
        #[cfg(feature = "std")]
        mode: stat.st_mode & 0o7777,
    })
}

/// Whether the file lies on a tmpfs, where allocated bytes and memory are the same thing. Other file
/// systems compress, or count otherwise.
#[cfg(feature = "std")]
pub(crate) fn is_tmpfs(fd: c_int) -> bool {
    let mut stat = core::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `stat` is writable memory of the size `fstatfs` fills.
    if retry(|| unsafe { libc::fstatfs(fd, stat.as_mut_ptr()) }).is_err() {
        return false;
    }
    // SAFETY: `fstatfs` succeeded, so it filled the structure.
    let stat = unsafe { stat.assume_init() };
    stat.f_type == libc::TMPFS_MAGIC
}

fn flock(kind: c_int, start: u64, len: u64) -> libc::flock {
    // SAFETY: `flock` is integers only, for which zero is a value.
    let mut lock: libc::flock = unsafe { core::mem::zeroed() };
    // The constants and offsets are small: F_*LCK ≤ 2, SEEK_SET = 0, offsets < USAGE_BYTES.
    lock.l_type = libc::c_short::try_from(kind).unwrap_or(0);
    lock.l_whence = 0;
    lock.l_start = libc::off_t::try_from(start).unwrap_or(libc::off_t::MAX);
    lock.l_len = libc::off_t::try_from(len).unwrap_or(0);
    lock
}

/// Non-blocking exclusive lock of one byte, owned by `fd`'s open file description
/// (`fcntl_locking(2)`, F_OFD_SETLK); false where another one holds it. `fd` must be open for writing.
pub(crate) fn try_lock(fd: c_int, offset: u64) -> Result<bool, i32> {
    let lock = flock(libc::F_WRLCK, offset, 1);
    // SAFETY: F_OFD_SETLK reads one `flock`, which outlives the call.
    match retry(|| unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) }) {
        Ok(_) => Ok(true),
        Err(libc::EAGAIN | libc::EACCES) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives a byte back. Explicitly, because closing is not enough when another thread forked
/// meanwhile: the child shares the description until it executes something.
pub(crate) fn unlock(fd: c_int, offset: u64) {
    let lock = flock(libc::F_UNLCK, offset, 1);
    // SAFETY: as in `try_lock`.
    let _ = retry(|| unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) });
}

/// Whether another description holds a lock anywhere in the range (F_OFD_GETLK).
pub(crate) fn is_locked(fd: c_int, start: u64, len: u64) -> Result<bool, i32> {
    let mut lock = flock(libc::F_WRLCK, start, len);
    // SAFETY: F_OFD_GETLK reads and writes one `flock`, which outlives the call.
    retry(|| unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(c_int::from(lock.l_type) != libc::F_UNLCK)
}

/// A shared mapping of a file's first bytes as a `T`, unmapped when dropped.
///
/// As long as it lives the kernel keeps the open file description it was made from, and with it
/// that description's locks, even after every descriptor was closed.
#[derive(Debug)]
pub(crate) struct Map<T> {
    at: NonNull<T>,
    marker: PhantomData<T>,
}

// SAFETY: the mapping belongs to the process, not to a thread; `T` itself must allow sharing.
unsafe impl<T: Sync> Send for Map<T> {}
// SAFETY: as above; only `&T` is handed out.
unsafe impl<T: Sync> Sync for Map<T> {}

impl<T> Map<T> {
    /// Maps the file, which the caller has found to be at least as long as `T`.
    ///
    /// # Safety
    /// Every field of `T` that anyone may change while this mapping lives is an atomic, every bit
    /// pattern is a valid `T`, and `T` needs no stricter alignment than a page.
    pub(crate) unsafe fn new(fd: c_int, writable: bool) -> Result<Self, i32> {
        const { assert!(align_of::<T>() <= 4096 && size_of::<T>() > 0) };
        let prot = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let at = unsafe {
            libc::mmap(core::ptr::null_mut(), size_of::<T>(), prot, libc::MAP_SHARED, fd, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(errno());
        }
        let at = NonNull::new(at.cast::<T>()).ok_or(libc::ENOMEM)?;
        Ok(Self { at, marker: PhantomData })
    }

    /// Leaves the mapping in place for as long as the process lives.
    pub(crate) fn leak(self) -> &'static T {
        let map = core::mem::ManuallyDrop::new(self);
        // SAFETY: as in `deref`, and nothing unmaps it any more.
        unsafe { map.at.as_ref() }
    }
}

impl<T> core::ops::Deref for Map<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped, aligned and long enough as `new` made it, and valid by its contract.
        unsafe { self.at.as_ref() }
    }
}

impl<T> Drop for Map<T> {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this range, and references borrow from `self`.
        unsafe { libc::munmap(self.at.as_ptr().cast(), size_of::<T>()) };
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds; comparable between processes of one boot. No system call.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec))
}

/// Sleeps about that long; a signal may end it early. By number, because libc's own `nanosleep` is a
/// point where a thread may be cancelled, which no driver function is, and would leave what it had reserved behind.
pub(crate) fn sleep(time: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    let remainder: *mut libc::timespec = core::ptr::null_mut();
    // SAFETY: reads one timespec; the remainder is not wanted.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, remainder) };
}

/// This process's pid in its own pid namespace.
pub fn pid() -> u32 {
    // SAFETY: no pointers, and it cannot fail.
    unsafe { libc::getpid() }.cast_unsigned()
}
