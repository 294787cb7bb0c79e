//! Device memory that more than one process may hold: exported memory, IPC.
//!
//! An object begins as a part of its maker's own count ([`Session::share`]) and is counted once from
//! then on, for its maker while that holds it, else for the first of the others, and for nobody while only an
//! exported descriptor keeps it. Rules of
//! [`crate::layout`]: `live` is stored last, and what a death ends are bits of `holders`.

use crate::layout::{MAX_OBJECTS, MAX_SLOTS, Object, Shared};
use crate::memory::{USES, Use};
use crate::session::Session;
use std::sync::atomic::Ordering;

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

    fn kind(&self) -> Use {
        let at = self.kind.load(Ordering::Relaxed) as usize;
        USES.get(at).map_or(Use::Allocation, |(kind, _)| *kind)
    }
}

fn used(shared: &Shared) -> &[Object] {
    &shared.objects[..(shared.objects_used.load(Ordering::Acquire) as usize).min(MAX_OBJECTS)]
}

/// Bytes of live objects on these units.
pub(crate) fn bytes_on(shared: &Shared, units: std::ops::Range<usize>) -> u64 {
    used(shared)
        .iter()
        .filter(|o| units.contains(&(o.gpu.load(Ordering::Relaxed) as usize)) && o.is_live())
        .fold(0, |sum, o| sum.saturating_add(o.bytes.load(Ordering::Relaxed)))
}

/// What counts for a slot on a GPU.
pub(crate) fn by_use_of(shared: &Shared, slot: usize, gpu: usize) -> Vec<(Use, u64)> {
    used(shared)
        .iter()
        .filter(|o| o.gpu.load(Ordering::Relaxed) as usize == gpu && o.is_live())
        .filter(|o| o.counts_for() == Some(slot))
        .map(|o| (o.kind(), o.bytes.load(Ordering::Relaxed)))
        .collect()
}

/// Bytes that a slot holds on a GPU and that count for another.
pub(crate) fn imported_by(shared: &Shared, slot: usize, gpu: usize) -> u64 {
    used(shared)
        .iter()
        .filter(|o| o.gpu.load(Ordering::Relaxed) as usize == gpu && o.is_live())
        .filter(|o| o.is_held_by(slot) && o.counts_for() != Some(slot))
        .fold(0, |sum, o| sum.saturating_add(o.bytes.load(Ordering::Relaxed)))
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
    pub fn share(&self, gpu: usize, kind: Use, bytes: u64) -> Option<ObjectId> {
        let slot = self.slot()?;
        let shared = self.shared();
        let _locked = self.lock();
        let at = shared.objects.iter().position(|o| !o.is_live())?;
        let object = &shared.objects[at];
        object.live.store(0, Ordering::Release);
        let index = u32::try_from(at).ok()?;
        object.gpu.store(u32::try_from(gpu).ok()?, Ordering::Relaxed);
        object.kind.store(kind as u32, Ordering::Relaxed);
        object.owner.store(u32::try_from(slot).ok()?, Ordering::Relaxed);
        object.bytes.store(bytes, Ordering::Relaxed);
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
        self.hand_over(gpu, kind, bytes);
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
        if !self.config().memory.descriptors_keep {
            return;
        }
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
