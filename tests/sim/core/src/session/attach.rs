//! Opening, creating and mapping the state file.

use super::{Scratch, Session};
use crate::config::Config;
use crate::engine::{self, State};
use crate::layout::{MAGIC, MAX_CONFIG, Shared, VERSION, lock_bytes};
use crate::{clock, lock};
use std::cell::UnsafeCell;
use std::fmt;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

const SIZE: usize = std::mem::size_of::<Shared>();

/// Why the simulated driver could not start.
#[derive(Debug)]
pub struct OpenError {
    path: PathBuf,
    reason: String,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simgpu: {}: {}", self.path.display(), self.reason)
    }
}

impl std::error::Error for OpenError {}

/// Where the state is: `SIMGPU_STATE`, else `/dev/shm/simgpu-<uid>`.
pub fn state_path() -> PathBuf {
    match std::env::var_os("SIMGPU_STATE") {
        Some(path) if !path.is_empty() => path.into(),
        _ => {
            // SAFETY: getuid has no preconditions.
            format!("/dev/shm/simgpu-{}", unsafe { libc::getuid() }).into()
        }
    }
}

/// Modes of a state: of this user's alone, and of one that containers of other users share.
const OWN: u32 = 0o600;
const SHARED: u32 = 0o666;

/// That of a state at `path`: directly in `/dev/shm`, where every user may make files, it is this user's own. For others
/// whoever names another directory has chosen who may come.
fn mode(path: &Path) -> u32 {
    if path.parent() == Some(Path::new("/dev/shm")) { OWN } else { SHARED }
}

/// The configuration text that `SIMGPU_CONFIG` names; `None` if unset.
fn config_text() -> Result<Option<String>, OpenError> {
    let Some(path) = std::env::var_os("SIMGPU_CONFIG").filter(|p| !p.is_empty()) else {
        return Ok(None);
    };
    let path = PathBuf::from(path);
    let text = std::fs::read_to_string(&path)
        .map_err(|e| OpenError { path: path.clone(), reason: format!("SIMGPU_CONFIG: {e}") })?;
    if text.len() > MAX_CONFIG {
        return Err(OpenError { path, reason: format!("longer than {MAX_CONFIG} bytes") });
    }
    Config::parse(&text).map_err(|e| OpenError { path, reason: e.to_string() })?;
    Ok(Some(text))
}

impl Session {
    /// Attaches to the state that the environment names, creating it if need be.
    pub fn open() -> Result<Session, OpenError> {
        let text = config_text()?;
        Session::open_at(&state_path(), text.as_deref())
    }

    /// As [`Session::open`]; no text: whatever the state was created with, or the defaults.
    pub fn open_at(path: &Path, text: Option<&str>) -> Result<Session, OpenError> {
        let error = |reason: String| OpenError { path: path.to_owned(), reason };
        let mode = mode(path);
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(mode)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| error(format!("cannot open the simulator's state (SIMGPU_STATE): {e}")))?;
        let meta = file.metadata().map_err(|e| error(e.to_string()))?;
        if !meta.is_file() {
            return Err(error("the simulator's state must be a regular file".into()));
        }
        // SAFETY: geteuid has no preconditions.
        let caller = unsafe { libc::geteuid() };
        if mode == OWN && meta.uid() != caller {
            return Err(error(format!("it is uid {}'s, and this is uid {caller}", meta.uid())));
        }
        let identity = (meta.dev(), meta.ino());
        let fd = file.as_raw_fd();
        let (shared, config) = attach(fd, &file, text, mode).map_err(error)?;
        if mode == OWN {
            // An older simulator may have left it open to all.
            let _ = file.set_permissions(std::fs::Permissions::from_mode(mode));
        }
        Ok(Session {
            shared,
            config,
            fd: AtomicI32::new(file.into_raw_fd()),
            identity,
            path: path.to_owned(),
            slot: OnceLock::new(),
            scratch: UnsafeCell::new(Scratch {
                state: State::new(0, 0),
                commit: u64::MAX,
                spare: State::new(0, 0),
            }),
        })
    }

    /// A descriptor of the state file: the kept one, or a new one if the application closed it.
    pub(super) fn checked_fd(&self) -> Option<RawFd> {
        if is_file(self.fd(), self.identity) {
            return Some(self.fd());
        }
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(&self.path)
            .ok()?;
        is_file(file.as_raw_fd(), self.identity).then(|| {
            let fd = file.into_raw_fd();
            self.fd.store(fd, Ordering::Relaxed);
            fd
        })
    }
}

