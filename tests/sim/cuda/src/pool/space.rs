//! A pool's chunks and what is free in them. Pure: who may use a pending free is the caller's say.

use crate::arena::{ALIGN, FreeList};
use std::collections::BTreeMap;

/// Free memory whose free may not have been reached by its stream, with what tells (`A`).
#[derive(Clone, Copy)]
struct Pending<A> {
    len: u64,
    after: A,
}

/// Chunks, free ranges and pending ones.
pub(crate) struct Space<A> {
    chunks: BTreeMap<u64, u64>,
    ready: FreeList,
    pending: BTreeMap<u64, Pending<A>>,
    reserved: u64,
    used: u64,
}

/// What an allocation of `bytes` takes of a chunk.
pub(crate) fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGN)
}

impl<A: Copy> Space<A> {
    pub(crate) fn new() -> Space<A> {
        Space {
            chunks: BTreeMap::new(),
            ready: FreeList::default(),
            pending: BTreeMap::new(),
            reserved: 0,
            used: 0,
        }
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes of allocations, rounded.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether anything is free, pending or not.
    pub(crate) fn has_free(&self) -> bool {
        !self.ready.is_empty() || !self.pending.is_empty()
    }

    pub(crate) fn add_chunk(&mut self, start: u64, len: u64) {
        self.chunks.insert(start, len);
        self.reserved += len;
        self.put_ready(start, len);
    }

    /// Allocates `len` (rounded) bytes of what is free for everybody.
    pub(crate) fn take_ready(&mut self, len: u64) -> Option<u64> {
        let start = self.ready.take(len)?;
        self.used += len;
        Some(start)
    }

    /// Allocates of pending frees that `may_use` allows: the smallest that fits, and what tells when
    /// its free is reached.
    pub(crate) fn take_pending(
        &mut self,
        len: u64,
        may_use: impl Fn(&A) -> bool,
    ) -> Option<(u64, A)> {
        let (&start, &found) = self
            .pending
            .iter()
            .filter(|(_, p)| p.len >= len && may_use(&p.after))
            .min_by_key(|(_, p)| p.len)?;
        self.pending.remove(&start);
        if found.len > len {
            let rest = Pending { len: found.len - len, ..found };
            self.pending.insert(start + len, rest);
        }
        self.used += len;
        Some((start, found.after))
    }

    /// Frees an allocation of `len` (rounded) bytes, at once.
    pub(crate) fn free_now(&mut self, start: u64, len: u64) {
        self.used -= len;
        self.put_ready(start, len);
    }

    /// Frees one when its stream gets there. Neighbours that `joined` merges become one.
    pub(crate) fn free_after(
        &mut self,
        start: u64,
        len: u64,
        after: A,
        joined: impl Fn(&A, &A) -> Option<A>,
    ) {
        self.used -= len;
        let (mut start, mut new) = (start, Pending { len, after });
        if let Some((&before, &p)) = self.pending.range(..start).next_back()
            && before + p.len == start
            && self.chunk_of(before) == self.chunk_of(start)
            && let Some(after) = joined(&p.after, &new.after)
        {
            self.pending.remove(&before);
            (start, new) = (before, Pending { len: p.len + new.len, after });
        }
        if let Some(&p) = self.pending.get(&(start + new.len))
            && self.chunk_of(start) == self.chunk_of(start + new.len)
            && let Some(after) = joined(&new.after, &p.after)
        {
            self.pending.remove(&(start + new.len));
            new = Pending { len: new.len + p.len, after };
        }
        self.pending.insert(start, new);
    }

    /// Makes pending frees that `reached` confirms free for everybody.
    pub(crate) fn settle(&mut self, mut reached: impl FnMut(&A) -> bool) {
        let due: Vec<(u64, u64)> = self
            .pending
            .iter()
            .filter(|(_, p)| reached(&p.after))
            .map(|(start, p)| (*start, p.len))
            .collect();
        for (start, len) in due {
            self.pending.remove(&start);
            self.put_ready(start, len);
        }
    }

    /// Gives unused chunks up, the last first, as long as `keep` bytes stay reserved.
    pub(crate) fn release(&mut self, keep: u64) -> Vec<(u64, u64)> {
        let unused: Vec<(u64, u64)> = self
            .chunks
            .iter()
            .rev()
            .filter(|&(&start, &len)| self.ready.len_at(start) == Some(len))
            .map(|(&start, &len)| (start, len))
            .collect();
        let mut released = Vec::new();
        for (start, len) in unused {
            if self.reserved - len >= keep {
                self.ready.remove(start, len);
                self.chunks.remove(&start);
                self.reserved -= len;
                released.push((start, len));
            }
        }
        released
    }

    pub(crate) fn chunk_of(&self, address: u64) -> Option<u64> {
        self.chunks.range(..=address).next_back().map(|(&start, _)| start)
    }

    fn put_ready(&mut self, start: u64, len: u64) {
        let chunks = &self.chunks;
        let chunk = |at: u64| chunks.range(..=at).next_back().map(|(&start, _)| start);
        self.ready.put(start, len, |a, b| chunk(a) == chunk(b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u64 = 32 << 20;

    fn same(a: &u64, b: &u64) -> Option<u64> {
        (a == b).then_some(*a)
    }

    #[test]
    fn free_memory_is_not_joined_across_chunks() {
        let mut space = Space::<u64>::new();
        space.add_chunk(CHUNK, CHUNK);
        space.add_chunk(2 * CHUNK, CHUNK);
        assert_eq!(space.take_ready(2 * CHUNK), None);
        assert_eq!(space.release(0).len(), 2);
    }

    proptest! {
        /// Live allocations never overlap, and used and reserved are what they should be.
        #[test]
        fn nothing_overlaps(
            steps in prop::collection::vec((0u8..4, 1u64..8 << 20, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut space = Space::new();
            let mut live = Vec::<(u64, u64)>::new();
            let mut chunks = 0;
            for (what, bytes, which) in steps {
                let len = rounded(bytes).unwrap();
                match what {
                    0 if !live.is_empty() => {
                        let (at, len) = live.swap_remove(which.index(live.len()));
                        space.free_now(at, len);
                    }
                    1 if !live.is_empty() => {
                        let (at, len) = live.swap_remove(which.index(live.len()));
                        space.free_after(at, len, len % 2, same);
                    }
                    2 => {
                        space.settle(|a| *a == len % 2);
                        chunks -= space.release(len).len() as u64;
                    }
                    _ => {
                        let pending = space.take_pending(len, |a| *a == len % 2).map(|p| p.0);
                        let at = pending.or_else(|| space.take_ready(len)).unwrap_or_else(|| {
                            chunks += 1;
                            let mut start = CHUNK;
                            while space.chunks.contains_key(&start) {
                                start += CHUNK;
                            }
                            space.add_chunk(start, CHUNK);
                            space.take_ready(len).unwrap()
                        });
                        prop_assert!(live.iter().all(|&(a, n)| a + n <= at || at + len <= a));
                        live.push((at, len));
                    }
                }
                prop_assert_eq!(space.used(), live.iter().map(|l| l.1).sum::<u64>());
                prop_assert_eq!(space.reserved(), chunks * CHUNK);
            }
            for (at, len) in live {
                space.free_now(at, len);
            }
            space.settle(|_| true);
            space.release(0);
            prop_assert_eq!((space.reserved(), space.used(), space.has_free()), (0, 0, false));
        }
    }
}
