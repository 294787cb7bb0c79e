//! Memory straight from the kernel, for tables that must not recurse into the host's allocator.

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering};

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
pub(crate) unsafe trait Zeroed {}

// SAFETY: an integer.
unsafe impl Zeroed for u32 {}

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

/// Values that stay where they are, in chunks of [`CHUNK`] that are mapped when they are needed and never unmapped.
#[derive(Debug)]
pub(crate) struct Chunks<T, const CHUNKS: usize>([AtomicPtr<T>; CHUNKS]);

/// Values of a chunk.
pub(crate) const CHUNK: usize = 64;

impl<T: Zeroed + 'static, const CHUNKS: usize> Chunks<T, CHUNKS> {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS])
    }

    /// The value at `index`, once [`Chunks::grow`] was there.
    pub(crate) fn at(&self, index: usize) -> Option<&'static T> {
        // Acquire: pairs with the Release in `grow`, so that the memory reads as zero.
        let chunk = NonNull::new(self.0.get(index / CHUNK)?.load(Ordering::Acquire))?;
        // SAFETY: a chunk has CHUNK values, zeroed when mapped, and is never unmapped.
        Some(unsafe { chunk.add(index % CHUNK).as_ref() })
    }

    /// The same, mapping a chunk where there is none. `None`: the kernel has no memory, or there are too many. The
    /// caller holds the lock under which this is done.
    pub(crate) fn grow(&self, index: usize) -> Option<&'static T> {
        let chunk = self.0.get(index / CHUNK)?;
        if chunk.load(Ordering::Relaxed).is_null() {
            let bytes = CHUNK * size_of::<T>();
            let memory = map(bytes)?;
            // Where the kernel cannot do it, `state` clears the pointers to it in the child.
            wipe_on_fork(memory, bytes);
            chunk.store(memory.as_ptr().cast(), Ordering::Release);
        }
        self.at(index)
    }
}
