//! The atomic words that the accounting works on: `core`'s in the pages, loom's in its model.
//!
//! The pages' layout is always made of `core` atomics (loom's have no layout); what loom checks is
//! [`crate::ledger`], which is generic over [`Word`].

pub use core::sync::atomic::Ordering;

/// A 64-bit word that processes share.
pub trait Word {
    /// Loads the value.
    fn load(&self, order: Ordering) -> u64;
    /// Adds, and returns the value before. Wraps; callers bound what they add.
    fn add(&self, bytes: u64, order: Ordering) -> u64;
    /// Subtracts, stopping at zero.
    fn subtract(&self, bytes: u64, order: Ordering);
    /// `fence(SeqCst)` in the same memory model.
    fn fence();
}

macro_rules! impl_word {
    ($($path:ident)::+) => {
        impl Word for $($path)::+::AtomicU64 {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                $($path)::+::AtomicU64::load(self, order)
            }
            #[inline]
            fn add(&self, bytes: u64, order: Ordering) -> u64 {
                self.fetch_add(bytes, order)
            }
            #[inline]
            fn subtract(&self, bytes: u64, order: Ordering) {
                // Never fails: the closure always returns a value.
                let _ = self.fetch_update(order, Ordering::Relaxed, |value| {
                    Some(value.saturating_sub(bytes))
                });
            }
            #[inline]
            fn fence() {
                $($path)::+::fence(Ordering::SeqCst);
            }
        }
    };
}

impl_word!(core::sync::atomic);
#[cfg(feature = "loom")]
impl_word!(loom::sync::atomic);
