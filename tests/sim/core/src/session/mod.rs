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
mod slots;

pub use attach::{OpenError, state_path};

use crate::config::Config;
use crate::engine::State;
use crate::layout::{Entry, MAX_CHANNELS, MAX_UNITS, RING, Shared, kind};
use crate::{clock, engine, lock};
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
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
        let mut rings = Rings { shared: self.session.shared };
        self.state().advance(&mut rings, &params, now);
        self.commit();
        now
    }

    /// Whether an operation is complete as of the last advance.
    pub(crate) fn is_complete(&mut self, channel: u32, seq: u64) -> bool {
        let rings = Rings { shared: self.session.shared };
        self.state().is_complete(&rings, channel, seq)
    }

    /// When `seq` of `channel` will be complete if nothing more is submitted, at most `horizon`.
    pub(crate) fn predict(&mut self, channel: u32, seq: u64, horizon: u64) -> Option<u64> {
        let params = self.session.params();
        let rings = Rings { shared: self.session.shared };
        // SAFETY: as in `state`.
        let scratch = unsafe { &mut *self.session.scratch.get() };
        copy_state(&scratch.state, &mut scratch.spare);
        scratch.spare.predict(&rings, &params, channel, seq, horizon)
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

/// The engine's view of the rings.
struct Rings {
    shared: &'static Shared,
}

impl Rings {
    fn entry(&self, channel: u32, seq: u64) -> &'static Entry {
        entry(self.shared, channel, seq)
    }
}

/// Operation `seq` of a channel.
pub(crate) fn entry(shared: &'static Shared, channel: u32, seq: u64) -> &'static Entry {
    #[allow(clippy::cast_possible_truncation, reason = "a remainder below RING")]
    &shared.rings[channel as usize].entries[(seq % RING as u64) as usize]
}

impl engine::Queues for Rings {
    fn submitted(&self, channel: u32) -> u64 {
        // Acquire: pairs with Release in `Session::submit`; covers the entry.
        self.shared.rings[channel as usize].submitted.load(Ordering::Acquire)
    }

    fn op(&self, channel: u32, seq: u64) -> (u64, engine::Op) {
        let e = self.entry(channel, seq);
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
        (self.entry(channel, seq).kind.load(Ordering::Relaxed) >> 8 & 0xff) as usize
    }

    fn host_done(&self, channel: u32, seq: u64) -> bool {
        // Acquire: pairs with Release in `Session::host_done`.
        self.entry(channel, seq).value.load(Ordering::Acquire) != 0
    }

    fn waits(&self, channel: u32) -> u64 {
        let waits: &AtomicU64 = &self.shared.rings[channel as usize].waits;
        waits.load(Ordering::Acquire)
    }

    fn completed(&mut self, channel: u32, seq: u64, at: u64) {
        self.entry(channel, seq).finish_ns.store(at, Ordering::Relaxed);
    }

    fn switched(&mut self, gpu: u32, number: u32, switch: engine::Switch) {
        let log = &self.shared.switches[gpu as usize];
        let record = &log[number as usize % log.len()];
        let slots = u64::from(switch.from) << 32 | u64::from(switch.to);
        record.slots.store(slots, Ordering::Relaxed);
        record.idle_from_ns.store(switch.idle_from, Ordering::Relaxed);
        record.at_ns.store(switch.at, Ordering::Relaxed);
        record.run_from_ns.store(switch.run_from, Ordering::Relaxed);
    }
}
