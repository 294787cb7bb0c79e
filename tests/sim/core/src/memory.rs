//! Device memory, counted: one total per unit (a GPU, or a MIG instance) over all processes, refused
//! when it is full. Compute instances of one GPU instance share a total.

use crate::layout::{MAX_SLOTS, SlotMemory, slot_state};
use crate::session::{Locked, Session};
use std::sync::atomic::{AtomicU64, Ordering};

/// What device memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Chunks of the allocator.
    Allocation,
    /// Chunks of memory pools.
    Pool,
    /// `cuMemCreate`.
    Virtual,
    /// Arrays and mipmapped arrays.
    Array,
    /// Contexts.
    Context,
    /// Modules and libraries.
    Module,
    /// Stacks, printf buffers and heaps of kernels.
    Local,
    /// What no public function obtained.
    Private,
    /// Managed memory.
    Managed,
}

impl Use {
    /// Every use.
    pub const ALL: [Use; 9] = [
        Use::Allocation,
        Use::Pool,
        Use::Virtual,
        Use::Array,
        Use::Context,
        Use::Module,
        Use::Local,
        Use::Private,
        Use::Managed,
    ];

    /// What `simgpu-ctl status` calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Use::Allocation => "allocated",
            Use::Pool => "pools",
            Use::Virtual => "virtual memory",
            Use::Array => "arrays",
            Use::Context => "contexts",
            Use::Module => "modules",
            Use::Local => "local memory",
            Use::Private => "private",
            Use::Managed => "managed",
        }
    }
}

impl SlotMemory {
    pub(crate) fn word(&self, kind: Use) -> &AtomicU64 {
        match kind {
            Use::Allocation => &self.allocated,
            Use::Pool => &self.pools,
            Use::Virtual => &self.virtual_memory,
            Use::Array => &self.arrays,
            Use::Context => &self.contexts,
            Use::Module => &self.modules,
            Use::Local => &self.local,
            Use::Private => &self.private,
            Use::Managed => &self.managed,
        }
    }

    /// Everything, in bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        Use::ALL.iter().fold(0, |sum, k| sum + self.word(*k).load(Ordering::Relaxed))
    }

    /// By use; those of 0 bytes are left out.
    pub(crate) fn by_use(&self) -> Vec<(Use, u64)> {
        let bytes = |k: Use| self.word(k).load(Ordering::Relaxed);
        Use::ALL.into_iter().map(|k| (k, bytes(k))).filter(|(_, n)| *n > 0).collect()
    }

    pub(crate) fn clear(&self) {
        for kind in Use::ALL {
            self.word(kind).store(0, Ordering::Relaxed);
        }
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

    /// Unpins host memory.
    pub fn unpin(&self, bytes: u64) {
        if let Some(slot) = self.slot() {
            let pinned = &self.shared().slots[slot].pinned;
            let taken = |now: u64| Some(now.saturating_sub(bytes));
            let _ = pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        }
    }

    /// Bytes of a GPU that processes can use.
    #[must_use]
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
    #[must_use]
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