fn is_file(fd: RawFd, identity: (u64, u64)) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat fills `stat`, which is read only on success.
    unsafe {
        libc::fstat(fd, stat.as_mut_ptr()) == 0 && {
            let s = stat.assume_init();
            (s.st_dev, s.st_ino) == identity
        }
    }
}

type Mapped = (&'static Shared, Config);

/// Waits for, or performs, the file's initialisation, and holds the attach lock.
fn attach(
    fd: RawFd,
    file: &std::fs::File,
    text: Option<&str>,
    mode: u32,
) -> Result<Mapped, String> {
    for _ in 0..100 {
        if lock::try_exclusive(fd, lock_bytes::ATTACH) {
            let shared = prepare(fd, file, text, mode);
            let held = lock::share(fd, lock_bytes::ATTACH);
            let shared = shared?;
            if !held {
                return Err("cannot lock the simulator's state".into());
            }
            return mapped(shared, text);
        }
        if !lock::share(fd, lock_bytes::ATTACH) {
            return Err(format!("cannot lock: {}", std::io::Error::last_os_error()));
        }
        let len = file.metadata().map_err(|e| e.to_string())?.len();
        if len == SIZE as u64 {
            let shared = map(fd)?;
            if shared.magic.load(Ordering::Acquire) == MAGIC {
                return mapped(shared, text);
            }
            unmap(shared);
        } else if len != 0 {
            return Err(format!(
                "{len} bytes, expected {SIZE}: another build's state is in use; name another file"
            ));
        }
        // Its creator died half-way: try to be the next.
        lock::unlock(fd, lock_bytes::ATTACH);
        clock::sleep_until(clock::now_ns() + 1_000_000);
    }
    Err("nobody finishes creating the simulator's state; remove the file".into())
}

/// Alone with the file: reuses it if it is whole and of the same configuration, else makes it again.
fn prepare(
    fd: RawFd,
    file: &std::fs::File,
    text: Option<&str>,
    mode: u32,
) -> Result<&'static Shared, String> {
    let len = file.metadata().map_err(|e| e.to_string())?.len();
    if len == SIZE as u64 {
        let shared = map(fd)?;
        if is_usable(shared, text) {
            return Ok(shared);
        }
        unmap(shared);
    } else if len != 0 && !ours(file) {
        return Err("not a simulator's state; it is left alone".into());
    }
    file.set_len(0).map_err(|e| e.to_string())?;
    let size = libc::off_t::try_from(SIZE).map_err(|e| e.to_string())?;
    // SAFETY: posix_fallocate on an open descriptor has no other preconditions.
    let rc = unsafe { libc::posix_fallocate(fd, 0, size) };
    if rc != 0 {
        let _ = file.set_len(0);
        return Err(format!(
            "cannot allocate {SIZE} bytes: {}",
            std::io::Error::from_raw_os_error(rc)
        ));
    }
    // Best effort: the umask may be in the way of containers of other users.
    let _ = file.set_permissions(std::fs::Permissions::from_mode(mode));
    let shared = map(fd)?;
    initialise(shared, text.unwrap_or(""))?;
    Ok(shared)
}

/// Whether a file of another size begins as ours do (another build's).
fn ours(file: &std::fs::File) -> bool {
    use std::os::unix::fs::FileExt;
    let mut magic = [0u8; 8];
    file.read_exact_at(&mut magic, 0).is_ok() && u64::from_le_bytes(magic) == MAGIC
}

