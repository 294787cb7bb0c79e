//! Device memory, counted: one total per unit (a GPU, or a MIG instance) over all processes, refused
//! when it is full. Compute instances of one GPU instance share a total.
//!
//! Objects that more than one process may hold: exported memory, IPC memory, IPC events.
//!
//! An object begins as a part of its maker's own count ([`Session::share`]) and is counted once from
//! then on, for its maker while that holds it, else for the first of the others, and for nobody while only an
//! exported descriptor keeps it. Rules of
//! [`crate::layout`]: `live` is stored last, and what a death ends are bits of `holders`.
//!
//! An event is an object without bytes, which its maker alone holds. Its last record is one word, a channel and an
//! operation of it, so a kill tears nothing. Numbers of operations go on when a channel gets another owner, so a record
//! whose process is gone reads as complete, as the work of a process that is gone is.

use crate::layout::{MAX_OBJECTS, MAX_SLOTS, Object, Shared, SlotMemory, slot_state};
use crate::session::{Locked, Session};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What device memory is to NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Its process's.
    Own,
    /// Managed: a kernel module's (UVM), unless the configuration says otherwise.
    Managed,
}

impl SlotMemory {
    fn word(&self, kind: Use) -> &AtomicU64 {
        &self.0[kind as usize]
    }

    pub(crate) fn bytes(&self, kind: Use) -> u64 {
        self.word(kind).load(Ordering::Relaxed)
    }

    pub fn total(&self) -> u64 {
        self.bytes(Use::Own) + self.bytes(Use::Managed)
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
            .saturating_add(bytes_where(shared, unit.memory.clone(), |_| true))
    }
}

/// Names an object, for other processes too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectId {
    pub index: u32,
    /// Which life of it.
    pub generation: u64,
}

fn word_and_bit(slot: usize) -> (usize, u64) {
    (slot / 64, 1 << (slot % 64))
}

impl Object {
    fn is_held_by(&self, slot: usize) -> bool {
        let (word, bit) = word_and_bit(slot);
        self.holders[word].load(Ordering::Acquire) & bit != 0
    }

    /// The slot for which it counts; nobody holds it: `None`.
    fn counts_for(&self) -> Option<usize> {
        let owner = self.owner.load(Ordering::Relaxed) as usize;
        if owner < MAX_SLOTS && self.is_held_by(owner) {
            return Some(owner);
        }
        self.holders.iter().enumerate().find_map(|(i, word)| {
            let bits = word.load(Ordering::Acquire);
            (bits != 0).then(|| i * 64 + bits.trailing_zeros() as usize)
        })
    }

    fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire) == 1
            && (self.counts_for().is_some() || self.descriptor_is_open())
    }

    /// Whether a descriptor that was exported is open anywhere, on its way in a message too: each has a lock of its
    /// own on the file (fcntl(2), open file description locks), which the kernel shows until the last is closed.
    fn descriptor_is_open(&self) -> bool {
        let [device, inode] = [0, 1].map(|i| self.file[i].load(Ordering::Relaxed));
        if inode == 0 {
            return false;
        }
        let (major, minor) = (libc::major(device), libc::minor(device));
        let name = format!(" {major:02x}:{minor:02x}:{inode} ");
        // Unreadable: nothing is given back on a doubt.
        std::fs::read_to_string("/proc/locks").map_or(true, |locks| locks.contains(&name))
    }

    fn drop_holder(&self, slot: usize) {
        let (word, bit) = word_and_bit(slot);
        self.holders[word].fetch_and(!bit, Ordering::AcqRel);
        if !self.is_live() {
            self.live.store(0, Ordering::Release);
        }
    }
}

fn used(shared: &Shared) -> &[Object] {
    &shared.objects[..(shared.objects_used.load(Ordering::Acquire) as usize).min(MAX_OBJECTS)]
}

/// Bytes of such live objects on these units.
fn bytes_where(shared: &Shared, units: Range<usize>, such: impl Fn(&Object) -> bool) -> u64 {
    used(shared)
        .iter()
        .filter(|o| units.contains(&(o.gpu.load(Ordering::Relaxed) as usize)))
        .filter(|o| o.is_live() && such(o))
        .fold(0, |sum, o| sum.saturating_add(o.bytes.load(Ordering::Relaxed)))
}

/// Bytes of a GPU that count for a slot, and those that it holds and that count for another.
pub(crate) fn bytes_of(shared: &Shared, slot: usize, gpu: usize) -> (u64, u64) {
    let counts = |o: &Object| o.counts_for() == Some(slot);
    let on = gpu..gpu + 1;
    let imported = bytes_where(shared, on.clone(), |o| o.is_held_by(slot) && !counts(o));
    (bytes_where(shared, on, counts), imported)
}

