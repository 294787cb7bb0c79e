//! Calls that may never return: whatever a file system does that is mounted over a network, or by a
//! process that hangs.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::locks::lock;

/// How long a file system may take. A disk that spins up takes less.
const LIMIT: Duration = Duration::from_secs(5);
/// Most calls that nobody waits for any more. Beyond that, no other is begun: each has a thread.
const MOST_LATE: usize = 16;
/// How often it is tried again where not even a path's directory answers.
const RETRY: Duration = Duration::from_secs(60);

/// What has a path, links not followed: device, inode and time of change; `None` where nothing has.
type Entry = Option<(u64, u64, i64, i64)>;

/// A call that nobody waits for any more.
struct Late {
    path: PathBuf,
    /// What had the path; `None` where that is what was never learnt.
    entry: Option<Entry>,
    since: Instant,
    call: Arc<Mutex<Call>>,
}

/// A call that was begun.
#[derive(Default)]
struct Call {
    entry: Option<Entry>,
    returned: bool,
    given_up: bool,
}

static LATE: Mutex<Vec<Late>> = Mutex::new(Vec::new());

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
/// [`Unresponsive`]: at once, while an earlier call has not returned that was about the same path and what is there
/// now. No thread.
pub fn in_time<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    within(LIMIT, &LATE, path, work)
}

fn within<T: Send + 'static>(
    limit: Duration,
    late: &'static Mutex<Vec<Late>>,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let hopeless =
        |late: &Late| late.path == path && late.entry.is_none() && late.since.elapsed() < RETRY;
    {
        let late = lock(late);
        if late.len() >= MOST_LATE || late.iter().any(hopeless) {
            return Err(Unresponsive.into());
        }
    }
    let call: Arc<Mutex<Call>> = Arc::default();
    let (sender, receiver) = sync_channel(1);
    let (shared, about) = (Arc::clone(&call), path.to_owned());
    std::thread::Builder::new().name("file".into()).stack_size(256 << 10).spawn(move || {
        let entry = entry(&about);
        lock(&shared).entry = Some(entry);
        let waits = |late: &Late| late.path == about && late.entry == Some(entry);
        let stuck = lock(late).iter().any(waits);
        let result = (!stuck).then(work);
        let mut call = lock(&shared);
        call.returned = true;
        if call.given_up {
            lock(late).retain(|late| !Arc::ptr_eq(&late.call, &shared));
        }
        drop(call);
        // Nobody may wait any more.
        let _ = sender.send(result);
    })?;
    let result = match receiver.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => {
            let mut state = lock(&call);
            if !state.returned {
                state.given_up = true;
                let (path, entry) = (path.to_owned(), state.entry);
                let call = Arc::clone(&call);
                lock(late).push(Late { path, entry, since: Instant::now(), call });
                return Err(Unresponsive.into());
            }
            drop(state);
            // It has just returned.
            receiver.recv().ok()
        }
        result => result.ok(),
    };
    // Without one it has panicked, and that was reported.
    result.ok_or(io::ErrorKind::Other)?.ok_or_else(|| Unresponsive.into())
}

fn entry(path: &Path) -> Entry {
    let meta = path.symlink_metadata().ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_does_not_return_is_given_up_and_begun_again_only_for_another_file() {
        static LATE: Mutex<Vec<Late>> = Mutex::new(Vec::new());
        let dir = tempfile::tempdir().unwrap();
        let path = |n: usize| dir.path().join(n.to_string());
        let stick = |n: usize| {
            let (end, wait) = channel::<()>();
            let stuck = within(Duration::from_millis(100), &LATE, &path(n), move || wait.recv());
            assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut);
            end
        };
        let refused = |n: usize| {
            let refused = within(Duration::MAX, &LATE, &path(n), || panic!("again"));
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
        };
        let mut ended = vec![stick(0)];
        refused(0);
        std::fs::write(path(0), "another").unwrap();
        assert_eq!(within(Duration::MAX, &LATE, &path(0), || 7).unwrap(), 7);
        // In all never more than a few.
        ended.extend((1..MOST_LATE).map(stick));
        refused(MOST_LATE);
        // As soon as they return, others may go.
        drop(ended);
        while !lock(&LATE).is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(within(Duration::MAX, &LATE, &path(1), || 7).unwrap(), 7);
    }
}
