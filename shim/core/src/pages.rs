//! Memory straight from the kernel, for tables that must not recurse into the host's allocator.

use core::marker::PhantomData;
use core::ptr::{self, NonNull};

/// Maps `bytes` of zeroed private memory; `None` when the kernel has none.
pub(crate) fn map(bytes: usize) -> Option<NonNull<u8>> {
    #[cfg(test)]
    if FAILING.with(core::cell::Cell::get) {
        return None;
    }
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing existing.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED { None } else { NonNull::new(at.cast()) }
}

#[cfg(test)]
std::thread_local! {
    static FAILING: core::cell::Cell<bool> = const { core::cell::Cell::new(false) };
}

/// Runs `during` while the kernel has no memory for this thread.
#[cfg(test)]
pub(crate) fn failing_from_now_on(during: impl FnOnce()) {
    FAILING.with(|failing| failing.set(true));
    during();
    FAILING.with(|failing| failing.set(false));
}

/// Gives back what [`map`] gave, of which no reference is left.
pub(crate) fn unmap(at: NonNull<u8>, bytes: usize) {
    // SAFETY: exactly what `map` mapped, unused by the caller's word.
    unsafe { libc::munmap(at.as_ptr().cast(), bytes) };
}

/// Makes `bytes` at `at` read as zero in forked children. False where the kernel is older than 4.14.
pub(crate) fn wipe_on_fork(at: NonNull<u8>, bytes: usize) -> bool {
    // SAFETY: the range was mapped by `map`, and the advice changes nothing in this process.
    unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_WIPEONFORK) == 0 }
}

/// A fixed-length array of plain values on mapped memory, zeroed at first.
#[derive(Debug)]
pub(crate) struct Table<T: Zeroed> {
    at: NonNull<T>,
    len: usize,
    owns: PhantomData<T>,
}

/// Types for which all-zero bytes are a valid value and which need no drop.
///
/// # Safety
/// Both must hold.
pub(crate) unsafe trait Zeroed: Copy {}

// SAFETY: a Table owns its memory as a Vec does.
unsafe impl<T: Zeroed + Send> Send for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// `len` zeroed values; `None` when the kernel has no memory.
    pub(crate) fn new(len: usize) -> Option<Self> {
        let at = map(len.checked_mul(size_of::<T>())?)?.cast();
        Some(Self { at, len, owns: PhantomData })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: `len` values were mapped zeroed, which is valid for `Zeroed` types; we own them.
        unsafe { core::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `&mut self` excludes other borrows.
        unsafe { core::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl<T: Zeroed> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped, no longer borrowed.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len * size_of::<T>()) };
    }
}
