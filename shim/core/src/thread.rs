//! What a thread keeps for itself, and how hooks begin and answer.
//!
//! Plain thread-local words ([`crate::own`] says where): no lazy initialisation, no destructor, no
//! registration. So hooks work in TLS destructors and atexit handlers, and a thread that ends leaves
//! nothing behind but its launch record, which is reclaimed by its dead thread id
//! ([`crate::records`]).

use crate::contexts::Place;
use crate::own;
use crate::state::{self, Process};
use core::cell::Cell;
use core::ffi::c_int;
use tessera_cuda::types::{CUDA_SUCCESS, CUresult};

/// All zero at first.
#[repr(C)]
pub(crate) struct Thread {
    /// Hooks of ours that are active on this thread.
    depth: Cell<u32>,
    /// The context that was current last time, and where it is.
    pub(crate) place: Cell<CachedPlace>,
}

/// A remembered answer of [`crate::contexts::Contexts::find`]. All zero is none, for which every
/// field must have a value (an `Option` of an integer carries a tag of its own).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPlace {
    /// Whose answer: the address of the process's state, which a forked child replaces.
    pub(crate) owner: usize,
    /// While the table of contexts has this epoch.
    pub(crate) epoch: u64,
    pub(crate) handle: usize,
    pub(crate) place: Place,
}

/// While it lives, hooks called on this thread are the driver's own calls and pass through:
/// libnvidia-ml calls its exports through the PLT, and a driver is free to do the same.
#[derive(Debug)]
pub(crate) struct Depth(());

impl Depth {
    /// `None` when already inside a hook.
    #[inline]
    pub(crate) fn enter() -> Option<Self> {
        let depth = &own::thread().depth;
        if depth.get() != 0 {
            return None;
        }
        depth.set(1);
        Some(Self(()))
    }
}

impl Drop for Depth {
    #[inline]
    fn drop(&mut self) {
        own::thread().depth.set(0);
    }
}

/// A hook's answer: its errors are the driver's numbers.
pub type Answer = Result<(), CUresult>;

/// The driver's function with the caller's own arguments.
pub type Call<'a> = &'a dyn Fn() -> Answer;

#[inline(always)]
pub fn answer(result: CUresult) -> Answer {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

#[inline(always)]
pub fn result(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUDA_SUCCESS)
}

/// The process, while this thread is inside a hook of it. `None`: the call is the driver's affair alone,
/// no tenant's or its own.
#[inline]
pub(crate) fn entered() -> Option<(&'static Process, Depth)> {
    let depth = Depth::enter()?;
    Some((state::armed()?, depth))
}

/// As [`entered`], for hooks that obtain something: attaches when nobody did before.
#[inline]
pub(crate) fn tenant() -> Result<Option<(&'static Process, Depth)>, CUresult> {
    let Some(depth) = Depth::enter() else { return Ok(None) };
    Ok(state::standing().tenant()?.map(|process| (process, depth)))
}

// Keeps a thread's cancellation out of the shim.
//
// No driver function is a cancellation point (POSIX, "Thread Cancellation"), and so no hook may be:
// a cancelled thread would end inside, in the middle of `write` or `connect`, with
// locks held that all others wait for. It ends at its own next cancellation point instead.

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

    #[test]
    fn nested_hooks_are_distinguished() {
        let outer = Depth::enter();
        assert!(outer.is_some());
        assert!(Depth::enter().is_none());
        drop(outer);
        assert!(Depth::enter().is_some());
    }
}
