//! What a thread keeps for itself.
//!
//! Plain thread-local words: no lazy initialisation, no destructor, no registration. So hooks work
//! in TLS destructors and atexit handlers, and a thread that ends leaves nothing behind but its
//! launch record, which is reclaimed by its dead thread id ([`crate::records`]). The word that a
//! launch needs is in [`crate::own`], being the only one that has to be faster than this.

use crate::contexts::Place;
use core::cell::Cell;

pub(crate) struct Thread {
    /// Hooks of ours that are active on this thread.
    depth: Cell<u32>,
    /// The context that was current last time, and where it is.
    pub(crate) place: Cell<CachedPlace>,
}

/// A remembered answer of [`crate::contexts::Contexts::find`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPlace {
    /// Whose answer: the address of the process's state, which a forked child replaces.
    pub(crate) owner: usize,
    /// While the table of contexts has this epoch.
    pub(crate) epoch: u64,
    /// The context's handle.
    pub(crate) handle: usize,
    pub(crate) place: Place,
}

thread_local! {
    pub(crate) static THREAD: Thread = const {
        Thread {
            depth: Cell::new(0),
            place: Cell::new(CachedPlace {
                owner: 0,
                epoch: 0,
                handle: 0,
                place: Place { serial: 0, gpu: None },
            }),
        }
    };
}

/// While it lives, hooks called on this thread are the driver's own calls and pass through:
/// libnvidia-ml calls its exports through the PLT, and a driver is free to do the same.
#[derive(Debug)]
pub(crate) struct Depth(());

impl Depth {
    /// `None` when already inside a hook.
    #[inline]
    pub(crate) fn enter() -> Option<Self> {
        THREAD.with(|thread| {
            if thread.depth.get() != 0 {
                return None;
            }
            thread.depth.set(1);
            Some(Self(()))
        })
    }
}

impl Drop for Depth {
    #[inline]
    fn drop(&mut self) {
        THREAD.with(|thread| thread.depth.set(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_hooks_are_told_apart() {
        let outer = Depth::enter();
        assert!(outer.is_some());
        assert!(Depth::enter().is_none());
        drop(outer);
        assert!(Depth::enter().is_some());
    }
}
