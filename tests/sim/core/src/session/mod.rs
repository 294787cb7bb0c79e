//! A process's attachment to the shared state.
//!
//! Attaching maps the file and holds a shared lock on one byte; owning a process slot holds an
//! exclusive one. Both locks live as long as the mapping, so a closed descriptor or a forked child
//! does not drop them: memory of a dead parent stays in use while a child shares its mapping, as
//! the driver's own does.
//!
//! The descriptor stays open for good: closing any descriptor of a file drops the process's
//! traditional locks on it, and with them the pid that NVML reports.

mod attach;

pub use attach::{OpenError, state_path};

use crate::config::{Config, MemoryConfig};
use crate::engine::State;
use crate::layout::{
    Entry, MAX_CHANNELS, MAX_SLOTS, MAX_UNITS, RING, Shared, Slot, SlotMemory, kind, lock_bytes,
    slot_state,
};
use crate::{clock, engine, lock, memory};
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// An attached state. Never detached: see the module's text.
pub struct Session {
    shared: &'static Shared,
    config: Config,
    fd: AtomicI32,
    identity: (u64, u64),
    path: std::path::PathBuf,
    slot: OnceLock<usize>,
    scratch: UnsafeCell<Scratch>,
}

/// This process's private copy of the engine, which commit it equals, and room for predictions: a thread's
/// stack has none.
struct Scratch {
    state: Box<State>,
    commit: u64,
    spare: Box<State>,
}

// SAFETY: `scratch` is touched only while the shared lock is held, which excludes other threads too.
unsafe impl Sync for Session {}
// SAFETY: nothing in it is bound to a thread.
unsafe impl Send for Session {}

/// The lock held, with the engine's state at hand.
pub struct Locked<'a> {
    session: &'a Session,
    _guard: lock::Guard<'a>,
}

impl Session {
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn shared(&self) -> &'static Shared {
        self.shared
    }

    pub fn slot(&self) -> Option<usize> {
        self.slot.get().copied()
    }

    pub fn lock(&self) -> Locked<'_> {
        let guard = lock::lock(self.shared);
        // SAFETY: the lock is held, so nobody else touches scratch or writes the buffers.
        let scratch = unsafe { &mut *self.scratch.get() };
        let commit = self.shared.commits.load(Ordering::Acquire);
        if scratch.commit != commit {
            let active = self.shared.active.load(Ordering::Acquire) as usize & 1;
            // SAFETY: as above; the active buffer is whole.
            copy_state(unsafe { &*self.shared.engines[active].get() }, &mut scratch.state);
            scratch.commit = commit;
        }
        Locked { session: self, _guard: guard }
    }

    /// Takes the driver's one lock for `hold_ns`, in order of arrival: waits for those who came before, then works
    /// that long. It stands for the lock of NVIDIA's resource manager (RM), which all processes' allocations and
    /// NVML's process lists need. A time in the shared state is all of it: a holder that is killed leaves it taken
    /// for the rest of its time, as a system call that has begun goes on.
    pub fn occupy(&self, hold_ns: u64) {
        let begin = self.queue_up(hold_ns);
        clock::sleep_out(begin);
        clock::burn_until(begin + hold_ns);
    }

    /// Pins host memory under that lock, which meanwhile every process's questions for memory need, too: the 700 GB of
    /// one kept all others' for 12 minutes (NVIDIA/TensorRT-LLM#17429, #17773). The kernel unpins it when the process is
    /// dead, and takes its time.
    pub fn pin(&self, bytes: u64) {
        if let Some(slot) = self.slot() {
            self.shared().slots[slot].pinned.fetch_add(bytes, Ordering::Relaxed);
        }
        let ns = (u128::from(bytes) * u128::from(self.config.costs.pin_ns_per_gib)) >> 30;
        let hold_ns = u64::try_from(ns).unwrap_or(u64::MAX);
        let end = self.queue_up(hold_ns).saturating_add(hold_ns);
        self.shared.pinning_ns.fetch_max(end, Ordering::AcqRel);
        clock::sleep_out(end);
    }

    /// Waits for those who pin host memory.
    pub fn await_pinning(&self) {
        clock::sleep_out(self.shared.pinning_ns.load(Ordering::Acquire));
    }

    /// Takes the lock behind all who came before, for so long: from when on.
    fn queue_up(&self, hold_ns: u64) -> u64 {
        let now = clock::now_ns();
        let until = |free: u64| (hold_ns > 0).then(|| free.max(now) + hold_ns);
        let occupied = &self.shared.occupied_ns;
        match occupied.fetch_update(Ordering::AcqRel, Ordering::Acquire, until) {
            Ok(free) | Err(free) => free.max(now),
        }
    }

    fn params(&self) -> engine::Params {
        engine::Params {
            slice_ns: self.config.costs.time_slice_ns,
            switch_ns: self.config.costs.context_switch_ns,
            cold_ns: self.config.costs.cold_ns,
        }
    }

    fn fd(&self) -> RawFd {
        self.fd.load(Ordering::Relaxed)
    }
}

