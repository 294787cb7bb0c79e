//! Device memory, counted: one total per unit (a GPU, or a MIG instance) over all processes, refused
//! when it is full. Compute instances of one GPU instance share a total.

use crate::layout::{MAX_SLOTS, SlotMemory, slot_state};
use crate::session::{Locked, Session};
use std::sync::atomic::{AtomicU64, Ordering};

/// What device memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Allocation,
    Pool,
    Virtual,
    Array,
    Context,
    Module,
    Local,
    Managed,
}

/// Every use, and what `simgpu-ctl status` calls it; by [`Use`].
pub const USES: [(Use, &str); 8] = [
    (Use::Allocation, "allocated"),
    (Use::Pool, "pools"),
    (Use::Virtual, "virtual memory"),
    (Use::Array, "arrays"),
    (Use::Context, "contexts"),
    (Use::Module, "modules"),
    (Use::Local, "local memory"),
    (Use::Managed, "managed"),
];

impl Use {
    pub fn name(self) -> &'static str {
        USES[self as usize].1
    }
}

impl SlotMemory {
    pub(crate) fn word(&self, kind: Use) -> &AtomicU64 {
        &self.0[kind as usize]
    }

    pub fn total(&self) -> u64 {
        self.0.iter().map(|word| word.load(Ordering::Relaxed)).sum()
    }

    /// By use; those of 0 bytes are left out.
    pub(crate) fn by_use(&self) -> Vec<(Use, u64)> {
        let bytes = |(kind, _): (Use, _)| (kind, self.word(kind).load(Ordering::Relaxed));
        USES.into_iter().map(bytes).filter(|(_, n)| *n > 0).collect()
    }

    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

impl Session {
    /// Takes `bytes` of a GPU's memory, under the driver's lock; false if it has not that many.
    pub fn charge(&self, gpu: usize, kind: Use, bytes: u64) -> bool {
        let Some(slot) = self.slot() else { return false };
        let capacity = self.capacity(gpu);
        self.occupy(0);
        let mut locked = self.lock();
        if locked.used(gpu).saturating_add(bytes) > capacity {
            locked.recover_dead(true);
            if locked.used(gpu).saturating_add(bytes) > capacity {
                return false;
            }
        }
        let word = self.shared().slots[slot].memory[gpu].word(kind);
        word.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Gives `bytes` back, under the driver's lock.
    pub fn uncharge(&self, gpu: usize, kind: Use, bytes: u64) {
        if bytes > 0 {
            self.occupy(0);
        }
        self.hand_over(gpu, kind, bytes);
    }

    /// As [`Session::uncharge`], where the memory stays in use as something else.
    pub(crate) fn hand_over(&self, gpu: usize, kind: Use, bytes: u64) {
        let Some(slot) = self.slot() else { return };
        let word = self.shared().slots[slot].memory[gpu].word(kind);
        let taken = |now: u64| Some(now.saturating_sub(bytes));
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
    }

    /// Notes how many physical allocations the process has.
    pub fn note_handles(&self, count: u64) {
        if let Some(slot) = self.slot() {
            self.shared().slots[slot].handles.store(count, Ordering::Relaxed);
        }
    }

    /// The physical allocations of all processes.
    pub fn handles(&self) -> u64 {
        self.shared().slots.iter().map(|slot| slot.handles.load(Ordering::Relaxed)).sum()
    }

    pub fn unpin(&self, bytes: u64) {
        if let Some(slot) = self.slot() {
            let pinned = &self.shared().slots[slot].pinned;
            let taken = |now: u64| Some(now.saturating_sub(bytes));
            let _ = pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        }
    }

    /// Bytes of a GPU that processes can use.
    pub fn capacity(&self, gpu: usize) -> u64 {
        self.config().memory_of(gpu).1
    }

    /// Bytes of a GPU in use by all processes.
    pub fn used(&self, gpu: usize) -> u64 {
        let mut locked = self.lock();
        locked.recover_dead(false);
        locked.used(gpu)
    }
}

impl Locked<'_> {
    /// As [`Session::used`], without looking for the dead.
    pub fn used(&self, gpu: usize) -> u64 {
        let shared = self.shared();
        let used = (shared.slots_used.load(Ordering::Acquire) as usize).min(MAX_SLOTS);
        let Some(unit) = self.config().units.get(gpu) else { return 0 };
        shared.slots[..used]
            .iter()
            .filter(|s| s.state.load(Ordering::Acquire) != slot_state::FREE)
            .flat_map(|s| &s.memory[unit.memory.clone()])
            .fold(0u64, |sum, memory| sum.saturating_add(memory.total()))
            .saturating_add(crate::objects::bytes_on(shared, unit.memory.clone()))
    }
}
