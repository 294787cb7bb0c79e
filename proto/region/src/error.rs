//! What can go wrong with the pages, told apart so that each message can say what to do.

use core::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The plugin could not create, open or repair a page.
#[derive(Debug)]
pub struct PageError {
    /// The file or directory.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: PageFault,
}

/// See [`PageError`].
#[derive(Debug)]
pub enum PageFault {
    /// A directory stands where the file belongs; containerd makes missing mount sources so.
    /// [`crate::prepare_dir`] replaces it.
    IsDirectory,
    /// A symlink, device, FIFO or socket stands where the file belongs.
    NotRegular,
    /// Somebody holds a lease on the file (`fcntl(2)`, F_SETLEASE), so opening it would wait.
    Busy,
    /// Not ours to use any more, and this process lacks the rights to change that: `errno`. A
    /// container's root can give its usage file to another user; a plugin without capabilities can
    /// only put a new file in its place.
    Denied(i32),
    /// The file system is full: bytes needed.
    NoSpace(u64),
    /// The file does not start with the page's magic: it was never one of ours.
    BadMagic,
    /// Another ABI version.
    Abi {
        /// In the file.
        found: u32,
    },
    /// Bytes in the file, which are not as many as a page has.
    WrongSize(u64),
    /// A page that contradicts itself.
    Corrupt(&'static str),
    /// A sound quota page, but of another allocation or of other GPUs.
    Foreign {
        /// The allocation in the file.
        found: String,
    },
    /// The quota asked for cannot be written into a page.
    Invalid(String),
    /// The kernel refused.
    Io {
        /// The call that failed.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl PageError {
    pub(crate) fn new(path: &Path, fault: PageFault) -> Self {
        Self { path: path.to_owned(), fault }
    }

    pub(crate) fn os(path: &Path, call: &'static str, errno: i32) -> Self {
        Self::new(path, PageFault::os(call, errno))
    }

    pub(crate) fn io(path: &Path, call: &'static str, source: &io::Error) -> Self {
        Self::os(path, call, source.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl PageFault {
    pub(crate) fn os(call: &'static str, errno: i32) -> Self {
        match errno {
            libc::EISDIR => Self::IsDirectory,
            // What O_NOFOLLOW says of a symlink, and open of a socket or an absent device.
            libc::ELOOP | libc::ENXIO | libc::ENODEV => Self::NotRegular,
            libc::EWOULDBLOCK => Self::Busy,
            libc::EACCES | libc::EPERM => Self::Denied(errno),
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace(0),
            _ => Self::Io { call, source: io::Error::from_raw_os_error(errno) },
        }
    }
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.fault {
            PageFault::IsDirectory => write!(
                f,
                "a directory stands where a page belongs (the container runtime makes missing \
                 mount sources so); remove it"
            ),
            PageFault::NotRegular => {
                write!(f, "not a regular file; something else made it, remove it")
            }
            PageFault::Busy => write!(f, "a process holds a lease on it; end that process"),
            PageFault::Denied(errno) => {
                write!(f, "not accessible: {}", io::Error::from_raw_os_error(*errno))
            }
            PageFault::NoSpace(0) => {
                write!(f, "the file system is full; enlarge the pages' tmpfs")
            }
            PageFault::NoSpace(bytes) => write!(
                f,
                "the file system is full, {bytes} bytes are needed; enlarge the pages' tmpfs"
            ),
            PageFault::BadMagic => write!(f, "not a Tessera page (wrong magic); remove it"),
            PageFault::Abi { found } => write!(
                f,
                "page ABI {found}, this program speaks {}; update the older side",
                crate::abi::version()
            ),
            PageFault::WrongSize(found) => write!(f, "{found} bytes long, which no page is"),
            PageFault::Corrupt(what) => write!(f, "corrupt page: {what}; remove it"),
            PageFault::Foreign { found } => {
                write!(f, "belongs to allocation {found:?} or to other GPUs")
            }
            PageFault::Invalid(what) => write!(f, "impossible quota: {what}"),
            PageFault::Io { call, source } => write!(f, "{call}: {source}"),
        }
    }
}

impl std::error::Error for PageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.fault {
            PageFault::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A tenant's process could not attach to a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: AttachFault,
}

/// See [`AttachError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachFault {
    /// No such file.
    Absent,
    /// A directory, symlink, device, FIFO or socket.
    NotRegular,
    /// Not readable (or, for the usage page, not writable) by this user: `errno`.
    Denied(i32),
    /// This process or the system has no descriptor left: `errno`.
    Descriptors(i32),
    /// Somebody holds a lease on the file, so opening it would wait.
    Busy,
    /// Fewer bytes than a page has.
    Short {
        /// In the file.
        found: u64,
        /// In a page.
        expected: u64,
    },
    /// Not a page, or one not published yet.
    BadMagic(u64),
    /// Another ABI version than [`crate::abi::version`].
    Abi(u32),
    /// More GPUs or slots than a page has room for, or none.
    BadCount(u32),
    /// The UUID of the GPU at this index is empty, not printable or a repetition.
    BadUuid(usize),
    /// The kernel refused: `errno`.
    Os(i32),
}

impl AttachFault {
    pub(crate) fn open(errno: i32) -> Self {
        match errno {
            libc::ENOENT | libc::ENOTDIR => Self::Absent,
            libc::EISDIR | libc::ELOOP | libc::ENXIO | libc::ENODEV => Self::NotRegular,
            libc::EACCES | libc::EPERM | libc::EROFS => Self::Denied(errno),
            libc::EMFILE | libc::ENFILE => Self::Descriptors(errno),
            libc::EWOULDBLOCK => Self::Busy,
            _ => Self::Os(errno),
        }
    }
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let os = |errno: i32| io::Error::from_raw_os_error(errno);
        write!(f, "{}: ", self.path.display())?;
        match self.fault {
            AttachFault::Absent => write!(f, "absent"),
            AttachFault::NotRegular => write!(f, "not a regular file"),
            AttachFault::Denied(errno) => write!(f, "not accessible: {}", os(errno)),
            AttachFault::Descriptors(errno) => {
                write!(f, "no file descriptor left to open it with: {}", os(errno))
            }
            AttachFault::Busy => write!(f, "a process holds a lease on it"),
            AttachFault::Short { found, expected } => {
                write!(f, "{found} bytes long instead of {expected}")
            }
            AttachFault::BadMagic(found) => write!(f, "not a Tessera page (magic {found:#018x})"),
            AttachFault::Abi(found) => {
                write!(f, "page ABI {found}, this library speaks {}", crate::abi::version())
            }
            AttachFault::BadCount(found) => write!(f, "impossible count {found}"),
            AttachFault::BadUuid(index) => write!(f, "impossible UUID of GPU {index}"),
            AttachFault::Os(errno) => write!(f, "{}", os(errno)),
        }
    }
}

impl std::error::Error for AttachError {}

/// A process got no slot of the usage page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// All [`crate::layout::SLOTS`] belong to living processes.
    AllTaken,
    /// This process or the system has no descriptor left: `errno`.
    Descriptors(i32),
    /// The path leads to another file than the one attached (a changed root or mount namespace).
    Replaced,
    /// The kernel refused.
    Os {
        /// The call that failed.
        call: &'static str,
        /// Why.
        errno: i32,
    },
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllTaken => {
                write!(f, "{} processes of this container use CUDA already", crate::layout::SLOTS)
            }
            Self::Descriptors(errno) => {
                let error = io::Error::from_raw_os_error(*errno);
                write!(f, "no file descriptor left to claim a slot with: {error}")
            }
            Self::Replaced => write!(f, "the usage page's path leads to another file now"),
            Self::Os { call, errno } => {
                write!(f, "claiming a slot: {call}: {}", io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for ClaimError {}
