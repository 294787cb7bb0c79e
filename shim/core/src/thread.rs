//! What a thread keeps for itself.
//!
//! Plain thread-local words ([`crate::own`] says where): no lazy initialisation, no destructor, no
//! registration. So hooks work in TLS destructors and atexit handlers, and a thread that ends leaves
//! nothing behind but its launch record, which is reclaimed by its dead thread id
//! ([`crate::records`]).

use crate::contexts::Place;
use crate::own;
use core::cell::Cell;

/// All zero at first.
#[repr(C)]
pub(crate) struct Thread {
    /// Hooks of ours that are active on this thread.
    depth: Cell<u32>,
    /// The context that was current last time, and where it is.
    pub(crate) place: Cell<CachedPlace>,
}

/// A remembered answer of [`crate::contexts::Contexts::find`]. All zero is none, for which every
/// field must have a value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPlace {
    /// Whose answer: the address of the process's state, which a forked child replaces.
    pub(crate) owner: usize,
    /// While the table of contexts has this epoch.
    pub(crate) epoch: u64,
    /// The context's handle.
    pub(crate) handle: usize,
    /// [`Place::serial`]
    pub(crate) serial: u32,
    /// [`Place::gpu`], plus one; 0 is `None`.
    pub(crate) gpu: u32,
}

impl CachedPlace {
    #[inline]
    pub(crate) fn place(self) -> Place {
        let gpu = self.gpu.checked_sub(1).and_then(|gpu| u8::try_from(gpu).ok());
        Place { serial: self.serial, gpu }
    }
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
