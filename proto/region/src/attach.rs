//! Opening pages on the tenant's side.

use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::{CStr, c_int};

use crate::error::{AttachError, AttachFault};
use crate::os::{self, Fd, FileKind, Stat};

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
    crate::files::c_path(dir)
        .map_err(|errno| AttachError { path: CString::default(), fault: AttachFault::open(errno) })
}

/// Does with the page `name` of `dir` what `attach` says.
pub(crate) fn page<T>(
    dir: &CStr,
    name: &str,
    attach: impl FnOnce(&CStr) -> Result<T, AttachFault>,
) -> Result<T, AttachError> {
    let path = in_dir(dir, name);
    attach(&path).map_err(|fault| AttachError { path, fault })
}

/// Opens a page that is at least as long as it must be.
pub(crate) fn open(path: &CStr, access: c_int, bytes: usize) -> Result<(Fd, Stat), AttachFault> {
    let fd = os::open(path, access).map_err(AttachFault::open)?;
    let stat = os::fstat(fd.as_raw_fd()).map_err(AttachFault::Os)?;
    if stat.kind != FileKind::Regular {
        return Err(AttachFault::NotRegular);
    }
    let expected = u64::try_from(bytes).unwrap_or(u64::MAX);
    // A mapping past the end of the file is SIGBUS on first touch.
    if stat.size < expected {
        return Err(AttachFault::Short { found: stat.size, expected });
    }
    Ok((fd, stat))
}
