//! Submitting work to a GPU and waiting for it.

use crate::engine::{NONE, Op, QUEUES};
use crate::layout::{RING, kind};
use crate::session::{Session, entry};
use crate::{clock, engine};
use std::sync::atomic::Ordering;

/// Without a prediction (a wait on another GPU, a host function) look again after this long …
pub(crate) const POLL_NS: u64 = 200_000;
/// … and with one after this long at most: another process's death may let us finish early.
const LOOK_AGAIN_NS: u64 = 10_000_000;

impl Session {
    /// Opens this process's channel on a GPU; none is free: `None`.
    pub fn open_channel(&self, gpu: u32) -> Option<u32> {
        let slot = u32::try_from(self.slot()?).ok()?;
        let mut locked = self.lock();
        locked.advance();
        let state = locked.state();
        let at = match state.free_channel() {
            Some(at) => at,
            None => {
                locked.recover_dead(true);
                locked.state().free_channel()?
            }
        };
        let ring = &self.shared().rings[at];
        let submitted = ring.submitted.load(Ordering::Acquire);
        let waits = ring.waits.load(Ordering::Acquire);
        ring.completed.store(submitted, Ordering::Release);
        ring.writes.forget();
        let channel = locked.state().open_channel(gpu, slot, submitted, waits, at)?;
        locked.commit();
        Some(channel)
    }

    /// Submits one operation to a queue of the channel; its number. Waits while [`RING`] are in flight, as a launch on a
    /// full hardware queue does. One thread at a time for each channel.
    pub fn submit(&self, channel: u32, queue: usize, op: Op) -> u64 {
        let ring = &self.shared().rings[channel as usize];
        let seq = ring.submitted.load(Ordering::Relaxed);
        if seq - ring.completed.load(Ordering::Acquire) >= RING as u64 {
            self.wait(channel, seq - RING as u64);
        }
        let (tag, value) = match op {
            Op::Compute(ns) => (kind::COMPUTE, ns),
            Op::Part { ns, width } => (kind::PART | u64::from(width) << 32, ns),
            Op::Mark(ns) => (kind::MARK, ns),
            Op::Delay(ns) => (kind::DELAY, ns),
            Op::Wait { channel, seq } => (kind::WAIT | u64::from(channel) << 32, seq),
            Op::Host => (kind::HOST, 0),
            Op::Until => (kind::UNTIL, 0),
        };
        let e = entry(self.shared(), channel, seq);
        e.arrival_ns.store(clock::now_ns(), Ordering::Relaxed);
        e.kind.store(tag | ((queue % QUEUES) as u64 * kind::QUEUE), Ordering::Relaxed);
        e.value.store(value, Ordering::Relaxed);
        if matches!(op, Op::Wait { channel: other, .. } if other != channel) {
            ring.waits.fetch_add(1, Ordering::Release);
        }
        // Release: pairs with Acquire in `Rings::submitted`.
        ring.submitted.store(seq + 1, Ordering::Release);
        seq
    }

    /// Whether an operation and all before it are known to be complete, without looking further.
    pub fn is_settled(&self, channel: u32, seq: u64) -> bool {
        // Acquire: pairs with Release in `Locked::commit`.
        self.shared().rings[channel as usize].completed.load(Ordering::Acquire) > seq
    }

    pub fn is_complete(&self, channel: u32, seq: u64) -> bool {
        let ring = &self.shared().rings[channel as usize];
        // Acquire: pairs with Release in `Locked::commit`.
        if ring.completed.load(Ordering::Acquire) > seq {
            return true;
        }
        let mut locked = self.lock();
        locked.advance();
        locked.is_complete(channel, seq)
    }

    pub fn wait(&self, channel: u32, seq: u64) {
        loop {
            if self.shared().rings[channel as usize].completed.load(Ordering::Acquire) > seq {
                return;
            }
            let until = {
                let mut locked = self.lock();
                locked.recover_dead(false);
                let now = locked.advance();
                if locked.is_complete(channel, seq) {
                    return;
                }
                locked.predict(channel, seq, now + LOOK_AGAIN_NS).unwrap_or(now + POLL_NS)
            };
            clock::sleep_until(until);
        }
    }

    /// When a completed operation finished; too long ago to be remembered: `None`.
    pub fn finish_ns(&self, channel: u32, seq: u64) -> Option<u64> {
        let ring = &self.shared().rings[channel as usize];
        let known = ring.submitted.load(Ordering::Relaxed) <= seq + RING as u64;
        known.then(|| entry(self.shared(), channel, seq).finish_ns.load(Ordering::Relaxed))
    }

    /// Declares operation `seq`, a host function or a kernel that the host ends, finished.
    pub fn host_done(&self, channel: u32, seq: u64) {
        entry(self.shared(), channel, seq).value.store(1, Ordering::Release);
    }

    pub fn busy_ns(&self, gpu: u32) -> u64 {
        let Some(slot) = self.slot().and_then(|s| u32::try_from(s).ok()) else { return 0 };
        let mut locked = self.lock();
        locked.advance();
        let state: &engine::State = locked.state();
        state
            .channels
            .iter()
            .filter(|c| c.gpu != NONE && c.gpu == gpu && c.slot == slot)
            .map(|c| c.busy.ns)
            .sum()
    }
}
