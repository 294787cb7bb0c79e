//! Regular files: read, and no more of one than was expected; and opened to be written, for the owner alone.
//! All of it in calls that may never return: whatever a file system does that is mounted over a network, or by a process
//! that hangs.

use std::fs::{File, Metadata, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use nix::libc::{O_NOCTTY, O_NONBLOCK};

use crate::locks::lock;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("it is {0} and must be a regular file")]
    Kind(&'static str),
    #[error("it is larger than {} KiB, which is the most that is read", .0 >> 10)]
    TooLarge(u64),
    #[error("it is not text in UTF-8")]
    NotText,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FileError {
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            FileError::Io(error) => error.kind(),
            FileError::Kind(_) | FileError::TooLarge(_) | FileError::NotText => {
                io::ErrorKind::InvalidData
            }
        }
    }
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Io(error) => error,
            other => io::Error::new(other.kind(), other),
        }
    }
}

/// All bytes of the regular file at `path`, which links may lead to, if they are `most` at most. Nothing that lies there
/// makes it wait for longer than [`in_time`] does.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let own = path.to_owned();
    in_time(path, move || {
        let file = open(&own)?;
        match file.metadata()?.len() > most {
            true => Err(FileError::TooLarge(most)),
            false => read_from(file, most),
        }
    })?
}

pub fn text(path: &Path, most: u64) -> Result<String, FileError> {
    utf8(read(path, most)?)
}

pub fn utf8(bytes: Vec<u8>) -> Result<String, FileError> {
    String::from_utf8(bytes).map_err(|_| FileError::NotText)
}

pub fn open(path: &Path) -> Result<File, FileError> {
    // To open a device may do something to it, so it is not opened to see what it is.
    regular(&std::fs::metadata(path)?)?;
    let file = File::options().read(true).custom_flags(O_NONBLOCK | O_NOCTTY).open(path)?;
    // What is there may be another by now.
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file to read and write, or makes it; nobody but its owner can read it from then on. An older version, or
/// another's umask, may have left it open to all. Where the mode cannot be changed the file is another's, and so is the
/// choice.
pub fn open_private(path: &Path) -> io::Result<File> {
    const MODE: u32 = 0o600;
    // To open a device may do something to it, and a pipe would be waited for.
    file_or_nothing(path)?;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(MODE);
    let file = options.custom_flags(O_NONBLOCK | O_NOCTTY).open(path)?;
    let found = file.metadata()?;
    // What is there may be another by now.
    regular(&found)?;
    if found.permissions().mode() & !MODE & 0o777 != 0 {
        let _ = file.set_permissions(Permissions::from_mode(MODE));
    }
    Ok(file)
}

pub fn file_or_nothing(path: &Path) -> Result<(), FileError> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        found => regular(&found?),
    }
}

/// The bytes of an open file or stream, if they are `most` at most.
pub fn read_from(source: impl Read, most: u64) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    // It may grow while it is read, and what the kernel serves has no size.
    source.take(most + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()).is_ok_and(|len| len <= most) {
        true => Ok(bytes),
        false => Err(FileError::TooLarge(most)),
    }
}

fn regular(meta: &Metadata) -> Result<(), FileError> {
    let kind = meta.file_type();
    Err(FileError::Kind(match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }))
}

/// How long a file system may take. A disk that spins up takes less.
const LIMIT: Duration = Duration::from_secs(5);
/// Most calls that nobody waits for any more. Beyond that, no other is begun: each has a thread.
const MOST_LATE: usize = 16;
/// How often it is tried again about a path of which a call has not returned: it may have been mounted again.
const RETRY: Duration = Duration::from_secs(60);

struct Call {
    id: u64,
    path: PathBuf,
    begun: Instant,
}

static CALLS: Mutex<Vec<Call>> = Mutex::new(Vec::new());

fn unresponsive() -> io::Error {
    let text = format!(
        "its file system does not answer (waited {} s); mount it again, or use another path",
        LIMIT.as_secs()
    );
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Calls `work`, which is about `path`, in a thread of its own, and waits for it no longer than five seconds.
/// Where it takes longer, the thread stays until it returns, and the next call about the same path fails at once.
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
            return Err(unresponsive());
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
    receiver.recv_timeout(limit).map_err(|_| unresponsive())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/zero", at("zero")).unwrap();
        symlink("fifo", at("to-fifo")).unwrap();
        symlink("loop", at("loop")).unwrap();
        std::fs::write(at("file"), "text").unwrap();
        symlink("file", at("link")).unwrap();
        for (name, said) in [
            ("fifo", "it is a pipe"),
            ("to-fifo", "it is a pipe"),
            ("socket", "it is a socket"),
            ("zero", "it is a device"),
            ("", "it is a directory"),
            ("loop", "symbolic links"),
            ("absent", "No such file"),
        ] {
            let error = read(&at(name), SIZE).unwrap_err();
            assert!(error.to_string().contains(said), "{name}: {error}");
            if name != "absent" {
                let error = open_private(&at(name)).unwrap_err();
                assert!(error.to_string().contains(said), "{name}: {error}");
            }
        }
        assert_eq!(text(&at("link"), SIZE).unwrap(), "text");
        assert_eq!(read(&at("absent"), SIZE).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    const SIZE: u64 = 1 << 20;

    #[test]
    fn no_more_is_read_than_was_expected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        assert!(matches!(read(&path, 4), Err(FileError::TooLarge(4))));
        File::create(&path).unwrap().set_len(10 << 30).unwrap();
        assert!(matches!(read(&path, SIZE), Err(FileError::TooLarge(SIZE))));
        assert!(matches!(read_from(io::repeat(0), SIZE), Err(FileError::TooLarge(SIZE))));
        // What the kernel serves is a regular file without a size.
        assert!(text(Path::new("/proc/self/status"), SIZE).unwrap().starts_with("Name:"));
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert!(matches!(text(&path, SIZE), Err(FileError::NotText)));
    }

    #[test]
    fn a_file_that_grows_or_is_replaced_while_it_is_read_stays_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "first").unwrap();
        let mut opened = open(&path).unwrap();
        std::fs::rename(&path, dir.path().join("aside")).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut begun = [0; 2];
        opened.read_exact(&mut begun).unwrap();
        let aside = File::options().append(true).open(dir.path().join("aside"));
        aside.unwrap().write_all(&[b'x'; 100]).unwrap();
        assert!(matches!(read_from(&opened, 10), Err(FileError::TooLarge(10))));
    }

    #[test]
    fn new_and_old_files_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new"), dir.path().join("old"));
        std::fs::write(&old, "kept").unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();
        for path in [&new, &old] {
            open_private(path).unwrap();
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read(&old).unwrap(), b"kept");
    }

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
