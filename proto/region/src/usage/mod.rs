//! The usage page: what a tenant's processes hold. They map it and write it; the plugin never maps
//! it, because a tenant can truncate a mapped file and kill its reader with SIGBUS.
//!
//! # The life of a slot
//!
//! *Owning a slot is holding the open-file-description lock on its first byte*
//! ([`crate::layout::slot_lock_offset`]), through a description that the process opened itself
//! and then mapped. The descriptor is closed at once; the mapping keeps the description, and the
//! description keeps the lock, until the last process that shares the mapping is gone. That is
//! exactly how long the driver keeps the process's device memory: a forked child keeps both alive.
//! Nothing depends on pids, on start times, or on the owner's doing anything at its end; and no
//! application that closes descriptors it does not know (`closefrom(3)`) can drop the lock.
//!
//! Claiming a free slot and recovering a dead owner's are the same act: take the lock without
//! waiting, zero the slot while holding it. Foreign slots are never written otherwise. The tenants
//! do it through a mapping ([`UsageMap`]), the plugin with `pwrite` ([`UsageFile`]). Slots never
//! move. What a slot counted goes on counting: a tenant's process adds it to the header
//! ([`crate::layout::Past`]), the plugin hands it to its caller ([`Recovered::tally`]).
//!
//! # Fork
//!
//! A forked child inherits [`OwnedSlot`] and whatever holds it, and must use none of it: the slot
//! is its parent's, whose words it would corrupt. It must not drop it either, because the driver
//! keeps the parent's memory as long as the child lives; `mem::forget` it, attach and claim again
//! if the child ever uses CUDA. The caller knows that it is a child from a `MADV_WIPEONFORK` page
//! (`madvise(2)`); nothing here has a destructor that writes.

#[cfg(feature = "std")]
mod file;
mod map;
#[cfg(feature = "std")]
mod snapshot;

#[cfg(feature = "std")]
pub use file::{Created, Fate, Recovered, UsageFile, create, create_from};
pub use map::{OwnedSlot, UsageMap};
#[cfg(feature = "std")]
pub use snapshot::{SlotView, Snapshot, Tally, Tampered, parse};

#[cfg(test)]
mod tests;
