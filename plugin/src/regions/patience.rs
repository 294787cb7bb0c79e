//! Work on a container's usage file that the container can hold up.
//!
//! Reading, `fstat`, `open` and locks never wait for a tenant. But whoever writes to a file, cuts it,
//! changes its mode or unlinks it needs the inode's lock, and that is held through all of a tenant's
//! `write(2)`, which a tenant can make last: from a buffer whose pages come from a FUSE file system or
//! by `userfaultfd(2)`. So such work gets a thread of its own and a limited time, and where it is not
//! done by then, no more of it is begun until it is.

use crate::locks::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// How long to wait. What there is to do takes microseconds.
const LIMIT: Duration = Duration::from_secs(2);

/// The tenant is in the middle of a write to its usage file that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a process holds up every change of the usage file by a write that does not end")]
pub struct HeldUp;

/// For one usage file.
#[derive(Debug, Default)]
pub(super) struct Patience {
    turn: Mutex<()>,
    busy: Arc<AtomicBool>,
}

impl Patience {
    /// Does `work`, or gives up on it; then it goes on by itself.
    pub(super) fn spend<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HeldUp> {
        self.spend_at_most(LIMIT, work)
    }

    fn spend_at_most<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HeldUp> {
        let _turn = lock(&self.turn);
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(HeldUp);
        }
        let (done, result) = mpsc::sync_channel(1);
        let busy = Done(Arc::clone(&self.busy));
        let run = move || {
            let value = work();
            drop(busy);
            let _ = done.send(value);
        };
        let thread = std::thread::Builder::new().name("pages".into()).stack_size(256 << 10);
        if thread.spawn(run).is_err() {
            // `run` and with it the mark are gone; the next round tries again.
            return Err(HeldUp);
        }
        result.recv_timeout(limit).map_err(|_| HeldUp)
    }
}

/// Takes the mark back when the work is done, or was never begun.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_left_alone_and_tried_again_when_it_has() {
        let patience = Patience::default();
        assert_eq!(patience.spend(|| 7), Ok(7));
        let (end, held) = mpsc::channel::<()>();
        let short = Duration::from_millis(20);
        assert_eq!(patience.spend_at_most(short, move || held.recv().is_ok()), Err(HeldUp));
        assert_eq!(patience.spend(|| 7), Err(HeldUp), "at once");
        end.send(()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while patience.spend(|| 7) != Ok(7) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}
