//! Making things happen to a simulated GPU, for tests: XIDs, a GPU that falls off the bus.

use crate::inspect::low_half;
use crate::layout::MAX_XIDS;
use crate::session::Session;
use crate::{clock, futex};
use std::sync::atomic::Ordering;

impl Session {
    /// Injects an XID; NVML event sets registered for it wake.
    pub fn inject_xid(&self, gpu: usize, code: u32) {
        self.inject_xid_in(gpu, None, code);
    }

    /// The same, attributed to a GPU instance.
    pub fn inject_xid_in(&self, gpu: usize, gpu_instance: Option<u32>, code: u32) {
        let _locked = self.lock();
        let n = self.shared().xids_written.load(Ordering::Relaxed);
        #[allow(clippy::cast_possible_truncation, reason = "a remainder below MAX_XIDS")]
        let record = &self.shared().xids[(n % MAX_XIDS as u64) as usize];
        record.gpu.store(u32::try_from(gpu).unwrap_or(0), Ordering::Relaxed);
        record.code.store(code, Ordering::Relaxed);
        record.gpu_instance.store(gpu_instance.unwrap_or(u32::MAX), Ordering::Relaxed);
        record.at_ns.store(clock::now_ns(), Ordering::Relaxed);
        self.shared().gpus[gpu].last_xid.store(code, Ordering::Relaxed);
        // Release: pairs with Acquire in `xids_written`.
        self.shared().xids_written.store(n + 1, Ordering::Release);
        self.shared().xid_bell.store(low_half(n + 1), Ordering::Release);
        futex::wake_all(&self.shared().xid_bell);
    }

    /// Makes a GPU fall off the bus (XID 79), or come back as after a reset.
    pub fn set_lost(&self, gpu: usize, lost: bool) {
        self.shared().gpus[gpu].lost.store(u32::from(lost), Ordering::Release);
        if lost {
            self.inject_xid(gpu, 79);
        } else {
            self.reset_gpu(gpu);
        }
    }
}
