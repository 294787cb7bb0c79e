//! What processes did, whether they live or have ended.

use core::mem::offset_of;

use super::snapshot::Words;
use crate::layout::{LAUNCH_SHARDS, MAX_BYTES, MAX_GPUS, Past, Slot};

/// Counters of any number of processes. All of it is what the tenant says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests refused because of the quota.
    pub refusals: u64,
    /// Requests within the quota that the driver refused.
    pub driver_refusals: u64,
    /// Kernel and graph launches.
    pub launches: u64,
    /// Nanoseconds of GPU time.
    pub gpu_time_ns: u64,
    /// Nanoseconds waited at the gate.
    pub gate_wait_ns: u64,
    /// Launches that waited there.
    pub gate_waits: u64,
    /// Times that a process rationed itself, because the arbiter was silent.
    pub gate_timeouts: u64,
    /// Times that the window was full while the gate was open.
    pub window_waits: u64,
    /// Highest granted bytes of any one process, per GPU.
    pub peak: [u64; MAX_GPUS],
}

impl Tally {
    /// Adds another's counters; sums saturate.
    pub fn merge(&mut self, other: &Tally) {
        for (sum, value) in [
            (&mut self.refusals, other.refusals),
            (&mut self.driver_refusals, other.driver_refusals),
            (&mut self.launches, other.launches),
            (&mut self.gpu_time_ns, other.gpu_time_ns),
            (&mut self.gate_wait_ns, other.gate_wait_ns),
            (&mut self.gate_waits, other.gate_waits),
            (&mut self.gate_timeouts, other.gate_timeouts),
            (&mut self.window_waits, other.window_waits),
        ] {
            *sum = sum.saturating_add(value);
        }
        for (peak, value) in self.peak.iter_mut().zip(other.peak) {
            *peak = (*peak).max(value);
        }
    }

    /// The words of a slot.
    pub(super) fn of_slot(words: Words<'_>) -> Self {
        let shards =
            (0..LAUNCH_SHARDS).map(|shard| offset_of!(Slot, launches) + shard * size_of::<u64>());
        Tally {
            refusals: words.count(offset_of!(Slot, refusals)),
            driver_refusals: words.count(offset_of!(Slot, driver_refusals)),
            launches: shards.map(|at| words.count(at)).sum(),
            gpu_time_ns: words.nanoseconds(offset_of!(Slot, gpu_time_ns)),
            gate_wait_ns: words.nanoseconds(offset_of!(Slot, gate_wait_ns)),
            gate_waits: words.count(offset_of!(Slot, gate_waits)),
            gate_timeouts: words.count(offset_of!(Slot, gate_timeouts)),
            window_waits: words.count(offset_of!(Slot, window_waits)),
            peak: words.u64s(offset_of!(Slot, peak)),
        }
    }

    /// The words of a header's [`Past`]. Nobody ever held more than a GPU can have.
    pub(super) fn of_past(words: Words<'_>) -> Self {
        let peak = words.u64s::<MAX_GPUS>(offset_of!(Past, peak));
        Tally {
            refusals: words.count(offset_of!(Past, refusals)),
            driver_refusals: words.count(offset_of!(Past, driver_refusals)),
            launches: words.count(offset_of!(Past, launches)),
            gpu_time_ns: words.nanoseconds(offset_of!(Past, gpu_time_ns)),
            gate_wait_ns: words.nanoseconds(offset_of!(Past, gate_wait_ns)),
            gate_waits: words.count(offset_of!(Past, gate_waits)),
            gate_timeouts: words.count(offset_of!(Past, gate_timeouts)),
            window_waits: words.count(offset_of!(Past, window_waits)),
            peak: peak.map(|bytes| bytes.min(MAX_BYTES)),
        }
    }
}
