//! The bytes behind each device pointer and each array, and their owner.
//!
//! A sharded hash table of this process's charged allocations. Frees look up here what to give
//! back; pointers that are not here were never charged and pass through. Shards keep threads apart;
//! each is an open-addressing table on memory straight from the kernel, so a hook never enters the
//! host's allocator, and each has its own fork-safe lock.

use crate::pages::Full;
use crate::pages::{Table, Zeroed};
use crate::spin::Spin;
use tessera_region::layout::Kind;

/// Shards; a power of two.
const SHARDS: usize = 32;
/// Entries of a shard's first table; a power of two.
const FIRST: usize = 128;

/// What one device pointer, or the handle of one array, was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes charged; of pool memory the bytes asked for, as the pool is what is charged.
    pub bytes: u64,
    /// [`crate::contexts::Place::serial`] of the context it was made in; of pool memory
    /// ([`Kind::Async`]) the pool's number.
    pub context: u32,
    /// Index of the GPU in the quota page.
    pub gpu: u8,
    pub kind: Kind,
}

/// A table cell. `key` 0 is empty: no device address is 0.
#[derive(Clone, Copy, Debug)]
struct Cell {
    key: u64,
    value: Allocation,
}

// SAFETY: integers, and a kind, of which zero is one.
unsafe impl Zeroed for Cell {}

#[derive(Debug, Default)]
pub struct Allocations {
    shards: [Spin<Shard>; SHARDS],
}

impl Allocations {
    /// Remembers `pointer`. Returns what was remembered for it before: an allocation that the
    /// driver released without our seeing it, whose bytes the caller gives back.
    ///
    /// # Errors
    /// [`Full`] when the kernel has no memory for the table: the allocation must not be granted.
    pub fn insert(&self, pointer: u64, value: Allocation) -> Result<Option<Allocation>, Full> {
        if pointer == 0 {
            return Err(Full);
        }
        let mut shard = self.shard(pointer).lock();
        shard.make_room()?;
        let cells = shard.table.as_mut().ok_or(Full)?.as_mut_slice();
        let (found, at) = probe(cells, pointer);
        let before = found.then(|| cells[at].value);
        cells[at] = Cell { key: pointer, value };
        shard.live += usize::from(!found);
        Ok(before)
    }

    pub fn get(&self, pointer: u64) -> Option<Allocation> {
        let shard = self.shard(pointer).lock();
        let cells = shard.table.as_ref()?.as_slice();
        let (found, at) = probe(cells, pointer);
        found.then(|| cells[at].value)
    }

    /// Forgets `pointer` and returns what it was charged.
    pub fn remove(&self, pointer: u64) -> Option<Allocation> {
        let mut shard = self.shard(pointer).lock();
        let cells = shard.table.as_mut()?.as_mut_slice();
        let (found, at) = probe(cells, pointer);
        if !found {
            return None;
        }
        let value = cells[at].value;
        vacate(cells, at);
        shard.live -= 1;
        Some(value)
    }

    /// Forgets every allocation that `doomed` names, handing each to `each`.
    pub fn drain(&self, doomed: impl Fn(&Allocation) -> bool, mut each: impl FnMut(Allocation)) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let Shard { table: Some(table), live } = &mut *shard else { continue };
            let cells = table.as_mut_slice();
            let mut at = 0;
            while at < cells.len() {
                let value = cells[at].value;
                if cells[at].key != 0 && doomed(&value) {
                    // Fills the cell from further on; what comes around the end was looked at.
                    vacate(cells, at);
                    *live -= 1;
                    each(value);
                } else {
                    at += 1;
                }
            }
        }
    }

    fn shard(&self, pointer: u64) -> &Spin<Shard> {
        // The low bits choose a cell within the shard; the highest ones choose the shard.
        &self.shards[spread(pointer) >> (usize::BITS - SHARDS.trailing_zeros())]
    }
}

