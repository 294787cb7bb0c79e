//! What is known of an allocation's memory beyond its account, for `status`, and the bell that says
//! that there is news of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tessera_region::layout::MAX_GPUS;
use tessera_system::locks::lock;

/// Wakes the thread that looks.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Wakes it, now or when it waits next.
    pub fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_all();
    }

    /// Waits until somebody rings or it is `due`.
    pub fn wait(&self, due: Instant) {
        let mut rung = lock(&self.rung);
        while !*rung {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(rung, left);
            rung = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *rung = false;
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Observed {
    bell: OnceLock<Arc<Bell>>,
    news: AtomicBool,
    used: Mutex<[Option<u64>; MAX_GPUS]>,
    findings: AtomicU64,
    stands: AtomicBool,
    departing: AtomicBool,
}

impl Observed {
    /// Where to ring when there is news. The first call counts.
    pub fn attach(&self, bell: &Arc<Bell>) {
        // Set once, with the region's making.
        let _ = self.bell.set(Arc::clone(bell));
    }

    /// Something has happened that is worth a look.
    pub fn news(&self) {
        if let Some(bell) = self.bell.get()
            && !self.news.swap(true, Ordering::AcqRel)
        {
            bell.ring();
        }
    }

    /// Whether there was news since the last time.
    pub fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Bytes of its processes on the page's `gpu`-th GPU as the driver said at the last look; `None`
    /// if it did not.
    pub fn used(&self, gpu: usize) -> Option<u64> {
        lock(&self.used).get(gpu).copied().flatten()
    }

    /// See [`Observed::used`].
    pub fn set_used(&self, gpu: usize, bytes: Option<u64>) {
        if let Some(used) = lock(&self.used).get_mut(gpu) {
            *used = bytes;
        }
    }

    /// Times that memory outside the account was found.
    pub fn findings(&self) -> u64 {
        self.findings.load(Ordering::Relaxed)
    }

    /// Whether there is any now.
    pub fn stands(&self) -> bool {
        self.stands.load(Ordering::Relaxed)
    }

    /// Whether the driver may have memory of dead processes of it.
    pub fn departing(&self) -> bool {
        self.departing.load(Ordering::Relaxed)
    }

    /// See [`Observed::departing`].
    pub fn set_departing(&self, any: bool) {
        self.departing.store(any, Ordering::Relaxed);
    }

    /// Takes the audit's word.
    pub fn found(&self, new: u64, stands: bool) {
        self.findings.fetch_add(new, Ordering::Relaxed);
        self.stands.store(stands, Ordering::Relaxed);
    }

    /// A new tenant begins.
    pub fn clear(&self) {
        *lock(&self.used) = [None; MAX_GPUS];
        self.findings.store(0, Ordering::Relaxed);
        self.stands.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn news_ring_once_until_they_are_taken() {
        let bell = Arc::new(Bell::default());
        let observed = Observed::default();
        observed.news();
        assert!(!observed.take_news(), "nobody listens");
        observed.attach(&bell);
        observed.news();
        let far = Instant::now() + Duration::from_secs(60);
        bell.wait(far);
        assert!(Instant::now() < far && observed.take_news() && !observed.take_news());
        let soon = Instant::now() + Duration::from_millis(5);
        bell.wait(soon);
        assert!(Instant::now() >= soon, "no news, no waking");
    }
}
