//! The arbiter's side: the page of a process that it does not trust.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{FLIGHT_BYTES, FLIGHT_MAGIC, FlightPage};
use crate::error::PageFault;
use crate::os::{self, FileKind, Map};
use core::sync::atomic::Ordering;

/// Another process's page, mapped read-only. What stands in it is that process's word.
#[derive(Debug)]
pub struct FlightReader(Map<FlightPage>);

impl FlightReader {
    /// Maps the page behind a descriptor, which is needed no longer than that. Nobody can make it wait, and nobody can
    /// take the page away from it later: what is no memfd, sealed against shrinking and of the page's size, is refused.
    ///
    /// # Errors
    /// [`PageFault::NotRegular`], [`PageFault::WrongSize`], [`PageFault::BadMagic`], [`PageFault::Io`].
    pub fn map(file: BorrowedFd<'_>) -> Result<Self, PageFault> {
        let fd = file.as_raw_fd();
        // First: of other files than memory's even `fstat` may wait, for a server of the sender's choice.
        if os::seals(fd).is_none_or(|seals| seals & libc::F_SEAL_SHRINK == 0) {
            return Err(PageFault::NotRegular);
        }
        let stat = os::fstat(fd).map_err(|errno| PageFault::os("fstat", errno))?;
        if stat.kind != FileKind::Regular {
            return Err(PageFault::NotRegular);
        }
        if stat.size != FLIGHT_BYTES as u64 {
            return Err(PageFault::WrongSize(stat.size));
        }
        // SAFETY: as long as the page, for good by its seal; atomics only, for which all bits are valid, aligned to a
        // page.
        let map = unsafe { Map::<FlightPage>::new(fd, false) };
        let map = map.map_err(|errno| PageFault::os("mmap", errno))?;
        match map.magic.load(Ordering::Acquire) {
            FLIGHT_MAGIC => Ok(Self(map)),
            _ => Err(PageFault::BadMagic),
        }
    }
}

impl core::ops::Deref for FlightReader {
    type Target = FlightPage;

    fn deref(&self) -> &FlightPage {
        &self.0
    }
}

/// [`FlightPage::create`], for processes that std knows.
///
/// # Errors
/// As there.
pub fn create() -> io::Result<(OwnedFd, &'static FlightPage)> {
    let (fd, page) = FlightPage::create().map_err(io::Error::from_raw_os_error)?;
    // SAFETY: just made, and the caller's.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, page))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// A memfd of so many bytes with these seals.
    fn memfd(bytes: u64, seals: libc::c_int) -> OwnedFd {
        // SAFETY: a NUL-terminated name; the descriptor is nobody else's.
        let fd = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING))
        };
        File::from(fd.try_clone().unwrap()).set_len(bytes).unwrap();
        // SAFETY: our own descriptor; no pointers.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        fd
    }

    #[test]
    fn what_another_process_writes_is_read() {
        let (fd, page) = create().unwrap();
        let reader = FlightReader::map(fd.as_fd()).unwrap();
        drop(fd);
        page.admitted.store(7, Ordering::SeqCst);
        assert_eq!(reader.in_flight().operations, 7);
    }

    #[test]
    fn a_file_that_could_be_taken_away_or_make_us_wait_is_refused() {
        let bytes = FLIGHT_BYTES as u64;
        let fault = |fd: OwnedFd| FlightReader::map(fd.as_fd()).unwrap_err();
        assert!(matches!(fault(memfd(bytes, 0)), PageFault::NotRegular), "it can be shortened");
        assert!(matches!(fault(memfd(bytes, libc::F_SEAL_GROW)), PageFault::NotRegular));
        for wrong in [0, 1, bytes - 1, bytes + 1, bytes * 2] {
            let seals = libc::F_SEAL_SHRINK;
            assert!(
                matches!(fault(memfd(wrong, seals)), PageFault::WrongSize(size) if size == wrong)
            );
        }
        assert!(matches!(fault(memfd(bytes, libc::F_SEAL_SHRINK)), PageFault::BadMagic));
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        assert!(matches!(fault(file.into()), PageFault::NotRegular), "an ordinary file");
        assert!(matches!(fault(File::open("/proc/self").unwrap().into()), PageFault::NotRegular));
        let (fd, _) = create().unwrap();
        // SAFETY: a path of this process's own; the descriptor is nobody else's.
        let for_writing = unsafe {
            let path = format!("/proc/self/fd/{}\0", fd.as_raw_fd());
            OwnedFd::from_raw_fd(libc::open(path.as_ptr().cast(), libc::O_WRONLY))
        };
        assert!(FlightReader::map(for_writing.as_fd()).is_err(), "it cannot be read");
    }
}