/// Fibonacci hashing: device pointers differ in middle bits.
fn spread(pointer: u64) -> usize {
    let hash = pointer.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    #[allow(clippy::cast_possible_truncation, reason = "64-bit targets only, asserted in lib.rs")]
    let hash = (hash ^ (hash >> 29)) as usize;
    hash
}

#[derive(Debug, Default)]
struct Shard {
    table: Option<Table<Cell>>,
    /// Cells that are not empty.
    live: usize,
}

impl Shard {
    /// Keeps a quarter of the cells empty, so that probes end soon.
    fn make_room(&mut self) -> Result<(), Full> {
        let old = self.table.as_ref().map_or(&[][..], |table| table.as_slice());
        if (self.live + 1) * 4 <= old.len() * 3 {
            return Ok(());
        }
        let mut table = Table::<Cell>::new((old.len() * 2).max(FIRST)).ok_or(Full)?;
        for cell in old.iter().filter(|cell| cell.key != 0) {
            let (_, at) = probe(table.as_slice(), cell.key);
            table.as_mut_slice()[at] = *cell;
        }
        self.table = Some(table);
        Ok(())
    }
}

/// Where `key` is (`true`), or the empty cell that ends its path. `make_room` guarantees one.
fn probe(cells: &[Cell], key: u64) -> (bool, usize) {
    let mask = cells.len() - 1;
    let mut at = spread(key) & mask;
    while cells[at].key != 0 {
        if cells[at].key == key {
            return (true, at);
        }
        at = (at + 1) & mask;
    }
    (false, at)
}

/// Empties a cell and moves those that were displaced past it back, so that no path is broken
/// (linear probing without tombstones: a table that only churns is never rebuilt).
fn vacate(cells: &mut [Cell], at: usize) {
    let mask = cells.len() - 1;
    let mut hole = at;
    let mut next = at;
    loop {
        next = (next + 1) & mask;
        if cells[next].key == 0 {
            break;
        }
        let home = spread(cells[next].key) & mask;
        // It may move unless its home lies between the hole and where it is.
        if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
            cells[hole] = cells[next];
            hole = next;
        }
    }
    cells[hole].key = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn plain(bytes: u64, context: u32) -> Allocation {
        Allocation { bytes, context, gpu: 0, kind: Kind::Plain }
    }

    #[derive(Clone, Debug)]
    enum Act {
        Insert(u64, u64, u32),
        Remove(u64),
        Drain(u32),
    }

    fn act() -> impl Strategy<Value = Act> {
        // Few distinct pointers, so that reuse, double frees and displaced cells are common.
        let pointer = (1u64..400).prop_map(|n| 0x7f00_0000_0000 + n * 512);
        prop_oneof![
            6 => (pointer.clone(), any::<u64>(), 0u32..4).prop_map(|(p, b, c)| Act::Insert(p, b, c)),
            5 => pointer.prop_map(Act::Remove),
            1 => (0u32..4).prop_map(Act::Drain),
        ]
    }

    proptest! {
        #[test]
        fn behaves_as_a_hash_map(acts in proptest::collection::vec(act(), 1..2_000)) {
            let map = Allocations::default();
            let mut model = HashMap::new();
            for act in acts {
                match act {
                    Act::Insert(pointer, bytes, context) => {
                        let value = plain(bytes, context);
                        prop_assert_eq!(map.insert(pointer, value), Ok(model.insert(pointer, value)));
                    }
                    Act::Remove(pointer) => {
                        prop_assert_eq!(map.remove(pointer), model.remove(&pointer));
                    }
                    Act::Drain(context) => {
                        let mut drained: Vec<u64> = Vec::new();
                        map.drain(|a| a.context == context, |a| drained.push(a.bytes));
                        let mut expected: Vec<u64> =
                            model.values().filter(|a| a.context == context).map(|a| a.bytes).collect();
                        model.retain(|_, a| a.context != context);
                        drained.sort_unstable();
                        expected.sort_unstable();
                        prop_assert_eq!(drained, expected);
                    }
                }
            }
            let mut left = 0usize;
            map.drain(|_| true, |_| left += 1);
            prop_assert_eq!(left, model.len());
        }
    }
}
