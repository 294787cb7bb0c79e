//! A descriptor of this process's own; std's, on the side that has std.

use libc::c_int;

/// Closed when dropped.
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
