//! What slots counted that are others' by now: in the page where a process of the tenant took a slot over,
//! as a value where the plugin did.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::layout::{Past, Slot};

impl Past {
    /// Takes over what a dead owner's slot counted. Only for the holder of the slot's lock.
    ///
    /// Each counter leaves the slot before it is added here: one who is killed in between loses that one,
    /// and the next to take the slot counts nothing twice.
    pub(crate) fn take(&self, slot: &Slot) {
        for (peak, own) in self.peak.iter().zip(&slot.peak) {
            let own = own.load(Ordering::Relaxed);
            if own > peak.load(Ordering::Relaxed) {
                peak.fetch_max(own, Ordering::Relaxed);
            }
        }
        let add = |sum: &AtomicU64, word: &AtomicU64| {
            if word.load(Ordering::Relaxed) != 0 {
                sum.fetch_add(word.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
        };
        for shard in &slot.launches {
            add(&self.launches, shard);
        }
        add(&self.refusals, &slot.refusals);
        add(&self.driver_refusals, &slot.driver_refusals);
        add(&self.gate_wait_ns, &slot.gate_wait_ns);
        add(&self.gpu_time_ns, &slot.gpu_time_ns);
        add(&self.gate_waits, &slot.gate_waits);
        add(&self.gate_timeouts, &slot.gate_timeouts);
        add(&self.window_waits, &slot.window_waits);
    }
}
