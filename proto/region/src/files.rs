//! Making page files appear whole, and putting right what other programs leave in their place.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{PageError, PageFault};
use crate::layout::{
    GATE_SOCKET, QUOTA_BYTES, QUOTA_FILE, SESSION_SOCKET, USAGE_BYTES, USAGE_FILE,
};
use crate::os::{self, FileKind, Stat};

/// Of a pages directory: containers enter it, the plugin alone changes it.
const DIR_MODE: u32 = 0o755;

/// Whether any user of a container may enter the pages directory, and nobody else write there.
#[must_use]
pub fn is_open(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o777 == DIR_MODE)
}

/// Makes the pages directory ready for [`crate::quota::create`] and [`crate::usage::create`]:
/// creates it where absent, opens it to any user of a container, and removes *empty* directories that stand where its files belong,
/// which containerd makes of mount sources that are missing when a container starts. Also removes
/// temporary files that a killed plugin left.
///
/// Returns the files that were directories.
///
/// # Errors
/// [`PageFault::IsDirectory`] for such a directory with something in it, which is nobody's to
/// delete unasked; [`PageFault::NotRegular`] where `dir` is no directory; [`PageFault::Io`].
pub fn prepare_dir(dir: &Path) -> Result<Vec<PathBuf>, PageError> {
    match fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(PageError::new(dir, PageFault::NotRegular));
        }
        made => made.map_err(|error| PageError::io(dir, "mkdir", &error))?,
    }
    if !is_open(dir) {
        // Whatever the umask of whoever made it: any user of the container enters it.
        fs::set_permissions(dir, fs::Permissions::from_mode(DIR_MODE))
            .map_err(|error| PageError::io(dir, "chmod", &error))?;
    }
    let mut replaced = Vec::new();
    for name in [QUOTA_FILE, USAGE_FILE, SESSION_SOCKET, GATE_SOCKET] {
        let path = dir.join(name);
        if fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
            match fs::remove_dir(&path) {
                Ok(()) => replaced.push(path),
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    return Err(PageError::new(&path, PageFault::IsDirectory));
                }
                Err(error) => return Err(PageError::io(&path, "rmdir", &error)),
            }
        }
    }
    let entries = fs::read_dir(dir).map_err(|error| PageError::io(dir, "readdir", &error))?;
    for entry in entries.flatten() {
        if entry.file_name().as_bytes().starts_with(TEMPORARY.as_bytes()) {
            // Its writer is gone: the plugin is the only writer and prepares before it
            // creates. If it cannot be removed, it only wastes a page.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(replaced)
}

/// Removes both pages, of an allocation that no container uses any more. Processes that still map
/// them keep what they mapped. Absent files are no error.
pub fn remove_pages(dir: &Path) -> Result<(), PageError> {
    for name in [QUOTA_FILE, USAGE_FILE] {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(PageError::io(&path, "unlink", &error));
            }
            _ => {}
        }
    }
    Ok(())
}

const TEMPORARY: &str = ".tessera-new.";

/// Writes `page` under a temporary name, its first eight bytes (the magic) last, and links it to
/// `path`, which must not exist. Readers see the whole file or none. Nothing is synced: the pages
/// live on a tmpfs, and are rebuilt after a reboot.
///
/// Returns `None` if something exists at `path`.
pub(crate) fn publish(
    dir: &Path,
    name: &str,
    page: &[u8],
    mode: u32,
    spares: Option<&Spares>,
) -> Result<Option<File>, PageError> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let path = dir.join(name);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let temporary = dir.join(format!("{TEMPORARY}{}.{serial}", os::pid()));
    let _ = fs::remove_file(&temporary);
    let make = |options: &mut OpenOptions| {
        let file = options
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(|error| fault(&path, "create", &error, page.len()))?;
        fill(&file, page, mode)
            .map_err(|(call, error)| fault(&path, call, &error, page.len()))
            .map(|()| file)
    };
    let mut made = make(OpenOptions::new().create_new(true));
    if let (Err(error), Some(spares)) = (&made, spares)
        && matches!(error.fault, PageFault::NoSpace(_))
        && spares.take(name, &temporary)
    {
        made = make(&mut OpenOptions::new());
    }
    let filled = made.and_then(|file| match fs::hard_link(&temporary, &path) {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(fault(&path, "link", &error, page.len())),
    });
    let _ = fs::remove_file(&temporary);
    filled
}

