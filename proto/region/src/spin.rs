//! A lock for short critical sections within one process.
//!
//! Not a futex and not pthread's: its whole state is one word inside the process's state, so that a
//! forked child, which starts with fresh state, never meets a lock that another thread of its
//! parent held. Waiters spin briefly, then yield, then sleep, so that a preempted holder (also one
//! of lower priority) gets to run.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

/// Looks until [`Spin::lock_soon`] gives up.
const SOON: u32 = 110;

/// A value behind a spinning lock.
#[derive(Debug, Default)]
pub struct Spin<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Held`, of which there is at most one at a time.
unsafe impl<T: Send> Sync for Spin<T> {}

impl<T> Spin<T> {
    /// An open lock.
    pub const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Waits until the lock is ours.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        // Acquire: pairs with the Release in `Held::drop`.
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Held { lock: self }
    }

    /// The lock, if nobody has it.
    #[inline]
    pub fn try_lock(&self) -> Option<Held<'_, T>> {
        // Acquire: as in `lock`.
        // Not `then_some`: a `Held` that is made is dropped, which would open the other's lock.
        (!self.held.swap(true, Ordering::Acquire)).then(|| Held { lock: self })
    }

    /// The lock, unless somebody keeps it for longer than some milliseconds: who has it may be inside a
    /// driver that waits for the application.
    pub fn lock_soon(&self) -> Option<Held<'_, T>> {
        (0..SOON).find_map(|turn| {
            let held = self.try_lock();
            if held.is_none() {
                pause(turn);
            }
            held
        })
    }

    #[cold]
    fn wait(&self) {
        let mut turn = 0u32;
        loop {
            while self.held.load(Ordering::Relaxed) {
                pause(turn);
                turn = turn.saturating_add(1);
            }
            if !self.held.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }
}

/// Waits a little longer with every `turn`: spinning, then giving up the processor, then asleep.
pub fn pause(turn: u32) {
    match turn {
        0..64 => core::hint::spin_loop(),
        // SAFETY: sched_yield has no preconditions.
        64..96 => unsafe {
            libc::sched_yield();
        },
        _ => sleep_us(100),
    }
}

/// Sleeps about `micros` microseconds; a signal may end it early.
pub fn sleep_us(micros: u32) {
    crate::os::sleep(Duration::from_micros(micros.into()));
}

/// The lock, held; dropping it opens it.
#[derive(Debug)]
pub struct Held<'a, T> {
    lock: &'a Spin<T>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this `Held` is the only one, so nobody else reaches the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` excludes other borrows of this `Held`.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        // Release: what was written under the lock is seen by the next holder.
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_increments_are_all_seen() {
        let counter = Spin::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        *counter.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 80_000);
    }

    #[test]
    fn who_does_not_get_the_lock_leaves_it_to_who_has_it() {
        let lock = Spin::new(());
        let held = lock.lock();
        assert!(lock.try_lock().is_none() && lock.try_lock().is_none());
        assert!(lock.lock_soon().is_none() && lock.lock_soon().is_none());
        drop(held);
        assert!(lock.try_lock().is_some());
    }
}
