//! Work on a container's usage file that the container can delay.
//!
//! Reading, `fstat`, `open` and locks never wait for a tenant. But writing to a file, cutting it,
//! changing its mode and unlinking it need the inode's lock, and that is held through all of a tenant's
//! `write(2)`, which a tenant can make last: from a buffer whose pages come from a FUSE file system or
//! by `userfaultfd(2)`. So such work gets a thread of its own and a limited time, and where it is not
//! done by then, no more of it is begun until it is.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use tessera_system::locks::lock;

/// How long to wait. What there is to do takes microseconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Why work on a usage file was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldUp {
    /// The tenant is in the middle of a write to its usage file that does not end.
    #[error("a process holds up every change of the usage file by a write that does not end")]
    ByTenant,
    /// The node has no room for a thread, which is nobody's fault; the work was never begun.
    #[error("no thread to change the usage file in (too many processes or too little memory)")]
    NoThread,
}

impl HeldUp {
    /// Whether it is the tenant that keeps it from being done.
    pub fn is_tampering(self) -> bool {
        self == HeldUp::ByTenant
    }
}

/// For one usage file.
#[derive(Debug, Default)]
pub(super) struct TimeLimitedWorker {
    turn: Mutex<()>,
    busy: Arc<AtomicBool>,
}

impl TimeLimitedWorker {
    /// Does `work`, or gives up on it; then it goes on by itself.
    pub(super) fn spend<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HeldUp> {
        self.spend_at_most(LIMIT, work, spawn)
    }

    fn spend_at_most<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>,
    ) -> Result<T, HeldUp> {
        let _turn = lock(&self.turn);
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(HeldUp::ByTenant);
        }
        let (done, result) = mpsc::sync_channel(1);
        let busy = Done(Arc::clone(&self.busy));
        let run = move || {
            let value = work();
            drop(busy);
            let _ = done.send(value);
        };
        if spawn(Box::new(run)).is_err() {
            // `run` and with it the mark are gone; the next round tries again.
            return Err(HeldUp::NoThread);
        }
        result.recv_timeout(limit).map_err(|_| HeldUp::ByTenant)
    }
}

fn spawn(work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("pages".into()).stack_size(256 << 10);
    thread.spawn(work).map(drop)
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
        let time_limited_worker = TimeLimitedWorker::default();
        assert_eq!(time_limited_worker.spend(|| 7), Ok(7));
        let (end, held) = mpsc::channel::<()>();
        let short = Duration::from_millis(20);
        let held_up = Err(HeldUp::ByTenant);
        assert_eq!(
            time_limited_worker.spend_at_most(short, move || held.recv().is_ok(), spawn),
            held_up
        );
        assert_eq!(time_limited_worker.spend(|| 7), Err(HeldUp::ByTenant), "at once");
        end.send(()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while time_limited_worker.spend(|| 7) != Ok(7) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_cannot_be_had_is_not_the_tenants_doing() {
        let time_limited_worker = TimeLimitedWorker::default();
        let none = |_: Box<dyn FnOnce() + Send>| Err(io::ErrorKind::WouldBlock.into());
        assert_eq!(time_limited_worker.spend_at_most(LIMIT, || 7, none), Err(HeldUp::NoThread));
        assert_eq!(time_limited_worker.spend(|| 7), Ok(7), "the next is not kept from its turn");
    }
}
