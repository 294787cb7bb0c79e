//! What the plugin finds wrong with the pages, distinguished so that each message can say what to do.

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
    /// The file system is full: bytes needed.
    NoSpace(u64),
    /// The file does not start as a page does: it was never one of ours.
    BadMagic,
    /// Another ABI version.
    Abi {
        /// In the file.
        found: u32,
    },
    /// Bytes in the file, which are not as many as a page has.
    WrongSize(u64),
    /// A sound quota page, but of another allocation or of other GPUs.
    Foreign {
        /// The allocation in the file.
        found: String,
    },
    /// The quota asked for cannot be written into a page.
    Invalid(String),
    /// The kernel refused. A container's root can give its usage file to another user; a plugin without capabilities
    /// can only put a new file in its place.
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
            PageFault::NoSpace(0) => {
                write!(f, "the file system is full; enlarge the pages' tmpfs")
            }
            PageFault::NoSpace(bytes) => write!(
                f,
                "the file system is full, {bytes} bytes are needed; enlarge the pages' tmpfs"
            ),
            PageFault::BadMagic => write!(f, "not a Tessera page; remove it"),
            PageFault::Abi { found } => write!(
                f,
                "page ABI {found}, this program speaks {}; update the older side",
                crate::abi::version()
            ),
            PageFault::WrongSize(found) => write!(f, "{found} bytes long, which no page is"),
            PageFault::Foreign { found } => {
                write!(f, "belongs to allocation {found:?} or to other GPUs")
            }
            PageFault::Invalid(what) => write!(f, "impossible quota: {what}"),
            PageFault::Io { call, source } => write!(f, "{call}: {source}"),
        }
    }
}

impl core::error::Error for PageError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match &self.fault {
            PageFault::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
