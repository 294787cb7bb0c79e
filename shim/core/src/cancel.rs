//! Keeps a thread's cancellation out of the shim.
//!
//! No driver function is a cancellation point (POSIX, "Thread Cancellation"), and so no hook may be:
//! a cancelled thread would end inside, in the middle of `write` or `connect`, with
//! locks held that all others wait for. It ends at its own next cancellation point instead.

use core::ffi::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`, the same in glibc and musl.
const DISABLE: c_int = 1;

/// While it lives, this thread cannot be cancelled. For cold paths that make system calls.
#[derive(Debug)]
pub(crate) struct Deferred {
    before: c_int,
}

impl Deferred {
    pub(crate) fn new() -> Self {
        let mut before = DISABLE;
        // SAFETY: a valid state and a place for the one before. It cannot fail.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        // SAFETY: the state that this thread had; nobody else changes it.
        unsafe { pthread_setcancelstate(self.before, core::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> c_int {
        let (mut now, mut ignored) = (DISABLE, 0);
        // SAFETY: reads the state by setting it and sets it back.
        unsafe {
            pthread_setcancelstate(DISABLE, &raw mut now);
            pthread_setcancelstate(now, &raw mut ignored);
        }
        now
    }

    #[test]
    fn the_state_before_comes_back_and_nests() {
        let before = state();
        let outer = Deferred::new();
        drop(Deferred::new());
        assert_eq!(state(), DISABLE);
        drop(outer);
        assert_eq!(state(), before);
    }
}
