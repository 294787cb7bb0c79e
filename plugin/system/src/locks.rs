//! Mutexes of values that stay whole.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lock, also after a thread panicked under it: such a panic is a bug that has been reported, and
/// what these mutexes hold is consistent all the same, for every change is prepared before it is stored.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
