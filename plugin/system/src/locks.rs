//! Mutexes of values that stay whole, and an order in which they may be taken.

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lock, also after a thread panicked under it: such a panic is a bug that has been reported, and
/// what these mutexes hold is consistent all the same, for every change is prepared before it is stored.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mutex with a place in the order of locks: a thread takes one only while it holds none of the same rank or
/// of a higher one, so no two threads can wait for each other. Debug builds panic where that is broken.
pub struct Ranked<T> {
    rank: u8,
    value: Mutex<T>,
}

pub struct RankedGuard<'a, T> {
    // Dropped first: the rank counts as held until the mutex is free.
    value: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Ranked<T> {
    pub const fn new(rank: u8, value: T) -> Self {
        debug_assert!(rank < 64);
        Ranked { rank, value: Mutex::new(value) }
    }

    pub fn lock(&self) -> RankedGuard<'_, T> {
        let _held = Held::take(self.rank);
        RankedGuard { value: lock(&self.value), _held }
    }
}

impl<T> fmt::Debug for Ranked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranked").finish_non_exhaustive()
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

thread_local! {
    /// A bit for each rank that this thread holds.
    static RANKS: Cell<u64> = const { Cell::new(0) };
}

struct Held {
    rank: u8,
}

impl Held {
    fn take(rank: u8) -> Self {
        let ranks = RANKS.get();
        debug_assert!(
            ranks >> rank == 0,
            "the order of locks: rank {rank} is taken while ranks {ranks:#b} are held"
        );
        RANKS.set(ranks | 1 << rank);
        Held { rank }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        RANKS.set(RANKS.get() & !(1 << self.rank));
    }
}

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_their_order() {
        let (low, high) = (Ranked::new(1, 'a'), Ranked::new(2, 'b'));
        let first = low.lock();
        let second = high.lock();
        assert_eq!((*first, *second), ('a', 'b'));
        // Given back in any order.
        drop(first);
        drop(second);
        *low.lock() = 'c';
        assert_eq!(*low.lock(), 'c');
    }

    #[test]
    fn a_lock_of_the_same_rank_or_a_lower_one_is_refused() {
        for (held, taken) in [(2, 1), (3, 3)] {
            let (held, lock) = (Ranked::new(held, ()), Ranked::new(taken, ()));
            let _held = held.lock();
            let refused = crate::panics::caught(|| drop(lock.lock())).unwrap_err();
            let said = format!("the order of locks: rank {taken} is taken");
            assert!(refused.starts_with(&said), "{refused}");
        }
    }
}
