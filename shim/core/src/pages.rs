//! Memory straight from the kernel, for tables that must not recurse into the host's allocator.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering};

/// Maps `bytes` of zeroed private memory; `None` when the kernel has none.
pub(crate) fn map(bytes: usize) -> Option<NonNull<u8>> {
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

/// Gives back what [`map`] gave, of which no reference is left.
pub(crate) fn unmap(at: NonNull<u8>, bytes: usize) {
    // SAFETY: exactly what `map` mapped, unused by the caller's word.
    unsafe { libc::munmap(at.as_ptr().cast(), bytes) };
}

/// Makes `bytes` at `at` read as zero in forked children. False where the kernel is older than Linux 4.14.
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
            // It can: `state` has begun with it.
            wipe_on_fork(memory, bytes);
            chunk.store(memory.as_ptr().cast(), Ordering::Release);
        }
        self.at(index)
    }
}

// A growing array of plain values on memory straight from the kernel: for tables that hooks search
// but seldom change, and that must not recurse into the host's allocator.

const FIRST: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// See the module.
#[derive(Debug)]
pub(crate) struct List<T: Zeroed + Copy> {
    table: Option<Table<T>>,
    len: usize,
}

impl<T: Zeroed + Copy> Default for List<T> {
    fn default() -> Self {
        Self { table: None, len: 0 }
    }
}

impl<T: Zeroed + Copy> List<T> {
    /// Makes room for one more, so that the next insertion cannot fail.
    pub(crate) fn make_room(&mut self) -> Result<(), Full> {
        self.make_room_for(self.len + 1)
    }

    /// Makes room for `wanted` values in all.
    pub(crate) fn make_room_for(&mut self, wanted: usize) -> Result<(), Full> {
        let capacity = self.table.as_ref().map_or(0, |table| table.as_slice().len());
        if wanted <= capacity {
            return Ok(());
        }
        let mut grown = Table::new(wanted.next_power_of_two().max(FIRST)).ok_or(Full)?;
        grown.as_mut_slice()[..self.len].copy_from_slice(self);
        self.table = Some(grown);
        Ok(())
    }

    /// Puts `value` at `at`, moving what follows up.
    pub(crate) fn insert(&mut self, at: usize, value: T) -> Result<(), Full> {
        self.make_room()?;
        let len = self.len;
        if let Some(table) = &mut self.table {
            let values = table.as_mut_slice();
            values.copy_within(at..len, at + 1);
            values[at] = value;
            self.len += 1;
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, value: T) -> Result<(), Full> {
        self.insert(self.len, value)
    }

    /// Takes the value at `at` out, moving what follows down.
    pub(crate) fn remove(&mut self, at: usize) -> T {
        let value = self[at];
        self.copy_within(at + 1.., at);
        self.len -= 1;
        value
    }

    /// Takes the first value that `doomed` names.
    pub(crate) fn take(&mut self, doomed: impl FnMut(&T) -> bool) -> Option<T> {
        self.iter().position(doomed).map(|at| self.remove(at))
    }
}

impl<T: Zeroed + Copy> Deref for List<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.table.as_ref().map_or(&[], |table| &table.as_slice()[..self.len])
    }
}

impl<T: Zeroed + Copy> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len;
        self.table.as_mut().map_or(&mut [], |table| &mut table.as_mut_slice()[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_as_a_vector() {
        let (mut list, mut model) = (List::<u32>::default(), Vec::new());
        assert!(list.is_empty() && list.take(|_| true).is_none());
        for value in 0..300 {
            let at = usize::try_from(value).expect("small") / 3;
            assert_eq!(list.insert(at, value), Ok(()));
            model.insert(at, value);
        }
        assert_eq!(&*list, &*model);
        for at in [299, 0, 100, 50] {
            assert_eq!(list.remove(at), model.remove(at));
        }
        assert_eq!(list.take(|value| *value == 7), Some(7));
        model.retain(|value| *value != 7);
        assert_eq!(&*list, &*model);
    }
}
