//! Opening pages on the tenant's side. Only people tell apart why that fails, so it is said in words.

use alloc::ffi::CString;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ffi::{CStr, c_int};
use core::fmt;

use crate::os::{self, Fd, FileKind, Stat};

/// Why a tenant's process could not attach to a page, or got no slot of the usage page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachError(pub(crate) String);

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for AttachError {}

/// What the system says of an `errno`, as std puts it.
pub(crate) struct Errno(pub(crate) i32);

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

/// A file of the pages' directory, as the kernel takes it.
#[must_use]
pub fn in_dir(dir: &CStr, name: &str) -> CString {
    let path: Vec<u8> = [dir.to_bytes(), b"/", name.as_bytes()].concat();
    // Of a C string and one of the contract's names.
    CString::new(path).unwrap_or_default()
}

/// A directory as the kernel takes it. One that it cannot take is not there.
#[cfg(feature = "std")]
pub(crate) fn c_dir(dir: &std::path::Path) -> Result<CString, AttachError> {
    crate::files::c_path(dir).map_err(|errno| AttachError(why_not(errno)))
}

/// Does with the page `name` of `dir` what `attach` says, which answers why it cannot.
pub(crate) fn page<T>(
    dir: &CStr,
    name: &str,
    attach: impl FnOnce(&CStr) -> Result<T, String>,
) -> Result<T, AttachError> {
    let path = in_dir(dir, name);
    attach(&path).map_err(|why| AttachError(text!("{}: {why}", path.to_string_lossy())))
}

/// Opens a page that is at least as long as it must be.
pub(crate) fn open(path: &CStr, access: c_int, bytes: usize) -> Result<(Fd, Stat), String> {
    let fd = os::open(path, access).map_err(why_not)?;
    let stat = os::fstat(fd.as_raw_fd()).map_err(why_not)?;
    if stat.kind != FileKind::Regular {
        return Err(NOT_REGULAR.into());
    }
    let expected = u64::try_from(bytes).unwrap_or(u64::MAX);
    // A mapping past the end of the file is SIGBUS on first touch.
    if stat.size < expected {
        return Err(text!("{} bytes long instead of {expected}", stat.size));
    }
    Ok((fd, stat))
}

const NOT_REGULAR: &str = "not a regular file";

/// Why the kernel does not open a page.
pub(crate) fn why_not(errno: i32) -> String {
    let error = Errno(errno);
    match errno {
        libc::ENOENT | libc::ENOTDIR => "absent".into(),
        libc::EISDIR | libc::ELOOP | libc::ENXIO | libc::ENODEV => NOT_REGULAR.into(),
        libc::EACCES | libc::EPERM | libc::EROFS => text!("not accessible: {error}"),
        libc::EMFILE | libc::ENFILE => {
            text!("no file descriptor left to open it with: {error}")
        }
        libc::EWOULDBLOCK => "a process holds a lease on it".into(),
        _ => error.to_string(),
    }
}

/// Whether the first words of a page are those of one that this program speaks.
pub(crate) fn check(magic: u64, expected: u64, abi: u32) -> Result<(), String> {
    let own = crate::abi::version();
    if magic != expected {
        return Err(text!("not a Tessera page (magic {magic:#018x})"));
    }
    match abi == own {
        true => Ok(()),
        false => Err(text!("page ABI {abi}, this library speaks {own}")),
    }
}
