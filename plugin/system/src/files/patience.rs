//! Calls that may never return: whatever a file system does that is mounted over a network, or by a
//! process that hangs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use crate::locks::lock;

/// How long a file system may take. A disk that spins up takes less.
const LIMIT: Duration = Duration::from_secs(5);
/// Most calls that nobody waits for any more. Beyond that, no other is begun: each has a thread.
const MOST_LATE: usize = 16;
/// How often it is tried again about a path of which a call has not returned: it may have been mounted again.
const RETRY: Duration = Duration::from_secs(60);

/// A call under way.
struct Call {
    id: u64,
    path: PathBuf,
    begun: Instant,
}

static CALLS: Mutex<Vec<Call>> = Mutex::new(Vec::new());

/// It did not return in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its file system does not answer (waited {} s); mount it again, or use another path", LIMIT.as_secs())]
pub struct Unresponsive;

impl From<Unresponsive> for io::Error {
    fn from(silent: Unresponsive) -> Self {
        io::Error::new(io::ErrorKind::TimedOut, silent)
    }
}

/// Calls `work`, which is about `path`, in a thread of its own, and waits for it no longer than five seconds.
/// Where it takes longer, the thread stays until it returns.
///
/// # Errors
/// [`Unresponsive`]: at once, while an earlier call about the same path has not returned. No thread.
pub fn in_time<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    within(LIMIT, &CALLS, path, work)
}

fn within<T: Send + 'static>(
    limit: Duration,
    calls: &'static Mutex<Vec<Call>>,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    {
        let mut calls = lock(calls);
        let late = |call: &&Call| call.begun.elapsed() >= limit;
        let hopeless = |call: &Call| call.path == path && call.begun.elapsed() < RETRY;
        let late: Vec<&Call> = calls.iter().filter(late).collect();
        if late.len() >= MOST_LATE || late.into_iter().any(hopeless) {
            return Err(Unresponsive.into());
        }
        calls.push(Call { id, path: path.to_owned(), begun: Instant::now() });
    }
    let (sender, receiver) = sync_channel(1);
    let done = move || lock(calls).retain(|call| call.id != id);
    let thread = std::thread::Builder::new().name("file".into()).stack_size(256 << 10);
    let begun = thread.spawn(move || {
        let result = work();
        done();
        // Nobody may wait any more.
        let _ = sender.send(result);
    });
    begun.inspect_err(|_| done())?;
    // One that panicked was reported.
    receiver.recv_timeout(limit).map_err(|_| Unresponsive.into())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_does_not_return_is_given_up_and_not_begun_again() {
        static CALLS: Mutex<Vec<Call>> = Mutex::new(Vec::new());
        const LIMIT: Duration = Duration::from_millis(100);
        let path = |n: usize| PathBuf::from(n.to_string());
        let stick = |n: usize| {
            let (end, wait) = channel::<()>();
            let stuck = within(LIMIT, &CALLS, &path(n), move || wait.recv());
            assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut);
            end
        };
        let refused = |n: usize| {
            let refused = within(LIMIT, &CALLS, &path(n), || panic!("again"));
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
        };
        let mut ended = vec![stick(0)];
        refused(0);
        assert_eq!(within(LIMIT, &CALLS, &path(1), || 7).unwrap(), 7);
        // In all never more than a few.
        ended.extend((1..MOST_LATE).map(stick));
        refused(MOST_LATE);
        // As soon as they return, others may go.
        drop(ended);
        while !lock(&CALLS).is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(within(LIMIT, &CALLS, &path(1), || 7).unwrap(), 7);
    }
}
