//! What a process counts, in its slots. A GPU's refusals are counted in the first share that has it; launches
//! and gates in the share whose gate the process keeps to.

use core::sync::atomic::{AtomicU64, Ordering};

use super::{Account, Reason, Refused, Words};
use crate::layout::{LAUNCH_SHARDS, Slot};
use crate::ledger;
use crate::os;

impl Account {
    /// Counts a request as refused, and describes it.
    #[cold]
    pub fn refuse(&self, reason: Reason, gpu: usize, bytes: u64) -> Refused {
        let slot = self.first_slot(gpu);
        slot.refusals.fetch_add(1, Ordering::Relaxed);
        slot.last_refused_bytes.store(bytes, Ordering::Relaxed);
        slot.last_refused_ns.store(os::monotonic_ns(), Ordering::Relaxed);
        let granted = self.granted_total(gpu);
        let (overhead, limit) = (self.shares.observed_overhead(gpu), self.shares.memory_limit(gpu));
        Refused { reason, gpu, bytes, granted, overhead, limit }
    }

    /// Describes a refusal after what the driver had already taken was given back: as it was before the
    /// request, and with all the bytes that it would have taken.
    #[cold]
    pub fn undone(&self, refused: &Refused) -> Refused {
        let granted = self.granted_total(refused.gpu);
        let whole = refused.granted.saturating_add(refused.bytes);
        Refused { granted, bytes: whole.saturating_sub(granted).max(refused.bytes), ..*refused }
    }

    fn granted_total(&self, gpu: usize) -> u64 {
        let of = |words: Words<'_>| {
            ledger::granted_total(&words).unwrap_or_else(|| ledger::granted_sum(&words))
        };
        let parts = self.shares.parts(gpu).iter();
        parts.map(|&part| of(self.words(part))).fold(0, u64::saturating_add)
    }

    /// Says what the application had asked for on a GPU, where that is other than the bytes that were refused:
    /// less than a pool would have grown by, say.
    pub fn asked(&self, gpu: usize, bytes: u64) {
        self.first_slot(gpu).last_refused_bytes.store(bytes, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn count_grant(&self, gpu: usize) {
        self.first_slot(gpu).allocations.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    fn first_slot(&self, gpu: usize) -> &Slot {
        self.slot(self.shares.parts(gpu)[0])
    }

    /// The slot in the share whose gate the process keeps to.
    fn lead_slot(&self) -> &Slot {
        self.slots[self.shares.lead_index()].words()
    }

    /// Counts a request within the quota that the driver refused.
    pub fn count_driver_refusal(&self, gpu: usize) {
        self.first_slot(gpu).driver_refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// The launch counter's shards, for threads that count without a call. Only this process
    /// writes them.
    pub fn launches(&self) -> &[AtomicU64; LAUNCH_SHARDS] {
        &self.lead_slot().launches
    }

    /// Adds time waited at the gate by one launch.
    pub fn add_gate_wait(&self, ns: u64) {
        self.lead_slot().gate_waits.fetch_add(1, Ordering::Relaxed);
        self.lead_slot().gate_wait_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts that this process rations itself, because the arbiter is silent.
    pub fn count_gate_timeout(&self) {
        self.lead_slot().gate_timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a launch that found the window full.
    pub fn count_window_wait(&self) {
        self.lead_slot().window_waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds GPU time used.
    pub fn add_gpu_time(&self, ns: u64) {
        self.lead_slot().gpu_time_ns.fetch_add(ns, Ordering::Relaxed);
    }
}
