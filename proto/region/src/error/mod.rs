//! What can go wrong with the pages, distinguished so that each message can say what to do.

#[cfg(feature = "std")]
mod page;

#[cfg(feature = "std")]
pub use page::{PageError, PageFault};

use alloc::ffi::CString;
use alloc::string::String;
use core::ffi::CStr;
use core::fmt;

/// What the system says of an `errno`, as std puts it.
struct Errno(i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [0u8; 128];
        // SAFETY: room for as many bytes as it is given, and NUL-terminated whatever it answers.
        let text = unsafe {
            libc::strerror_r(self.0, text.as_mut_ptr().cast(), text.len());
            CStr::from_bytes_until_nul(&text).unwrap_or_default()
        };
        write!(f, "{} (os error {})", text.to_str().unwrap_or("error"), self.0)
    }
}

/// A tenant's process could not attach to a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachError {
    /// The file; empty where its directory's name is none.
    pub path: CString,
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
        let os = Errno;
        write!(f, "{}: ", String::from_utf8_lossy(self.path.to_bytes()))?;
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

impl core::error::Error for AttachError {}

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
                let error = Errno(*errno);
                write!(f, "no file descriptor left to claim a slot with: {error}")
            }
            Self::Replaced => write!(f, "the usage page's path leads to another file now"),
            Self::Os { call, errno } => {
                write!(f, "claiming a slot: {call}: {}", Errno(*errno))
            }
        }
    }
}

impl core::error::Error for ClaimError {}
