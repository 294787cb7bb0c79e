//! Addresses of one GPU's memory: best fit over reserved ranges of host memory.
//!
//! As the real driver does, large allocations take whole chunks (2 MiB by default), and small ones
//! share a chunk: what is charged are chunks, so a first small allocation uses up a whole one.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;

/// Every allocation's alignment (CUDA C++ Programming Guide: "at least 256 bytes").
pub(crate) const ALIGN: u64 = 512;
/// Address space is reserved in steps of this.
const REGION: u64 = 1 << 30;

/// Free ranges, found by address and by size.
#[derive(Default)]
pub(crate) struct FreeList {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl FreeList {
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let &(found, start) = self.by_len.range((len, 0)..).next()?;
        self.remove(start, found);
        if found > len {
            self.insert(start + len, found - len);
        }
        Some(start)
    }

    /// Gives a range back, joined with its neighbours that `joins` allows; what it became.
    pub(crate) fn put(
        &mut self,
        start: u64,
        len: u64,
        joins: impl Fn(u64, u64) -> bool,
    ) -> (u64, u64) {
        let (mut start, mut len) = (start, len);
        if let Some((&before, &n)) = self.by_start.range(..start).next_back()
            && before + n == start
            && joins(before, start)
        {
            self.remove(before, n);
            (start, len) = (before, len + n);
        }
        if let Some((&after, &n)) = self.by_start.range(start + len..).next()
            && start + len == after
            && joins(start, after)
        {
            self.remove(after, n);
            len += n;
        }
        self.insert(start, len);
        (start, len)
    }

    pub(crate) fn len_at(&self, start: u64) -> Option<u64> {
        self.by_start.get(&start).copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    pub(crate) fn remove(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }
}

/// One GPU's addresses in this process.
pub(crate) struct Arena {
    chunk: u64,
    /// Below 4 GiB, for the 32-bit API of CUDA before 3.2.
    low: bool,
    large: FreeList,
    small: FreeList,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    pub bytes: u64,
    /// Bytes to charge to the GPU: whole chunks, or 0 if a shared chunk has room.
    pub charge: u64,
}

impl Arena {
    pub(crate) fn new(chunk: u64, low: bool) -> Arena {
        Arena { chunk, low, large: FreeList::default(), small: FreeList::default() }
    }

    fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.chunk / 2
    }

    /// The whole chunks that an allocation lies in.
    pub(crate) fn range_of(chunk: u64, start: u64, size: u64) -> (u64, u64) {
        if size.next_multiple_of(ALIGN) <= chunk / 2 {
            return (start / chunk * chunk, chunk);
        }
        (start, size.next_multiple_of(chunk))
    }

    /// What `size` > 0 bytes take now; too large: `None`.
    pub(crate) fn need(&self, size: u64) -> Option<Need> {
        let bytes = size.checked_next_multiple_of(ALIGN)?;
        if self.is_small(bytes) {
            let room = self.small.by_len.range((bytes, 0)..).next().is_some();
            return Some(Need { bytes, charge: if room { 0 } else { self.chunk } });
        }
        let bytes = size.checked_next_multiple_of(self.chunk)?;
        (bytes < 1 << 46).then_some(Need { bytes, charge: bytes })
    }

    /// Takes what [`Arena::need`] said; `None`: no address space left.
    pub(crate) fn take(&mut self, need: Need) -> Option<u64> {
        if self.is_small(need.bytes) {
            if need.charge > 0 {
                let slab = self.take_large(self.chunk)?;
                self.small.insert(slab, self.chunk);
            }
            return self.small.take(need.bytes);
        }
        self.take_large(need.bytes)
    }

    /// Gives an allocation of `size` bytes back; how many bytes of chunks came free.
    pub(crate) fn give(&mut self, start: u64, size: u64) -> u64 {
        let bytes = size.next_multiple_of(ALIGN);
        if !self.is_small(bytes) {
            let bytes = size.next_multiple_of(self.chunk);
            self.large.put(start, bytes, |_, _| true);
            return bytes;
        }
        let chunk = self.chunk;
        let (slab, len) = self.small.put(start, bytes, |a, b| a / chunk == b / chunk);
        if len < chunk {
            return 0;
        }
        self.small.remove(slab, len);
        self.large.put(slab, len, |_, _| true);
        chunk
    }