/// A slot's process is gone, or a new one begins: it holds nothing. Under the lock.
pub(crate) fn forget_holder(shared: &Shared, slot: usize) {
    for object in used(shared) {
        if object.is_held_by(slot) {
            object.drop_holder(slot);
        }
    }
}

impl Session {
    /// Makes `bytes` of what this process was charged for an object that others may hold; no slot
    /// or no object is free: `None`.
    pub fn share(&self, gpu: usize, bytes: u64) -> Option<ObjectId> {
        let slot = self.slot()?;
        let shared = self.shared();
        let _locked = self.lock();
        let at = shared.objects.iter().position(|o| !o.is_live())?;
        let object = &shared.objects[at];
        object.live.store(0, Ordering::Release);
        let index = u32::try_from(at).ok()?;
        object.gpu.store(u32::try_from(gpu).ok()?, Ordering::Relaxed);
        object.owner.store(u32::try_from(slot).ok()?, Ordering::Relaxed);
        object.bytes.store(bytes, Ordering::Relaxed);
        object.last.store(0, Ordering::Relaxed);
        object.file.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let generation = object.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let (word, bit) = word_and_bit(slot);
        for (i, holders) in object.holders.iter().enumerate() {
            holders.store(if i == word { bit } else { 0 }, Ordering::Relaxed);
        }
        shared.objects_used.fetch_max(index + 1, Ordering::AcqRel);
        // Release: publishes the fields. Until the next line the bytes count twice, which a kill
        // here leaves so until the process's teardown.
        object.live.store(1, Ordering::Release);
        self.hand_over(gpu, Use::Own, bytes);
        Some(ObjectId { index, generation })
    }

    /// Holds another's object too: its GPU and size; it is gone: `None`.
    pub fn hold(&self, id: ObjectId) -> Option<(usize, u64)> {
        let slot = self.slot()?;
        let _locked = self.lock();
        let object = self.object(id)?;
        let (word, bit) = word_and_bit(slot);
        object.holders[word].fetch_or(bit, Ordering::AcqRel);
        Some((object.gpu.load(Ordering::Relaxed) as usize, object.bytes.load(Ordering::Relaxed)))
    }

    /// A descriptor of its file, with this device and inode, is about to be exported.
    pub fn exported(&self, id: ObjectId, file: (u64, u64)) {
        let _locked = self.lock();
        if let Some(object) = self.object(id) {
            object.file[0].store(file.0, Ordering::Relaxed);
            object.file[1].store(file.1, Ordering::Relaxed);
        }
    }

    pub fn let_go(&self, id: ObjectId) {
        let Some(slot) = self.slot() else { return };
        let _locked = self.lock();
        if let Some(object) = self.object(id) {
            object.drop_holder(slot);
        }
    }

    fn object(&self, id: ObjectId) -> Option<&'static Object> {
        let object = self.shared().objects.get(id.index as usize)?;
        let same = object.generation.load(Ordering::Relaxed) == id.generation;
        (same && object.is_live()).then_some(object)
    }
}

// Events.

/// Bits of a record's word that hold the operation's number; one more than the channel is above.
const SEQ_BITS: u32 = 48;

impl Session {
    /// A new event, never recorded; no slot or no object is free: `None`.
    pub fn create_event(&self, gpu: usize) -> Option<ObjectId> {
        self.share(gpu, 0)
    }

    /// The unit of the context that the event was made in; it is gone: `None`.
    pub fn event_gpu(&self, id: ObjectId) -> Option<usize> {
        self.object(id).map(|event| event.gpu.load(Ordering::Relaxed) as usize)
    }

    pub fn record_event(&self, id: ObjectId, channel: u32, seq: u64) {
        if let Some(event) = self.object(id) {
            // Release: the operation was submitted before.
            event.last.store((u64::from(channel) + 1) << SEQ_BITS | seq, Ordering::Release);
        }
    }

    /// The channel and operation of its last record; never recorded, or gone: `None`.
    pub fn recorded_event(&self, id: ObjectId) -> Option<(u32, u64)> {
        let word = self.object(id)?.last.load(Ordering::Acquire);
        let channel = u32::try_from(word >> SEQ_BITS).ok()?.checked_sub(1)?;
        Some((channel, word & ((1 << SEQ_BITS) - 1)))
    }
}