impl Locked<'_> {
    pub(crate) fn slot(&self) -> Option<usize> {
        self.session.slot()
    }

    /// The engine, as of the last [`Locked::advance`] or the last commit of anyone.
    pub(crate) fn state(&mut self) -> &mut State {
        // SAFETY: the lock is held and `&mut self` excludes a second reference.
        unsafe { &mut (*self.session.scratch.get()).state }
    }

    pub fn shared(&self) -> &'static Shared {
        self.session.shared
    }

    pub fn config(&self) -> &Config {
        &self.session.config
    }

    pub fn is_valid(&mut self) -> bool {
        self.state().is_valid()
    }

    /// Moves the model to now and publishes it.
    pub fn advance(&mut self) -> u64 {
        let now = clock::now_ns();
        let params = self.session.params();
        let mut queues = self.session.shared;
        self.state().advance(&mut queues, &params, now);
        self.commit();
        now
    }

    /// Whether an operation is complete as of the last advance.
    pub(crate) fn is_complete(&mut self, channel: u32, seq: u64) -> bool {
        let queues = self.session.shared;
        self.state().is_complete(&queues, channel, seq)
    }

    /// When `seq` of `channel` will be complete if nothing more is submitted, at most `horizon`.
    pub(crate) fn predict(&mut self, channel: u32, seq: u64, horizon: u64) -> Option<u64> {
        let params = self.session.params();
        // SAFETY: as in `state`.
        let scratch = unsafe { &mut *self.session.scratch.get() };
        copy_state(&scratch.state, &mut scratch.spare);
        scratch.spare.predict(&self.session.shared, &params, channel, seq, horizon)
    }

    /// Publishes the private copy: the inactive buffer, then the flip, then the readers' hints.
    pub(crate) fn commit(&mut self) {
        let shared = self.session.shared;
        // SAFETY: the lock is held.
        let scratch = unsafe { &mut *self.session.scratch.get() };
        let next = (shared.active.load(Ordering::Relaxed) + 1) & 1;
        // SAFETY: nobody reads the inactive buffer, and only the lock's holder writes it.
        copy_state(&scratch.state, unsafe { &mut *shared.engines[next as usize].get() });
        shared.active.store(next, Ordering::Release);
        scratch.commit = shared.commits.fetch_add(1, Ordering::AcqRel) + 1;
        let used = scratch.state.channels_used as usize;
        for (channel, ring) in scratch.state.channels[..used].iter().zip(&shared.rings) {
            if channel.gpu != engine::NONE {
                // Release: pairs with Acquire in `Session::is_complete`; covers `finish_ns`.
                ring.completed.store(channel.completed, Ordering::Release);
            }
        }
    }
}

/// Copies what was ever used of a state.
fn copy_state(from: &State, to: &mut State) {
    let used = (from.channels_used as usize).min(MAX_CHANNELS);
    to.channels_used = from.channels_used;
    to.gpu_count = from.gpu_count;
    let gpus = (from.gpu_count as usize).min(MAX_UNITS);
    to.gpus[..gpus].copy_from_slice(&from.gpus[..gpus]);
    to.channels[..used].copy_from_slice(&from.channels[..used]);
}

pub(crate) fn entry(shared: &Shared, channel: u32, seq: u64) -> &Entry {
    #[allow(clippy::cast_possible_truncation, reason = "a remainder below RING")]
    &shared.rings[channel as usize].entries[(seq % RING as u64) as usize]
}