    /// Takes address space of whole chunks, however its memory is counted.
    pub(crate) fn take_range(&mut self, bytes: u64) -> Option<u64> {
        self.take_large(bytes.checked_next_multiple_of(self.chunk)?)
    }

    pub(crate) fn give_range(&mut self, start: u64, bytes: u64) {
        self.large.put(start, bytes.next_multiple_of(self.chunk), |_, _| true);
    }

    fn take_large(&mut self, bytes: u64) -> Option<u64> {
        if let Some(start) = self.large.take(bytes) {
            return Some(start);
        }
        let len = if self.low { bytes.max(64 << 20) } else { bytes.max(REGION) };
        let (start, len) =
            reserve(len, self.chunk, self.low).or_else(|| reserve(bytes, self.chunk, self.low))?;
        self.large.put(start, len, |_, _| true);
        self.large.take(bytes)
    }
}

/// mmap(2), of a file from an offset or of none; where it is mapped.
///
/// # Safety
/// With `MAP_FIXED`, `[at, at + len)` is the caller's.
pub(crate) unsafe fn map(
    at: u64,
    len: u64,
    protection: libc::c_int,
    flags: libc::c_int,
    file: Option<(RawFd, u64)>,
) -> Option<u64> {
    let flags = if file.is_none() { flags | libc::MAP_ANONYMOUS } else { flags };
    let (fd, offset) = file.unwrap_or((-1, 0));
    let (len, offset) = (usize::try_from(len).ok()?, libc::off_t::try_from(offset).ok()?);
    // SAFETY: a new mapping, which disturbs nobody's memory but at a fixed address, which is the caller's.
    let mapped = unsafe { libc::mmap(at as *mut libc::c_void, len, protection, flags, fd, offset) };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
}

pub(crate) const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// Pages come into being when they are touched.
pub(crate) const LAZY: libc::c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;

fn reserve(len: u64, align: u64, low: bool) -> Option<(u64, u64)> {
    let flags = if low { LAZY | libc::MAP_32BIT } else { LAZY };
    // SAFETY: at no fixed address.
    let at = unsafe { map(0, len.checked_add(align)?, READ_WRITE, flags, None) }?;
    Some((at.next_multiple_of(align), len))
}

/// Returns an idle range's pages to the machine; what was in it is gone.
pub(crate) fn forget_pages(start: u64, len: u64) {
    const PAGE: u64 = 4096;
    let (from, to) = (start.next_multiple_of(PAGE), (start + len) / PAGE * PAGE);
    if from < to
        && let Ok(len) = usize::try_from(to - from)
    {
        // SAFETY: whole pages inside an allocation of an arena that was just freed.
        unsafe { libc::madvise(from as *mut libc::c_void, len, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u64 = 2 << 20;

    fn allocate(arena: &mut Arena, size: u64) -> (u64, u64) {
        let need = arena.need(size).unwrap();
        (arena.take(need).unwrap(), need.charge)
    }

    proptest! {
        /// Live allocations never overlap, and what was charged comes back exactly.
        #[test]
        fn nothing_overlaps_and_nothing_leaks(
            steps in prop::collection::vec((any::<bool>(), 1u64..6 << 20, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut arena = Arena::new(CHUNK, false);
            let (mut live, mut charged) = (Vec::<(u64, u64)>::new(), 0u64);
            for (give, size, which) in steps {
                if give && !live.is_empty() {
                    let (at, size) = live.swap_remove(which.index(live.len()));
                    charged -= arena.give(at, size);
                } else {
                    let (at, charge) = allocate(&mut arena, size);
                    charged += charge;
                    prop_assert!(at % ALIGN == 0);
                    prop_assert!(live.iter().all(|&(a, n)| a + n <= at || at + size <= a));
                    live.push((at, size));
                }
                let bytes: u64 = live.iter().map(|l| l.1).sum();
                prop_assert!(charged >= bytes);
            }
            for (at, size) in live.drain(..) {
                charged -= arena.give(at, size);
            }
            prop_assert_eq!(charged, 0);
        }
    }
}