fn fill(mut file: &File, page: &[u8], mode: u32) -> Result<(), (&'static str, io::Error)> {
    use std::os::unix::fs::FileExt;
    const MAGIC: usize = 8;
    let step = |call: &'static str| move |error| (call, error);
    allocate(file, page.len()).map_err(step("fallocate"))?;
    // Whatever the umask says: any user of the container must be able to use it.
    file.set_permissions(fs::Permissions::from_mode(mode)).map_err(step("chmod"))?;
    file.write_all(&[0; MAGIC]).map_err(step("write"))?;
    file.write_all(&page[MAGIC..]).map_err(step("write"))?;
    file.write_all_at(&page[..MAGIC], 0).map_err(step("write"))
}

/// Makes the kernel hold memory for all of the file, so that no later write through a mapping
/// finds a full file system (which would be SIGBUS).
pub(crate) fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).unwrap_or(libc::off_t::MAX);
    loop {
        // SAFETY: a plain call on an open descriptor.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
            0 => return Ok(()),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

fn fault(path: &Path, call: &'static str, error: &io::Error, bytes: usize) -> PageError {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            PageError::new(path, PageFault::NoSpace(u64::try_from(bytes).unwrap_or(u64::MAX)))
        }
        _ => PageError::io(path, call, error),
    }
}

/// Whether anything is at the path.
pub(crate) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Opens one of the plugin's own files for reading and writing; it must be a regular file.
pub(crate) fn open_page(path: &Path) -> Result<(File, Stat), PageError> {
    let name = c_path(path).map_err(|errno| PageError::os(path, "open", errno))?;
    let fd = os::open(&name, libc::O_RDWR).map_err(|errno| PageError::os(path, "open", errno))?;
    let stat = os::fstat(fd.as_raw_fd()).map_err(|errno| PageError::os(path, "fstat", errno))?;
    match stat.kind {
        FileKind::Regular => Ok((File::from(fd), stat)),
        FileKind::Directory => Err(PageError::new(path, PageFault::IsDirectory)),
        FileKind::Other => Err(PageError::new(path, PageFault::NotRegular)),
    }
}

/// Grows or cuts the file to `bytes` and fills its holes.
pub(crate) fn restore_size(file: &File, path: &Path, bytes: usize) -> Result<(), PageError> {
    let len = u64::try_from(bytes).unwrap_or(u64::MAX);
    file.set_len(len).map_err(|error| fault(path, "ftruncate", &error, bytes))?;
    allocate(file, bytes).map_err(|error| fault(path, "fallocate", &error, bytes))
}

/// The path as the kernel takes it, or the `errno` it would answer.
pub(crate) fn c_path(path: &Path) -> Result<CString, i32> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)
}

// Page files made in advance. All pages share a file system of limited size, and a tenant can fill it by growing its
// usage file; its memory cannot be had back faster than it takes it again. So the plugin keeps some files whose memory
// is allocated already: a new allocation is made of those.

/// A directory with spare page files, on the file system of the pages.
#[derive(Clone, Debug)]
pub struct Spares {
    dir: PathBuf,
}

/// What a pair of pages is made of.
const KINDS: [(&str, usize); 2] = [(USAGE_FILE, USAGE_BYTES), (QUOTA_FILE, QUOTA_BYTES)];

/// Bytes of a pair of pages.
pub const PAIR_BYTES: u64 = (USAGE_BYTES + QUOTA_BYTES) as u64;

impl Spares {
    /// Those in `dir`, which need not exist.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Makes files until there are `pairs` of them.
    ///
    /// # Errors
    /// What the file system says; those made before it are there.
    pub fn fill(&self, pairs: usize) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        for pair in 0..pairs {
            for (name, bytes) in KINDS {
                let path = self.path(name, pair);
                if path.exists() {
                    continue;
                }
                // Complete or not there: one that a killed plugin left half made is made again.
                let making = self.dir.join("making");
                let _ = fs::remove_file(&making);
                let mut options = OpenOptions::new();
                let file = options.write(true).create_new(true).mode(0o600).open(&making)?;
                let made = file
                    .set_len(u64::try_from(bytes).unwrap_or(0))
                    .and_then(|()| allocate(&file, bytes))
                    .and_then(|()| fs::rename(&making, path));
                if made.is_err() {
                    let _ = fs::remove_file(&making);
                }
                made?;
            }
        }
        Ok(())
    }

    /// Renames a spare of this kind to `path`; false if there is none.
    pub(crate) fn take(&self, name: &str, path: &Path) -> bool {
        let _ = fs::remove_file(path);
        let Ok(entries) = fs::read_dir(&self.dir) else { return false };
        let is_one = |entry: &fs::DirEntry| {
            entry.file_name().to_str().is_some_and(|found| {
                found.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
            })
        };
        entries.flatten().filter(is_one).any(|entry| fs::rename(entry.path(), path).is_ok())
    }

    fn path(&self, name: &str, pair: usize) -> PathBuf {
        self.dir.join(format!("{name}.{pair}"))
    }
}