impl engine::Queues for &'static Shared {
    fn submitted(&self, channel: u32) -> u64 {
        // Acquire: pairs with Release in `Session::submit`; covers the entry.
        self.rings[channel as usize].submitted.load(Ordering::Acquire)
    }

    fn op(&self, channel: u32, seq: u64) -> (u64, engine::Op) {
        let e = entry(self, channel, seq);
        let tag = e.kind.load(Ordering::Relaxed);
        let value = e.value.load(Ordering::Relaxed);
        let op = match tag & 0xff {
            kind::DELAY => engine::Op::Delay(value),
            kind::WAIT => {
                let channel = u32::try_from(tag >> 32).unwrap_or(engine::NONE);
                engine::Op::Wait { channel, seq: value }
            }
            kind::HOST => engine::Op::Host,
            kind::UNTIL => engine::Op::Until,
            kind::MARK => engine::Op::Mark(value),
            kind::PART => {
                let width = u16::try_from(tag >> 32).unwrap_or(engine::WHOLE);
                engine::Op::Part { ns: value, width }
            }
            _ => engine::Op::Compute(value),
        };
        (e.arrival_ns.load(Ordering::Relaxed), op)
    }

    fn queue(&self, channel: u32, seq: u64) -> usize {
        (entry(self, channel, seq).kind.load(Ordering::Relaxed) >> 8 & 0xff) as usize
    }

    fn host_done(&self, channel: u32, seq: u64) -> bool {
        // Acquire: pairs with Release in `Session::host_done`.
        entry(self, channel, seq).value.load(Ordering::Acquire) != 0
    }

    fn waits(&self, channel: u32) -> u64 {
        let waits: &AtomicU64 = &self.rings[channel as usize].waits;
        waits.load(Ordering::Acquire)
    }

    fn completed(&mut self, channel: u32, seq: u64, at: u64) {
        entry(self, channel, seq).finish_ns.store(at, Ordering::Relaxed);
    }

    fn switched(&mut self, gpu: u32, number: u32, handover: engine::Handover) {
        let log = &self.switches[gpu as usize];
        let record = &log[number as usize % log.len()];
        let slots = u64::from(handover.from) << 32 | u64::from(handover.to);
        record.slots.store(slots, Ordering::Relaxed);
        record.idle_from_ns.store(handover.idle_from_ns, Ordering::Relaxed);
        record.at_ns.store(handover.at_ns, Ordering::Relaxed);
    }
}

// Owning a process slot, and recovering those of the dead.

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
                || !lock::try_exclusive(fd, lock_bytes::SLOT + i64::try_from(i).unwrap_or(0))
            {
                continue;
            }
            slot.describe();
            memory::forget_holder(self.shared, i);
            slot.forget();
            let used = u32::try_from(i + 1).unwrap_or(u32::MAX);
            self.shared.slots_used.fetch_max(used, Ordering::AcqRel);
            slot.state.store(slot_state::LIVE, Ordering::Release);
            lock::sign_pid(fd, lock_bytes::PID + i64::try_from(i).unwrap_or(0));
            return self.slot.set(i).is_ok();
        }
        false
    }

    /// Gives the slot, its memory and its channels back: the driver's clean-up at a normal exit.
    pub fn release(&self) {
        let Some(i) = self.slot() else { return };
        let mut locked = self.lock();
        locked.close_channels_of(i);
        memory::forget_holder(self.shared, i);
        let slot = &self.shared.slots[i];
        slot.forget();
        slot.state.store(slot_state::FREE, Ordering::Release);
        if let Some(fd) = self.checked_fd() {
            let i = i64::try_from(i).unwrap_or(0);
            lock::unsign_pid(fd, lock_bytes::PID + i);
            lock::unlock(fd, lock_bytes::SLOT + i);
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
        lock::signer_pid(fd, lock_bytes::PID + i64::try_from(slot).unwrap_or(0)).unwrap_or(recorded)
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
                    if lock::is_held(fd, byte) {
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
                memory::forget_holder(shared, i);
                slot.forget();
                slot.state.store(slot_state::FREE, Ordering::Release);
            }
        }
    }

    /// Drops a process's work; its GPU time is in the GPU's own.
    fn close_channels_of(&mut self, slot: usize) {
        let slot = u32::try_from(slot).unwrap_or(engine::NONE);
        self.advance();
        let mut closed = false;
        for id in 0..MAX_CHANNELS {
            let state = self.state();
            let c = state.channels[id];
            if c.gpu == engine::NONE || c.slot != slot {
                continue;
            }
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
