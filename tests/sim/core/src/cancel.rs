//! Keeps a thread's cancellation out of the simulated libraries.
//!
//! No function of theirs is a cancellation point (POSIX, "Thread Cancellation"): a thread that somebody
//! cancelled would end inside, in the middle of a nap or a `fcntl`, with locks held that all others
//! wait for. It ends at its own next cancellation point instead.

use libc::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// While it lives, this thread cannot be cancelled.
#[derive(Debug)]
pub struct Deferred {
    before: c_int,
}

impl Deferred {
    /// From now on.
    #[inline]
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it is a guard, not a value")]
    pub fn new() -> Deferred {
        let mut before = DISABLE;
        // SAFETY: a valid state and a place for the one before. It cannot fail.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Deferred { before }
    }
}

impl Drop for Deferred {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state that this thread had; nobody else changes it.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}
