//! One call at a time, on this node: instances of the driver run side by side during a rolling update.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tessera_system::files;
use tessera_system::locks::lock;
use tracing::warn;

/// Longest wait for another instance. Kubelet waits 45 s for a call.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the lock is tried.
const PAUSE: Duration = Duration::from_millis(5);

/// The lock of all instances.
pub(super) struct Serial {
    path: PathBuf,
    /// A lock of files does not hold off other threads of this process.
    threads: Mutex<()>,
    patience: Duration,
    say: Say,
}

/// Hears of a file that cannot be locked, or with `None` that it can be; whether that is news.
pub(super) type Say = Box<dyn Fn(Option<String>) -> bool + Send + Sync>;

impl std::fmt::Debug for Serial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serial").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The lock, taken; free again when it is dropped, or when the process ends.
#[derive(Debug)]
pub(super) struct Held<'a> {
    _file: Option<File>,
    _thread: MutexGuard<'a, ()>,
}

/// Another instance does not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another instance of the driver has held {} for {} s", path.display(), .waited.as_secs())]
pub(super) struct SerialError {
    path: PathBuf,
    waited: Duration,
}

impl Serial {
    pub(super) fn new(path: &Path, say: Say) -> Self {
        Serial { path: path.to_owned(), threads: Mutex::new(()), patience: PATIENCE, say }
    }

    /// Waits for the lock. Blocking. Where the file cannot be used, other instances are not held off: only one of
    /// them has the ledger open, and a full disk must not keep pods from ending.
    pub(super) fn take(&self) -> Result<Held<'_>, SerialError> {
        let thread = lock(&self.threads);
        let began = Instant::now();
        let path = self.path.clone();
        let opened = files::in_time(&self.path, move || files::open_lock(&path));
        let file = match opened.and_then(|opened| opened) {
            Ok(file) => file,
            Err(error) => return Ok(self.alone(thread, &error)),
        };
        loop {
            match file.try_lock() {
                Ok(()) => {
                    self.say(None);
                    return Ok(Held { _file: Some(file), _thread: thread });
                }
                Err(TryLockError::Error(error)) => return Ok(self.alone(thread, &error)),
                Err(TryLockError::WouldBlock) => {}
            }
            if began.elapsed() >= self.patience {
                return Err(SerialError { path: self.path.clone(), waited: self.patience });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn alone<'a>(&self, thread: MutexGuard<'a, ()>, error: &io::Error) -> Held<'a> {
        self.say(Some(format!(
            "the DRA driver's {} cannot be locked: {error}. Claims are prepared and unprepared all the same; remove \
             what is there before the plugin is updated, so that two instances do not work side by side",
            self.path.display()
        )));
        Held { _file: None, _thread: thread }
    }

    fn say(&self, amiss: Option<String>) {
        if (self.say)(amiss.clone())
            && let Some(text) = amiss
        {
            warn!("{text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn serial(path: &Path) -> Serial {
        Serial::new(path, Box::new(|_| true))
    }

    /// What lies there holds nobody up, and `status` says so until it is mended.
    #[test]
    fn what_is_no_file_is_named_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serialize.lock");
        let said = std::sync::Arc::new(Mutex::new(None));
        let says = std::sync::Arc::clone(&said);
        let say =
            move |amiss: Option<String>| std::mem::replace(&mut *lock(&says), amiss).is_none();
        let serial = Serial::new(&path, Box::new(say));
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        drop(serial.take().unwrap());
        let text = lock(&said).clone().unwrap();
        assert!(text.contains("it is a pipe") && text.contains("serialize.lock"), "{text}");
        std::fs::remove_file(&path).unwrap();
        drop(serial.take().unwrap());
        assert_eq!(*lock(&said), None);
    }

    #[test]
    fn instances_wait_for_each_other_and_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serialize.lock");
        let (one, other) = (serial(&path), serial(&path));
        let held = one.take().unwrap();
        let short = Serial { patience: Duration::from_millis(20), ..serial(&path) };
        let error = short.take().unwrap_err();
        assert!(error.to_string().contains("another instance"), "{error}");
        let freed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let _held = other.take().unwrap();
                assert!(freed.load(Ordering::SeqCst));
            });
            std::thread::sleep(Duration::from_millis(30));
            freed.store(true, Ordering::SeqCst);
            drop(held);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn without_the_file_threads_wait_for_each_other_still() {
        let serial = serial(Path::new("/nowhere/serialize.lock"));
        let held = serial.take().unwrap();
        assert!(serial.threads.try_lock().is_err());
        drop(held);
        assert!(serial.threads.try_lock().is_ok());
    }
}