fn is_usable(shared: &'static Shared, text: Option<&str>) -> bool {
    shared.magic.load(Ordering::Acquire) == MAGIC
        && shared.version.load(Ordering::Relaxed) == VERSION
        && shared.created_ns.load(Ordering::Relaxed) <= clock::now_ns()
        && text.is_none_or(|t| t.as_bytes() == stored_config(shared))
}

fn stored_config(shared: &'static Shared) -> &'static [u8] {
    let len = (shared.config_len.load(Ordering::Relaxed) as usize).min(MAX_CONFIG);
    // SAFETY: written only before `magic` was published, never again while anybody is attached.
    unsafe { &(&*shared.config.get())[..len] }
}

fn mapped(shared: &'static Shared, text: Option<&str>) -> Result<Mapped, String> {
    if shared.version.load(Ordering::Relaxed) != VERSION {
        return Err("another build's state is in use; name another file".into());
    }
    let stored = stored_config(shared);
    if text.is_some_and(|t| t.as_bytes() != stored) {
        return Err("in use with another configuration than SIMGPU_CONFIG's; end the processes \
                    that use it, or name another state"
            .into());
    }
    let stored = std::str::from_utf8(stored).map_err(|e| e.to_string())?;
    let config = Config::parse(stored).map_err(|e| e.to_string())?;
    Ok((shared, config))
}

fn initialise(shared: &'static Shared, text: &str) -> Result<(), String> {
    let config = Config::parse(text).map_err(|e| e.to_string())?;
    let now = clock::now_ns();
    shared.version.store(VERSION, Ordering::Relaxed);
    shared.created_ns.store(now, Ordering::Relaxed);
    let len = u32::try_from(text.len()).map_err(|e| e.to_string())?;
    shared.config_len.store(len, Ordering::Relaxed);
    let gpus = u32::try_from(config.units.len()).map_err(|e| e.to_string())?;
    let state = State::new(gpus, now);
    // SAFETY: alone with the file (the attach byte is held exclusively), nothing is published.
    unsafe {
        (&mut *shared.config.get())[..text.len()].copy_from_slice(text.as_bytes());
        for buffer in &shared.engines {
            std::ptr::copy_nonoverlapping(&raw const *state, buffer.get(), 1);
        }
        if !lock::initialise(shared) {
            return Err("cannot make a robust process-shared mutex".into());
        }
    }
    debug_assert!(state.channels.iter().all(|c| c.gpu == engine::NONE));
    // Release: pairs with Acquire in `attach`.
    shared.magic.store(MAGIC, Ordering::Release);
    Ok(())
}

fn map(fd: RawFd) -> Result<&'static Shared, String> {
    // SAFETY: a fresh shared mapping of a file that is SIZE bytes long.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(format!("cannot map: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: page-aligned, SIZE bytes, mapped for the rest of the process (or until `unmap`,
    // whose callers drop the reference); every bit pattern is valid but for the engines, which
    // are read only after `magic` says that they were written.
    Ok(unsafe { &*at.cast::<Shared>() })
}

fn unmap(shared: &'static Shared) {
    // SAFETY: `shared` came from `map` and its caller does not use it again.
    unsafe { libc::munmap(std::ptr::from_ref(shared).cast_mut().cast(), SIZE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_state_where_every_user_may_make_files_is_its_users_own() {
        let own = PathBuf::from(format!("/dev/shm/simgpu-test-{}", std::process::id()));
        Session::open_at(&own, None).unwrap();
        let mode = mode_of(&own);
        let given_away = std::os::unix::fs::chown(&own, Some(65534), None).is_ok();
        let others = Session::open_at(&own, None).err().map(|error| error.to_string());
        std::fs::remove_file(&own).unwrap();
        assert_eq!(mode, 0o600);
        match given_away {
            true => assert!(others.is_some(), "another user's was taken"),
            false => eprintln!("not checked, for only root gives a file away"),
        }
        let shared = tempfile::tempdir().unwrap();
        let shared = shared.path().join("state");
        Session::open_at(&shared, None).unwrap();
        assert_eq!(mode_of(&shared), 0o666);
    }
}
