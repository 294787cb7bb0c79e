//! Owning a process slot, and recovering those of the dead.

use super::{Locked, Session};
use crate::config::MemoryConfig;
use crate::layout::{MAX_CHANNELS, MAX_SLOTS, Slot, SlotMemory, lock_bytes, slot_state};
use crate::{clock, engine, events, objects, ofd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

/// Dead processes are looked for at most this often, unless memory is short.
const SCAN_EVERY_NS: u64 = 1_000_000;

impl Session {
    /// Claims a process slot; every slot is taken: false. The first claim counts.
    pub fn claim(&self) -> bool {
        if self.slot.get().is_some() {
            return true;
        }
        let mut locked = self.lock();
        locked.recover_dead(true);
        let Some(fd) = self.checked_fd() else { return false };
        for (i, slot) in self.shared.slots.iter().enumerate() {
            if slot.state.load(Ordering::Acquire) != slot_state::FREE
                || !ofd::try_exclusive(fd, lock_bytes::SLOT + i64::try_from(i).unwrap_or(0))
            {
                continue;
            }
            slot.describe();
            objects::forget_holder(self.shared, i);
            events::forget_owner(self.shared, i);
            slot.forget();
            let used = u32::try_from(i + 1).unwrap_or(u32::MAX);
            self.shared.slots_used.fetch_max(used, Ordering::AcqRel);
            slot.state.store(slot_state::LIVE, Ordering::Release);
            ofd::sign_pid(fd, lock_bytes::PID + i64::try_from(i).unwrap_or(0));
            return self.slot.set(i).is_ok();
        }
        false
    }

    /// Gives the slot, its memory and its channels back: the driver's clean-up at a normal exit.
    pub fn release(&self) {
        let Some(i) = self.slot() else { return };
        let mut locked = self.lock();
        locked.close_channels_of(i);
        objects::forget_holder(self.shared, i);
        events::forget_owner(self.shared, i);
        let slot = &self.shared.slots[i];
        slot.forget();
        slot.state.store(slot_state::FREE, Ordering::Release);
        if let Some(fd) = self.checked_fd() {
            let i = i64::try_from(i).unwrap_or(0);
            ofd::unsign_pid(fd, lock_bytes::PID + i);
            ofd::unlock(fd, lock_bytes::SLOT + i);
        }
    }

    /// The pid of a slot's owner as this process sees it; 0: it is in another pid namespace.
    pub fn pid_of(&self, slot: usize) -> i32 {
        let recorded = self.shared.slots[slot].pid.load(Ordering::Relaxed);
        if self.slot() == Some(slot) {
            return recorded;
        }
        if self.shared.slots[slot].state.load(Ordering::Acquire) == slot_state::DYING {
            // Nobody signs for the dead.
            let namespace = self.shared.slots[slot].namespace.load(Ordering::Relaxed);
            return if namespace != 0 && namespace == pid_namespace() { recorded } else { 0 };
        }
        let Some(fd) = self.checked_fd() else { return recorded };
        ofd::signer_pid(fd, lock_bytes::PID + i64::try_from(slot).unwrap_or(0)).unwrap_or(recorded)
    }
}

impl Locked<'_> {
    /// Begins the teardown of slots whose owner died, and ends those whose time has come.
    pub fn recover_dead(&mut self, force: bool) {
        let shared = self.session.shared;
        let now = clock::now_ns();
        let due = now.saturating_sub(shared.last_scan_ns.load(Ordering::Relaxed)) >= SCAN_EVERY_NS;
        if due || force {
            shared.last_scan_ns.store(now, Ordering::Relaxed);
        }
        let used = (shared.slots_used.load(Ordering::Acquire) as usize).min(MAX_SLOTS);
        let mine = self.session.slot();
        let mut fd = None;
        for (i, slot) in shared.slots[..used].iter().enumerate() {
            match slot.state.load(Ordering::Acquire) {
                slot_state::LIVE if (due || force) && mine != Some(i) => {
                    let byte = lock_bytes::SLOT + i64::try_from(i).unwrap_or(0);
                    let Some(fd) = *fd.get_or_insert_with(|| self.session.checked_fd()) else {
                        continue;
                    };
                    if ofd::is_held(fd, byte) {
                        continue;
                    }
                    self.close_channels_of(i);
                    let release = now + slot.teardown_ns(&self.session.config.memory);
                    slot.release_ns.store(release, Ordering::Relaxed);
                    slot.state.store(slot_state::DYING, Ordering::Release);
                }
                slot_state::DYING => {}
                _ => continue,
            }
            if slot.state.load(Ordering::Relaxed) == slot_state::DYING
                && slot.release_ns.load(Ordering::Relaxed) <= now
            {
                objects::forget_holder(shared, i);
                events::forget_owner(shared, i);
                slot.forget();
                slot.state.store(slot_state::FREE, Ordering::Release);
            }
        }
    }

    /// Drops a process's work; its GPU time moves to the GPU's history.
    fn close_channels_of(&mut self, slot: usize) {
        let slot = u32::try_from(slot).unwrap_or(engine::NONE);
        let shared = self.session.shared;
        self.advance();
        let mut closed = false;
        for id in 0..MAX_CHANNELS {
            let state = self.state();
            let c = state.channels[id];
            if c.gpu == engine::NONE || c.slot != slot {
                continue;
            }
            let retired = &shared.retired_busy_ns[c.gpu as usize];
            retired.fetch_add(c.busy.ns, Ordering::Relaxed);
            state.close_channel(u32::try_from(id).unwrap_or(engine::NONE));
            closed = true;
        }
        if closed {
            self.commit();
        }
    }
}

/// The inode of this process's pid namespace; 0: it is unknown.
fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
}

impl Slot {
    /// How long what it has takes to come back after its owner's death.
    fn teardown_ns(&self, config: &MemoryConfig) -> u64 {
        let device = self.memory.iter().map(SlotMemory::total).sum::<u64>();
        let pinned = self.pinned.load(Ordering::Relaxed);
        let of = |bytes: u64, ns_per_gib: u64| (u128::from(bytes) * u128::from(ns_per_gib)) >> 30;
        let by_size =
            of(device, config.teardown_ns_per_gib) + of(pinned, config.teardown_ns_per_pinned_gib);
        config.teardown_ns.saturating_add(u64::try_from(by_size).unwrap_or(u64::MAX))
    }

    fn forget(&self) {
        self.pinned.store(0, Ordering::Relaxed);
        self.handles.store(0, Ordering::Relaxed);
        for memory in &self.memory {
            memory.clear();
        }
    }

    fn describe(&self) {
        // SAFETY: getpid has no preconditions.
        self.pid.store(unsafe { libc::getpid() }, Ordering::Relaxed);
        self.namespace.store(pid_namespace(), Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::Relaxed);
        let comm = std::fs::read("/proc/self/comm").unwrap_or_default();
        let mut name = [0u8; 16];
        for (to, from) in name.iter_mut().zip(comm.iter().take_while(|b| **b != b'\n')) {
            *to = *from;
        }
        for (word, bytes) in self.name.iter().zip(name.chunks_exact(8)) {
            let mut eight = [0u8; 8];
            eight.copy_from_slice(bytes);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
    }

    /// The owner's `comm`.
    pub fn name_text(&self) -> String {
        let bytes: Vec<u8> =
            self.name.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}
