//! Finds the pages. *Absence closes*: where the mount point exists, only it counts, and a page that
//! is missing, unreadable or invalid means no GPU, not an unlimited one.
//!
//! The mount point is a directory with one directory for each share, named by its allocation. It is the
//! container's, so anything may have been put there: what counts is mounted read-only, from another file
//! system. What `TESSERA_DIR` names may be the one share's directory itself.

use crate::log::{Reason, errno, set_errno};
use alloc::boxed::Box;
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;
use core::fmt;
use core::mem::MaybeUninit;
use tessera_region::layout::{
    CONTAINER_PAGES_DIR, GATE_SOCKET, QUOTA_FILE, SESSION_SOCKET, USAGE_FILE,
};
use tessera_region::quota::QuotaReader;
use tessera_region::share::{MAX_SHARES, Share, ShareSet, TOO_MANY_SHARES};
use tessera_region::usage::UsageMap;
use tessera_region::{AttachError, in_dir};

#[derive(Debug)]
pub struct Pages {
    /// The pages, in the order of their ids.
    pub shares: ShareSet,
    /// Where the plugin listens, for each of them.
    pub sockets: Vec<Sockets>,
}

#[derive(Debug)]
pub struct Sockets {
    /// Where the plugin listens.
    pub session: CString,
    /// Where the arbiter listens.
    pub gate: CString,
}

#[derive(Debug)]
pub enum Found {
    /// Neither mount point nor variable: not a tenant.
    Nothing,
    /// Pages that count.
    Pages(Box<Pages>),
    /// Pages that should be there and are not; the line says which and what to do.
    Broken,
}

static BROKEN: Reason = Reason::new();

/// Where pages are looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A container's, of whose files only the plugin's mounts count.
    MountPoint,
    /// Whatever somebody has named.
    Named,
}

impl Place {
    fn advice(self) -> &'static str {
        match self {
            Self::MountPoint => {
                "the Tessera plugin writes this when a container starts: delete the pod so that it \
                 is made again; if that does not help, see `tessera status` on its node"
            }
            Self::Named => {
                "TESSERA_DIR names this directory: start the program with `tessera run`, or unset \
                 TESSERA_DIR to run without a quota"
            }
        }
    }
}

fn broken(place: Place, why: fmt::Arguments<'_>) {
    BROKEN.say(format_args!("no GPU for this process: {why}; {}", place.advice()));
}

pub fn find() -> Found {
    let (dir, place) = if exists(MOUNT_POINT) {
        (MOUNT_POINT.into(), Place::MountPoint)
    } else if let Some(dir) = named_by_environment() {
        (dir, Place::Named)
    } else {
        return Found::Nothing;
    };
    match attach(&dir, place) {
        Ok(pages) => Found::Pages(Box::new(pages)),
        Err(()) => Found::Broken,
    }
}

/// [`CONTAINER_PAGES_DIR`], as the kernel takes it.
const MOUNT_POINT: &CStr = c"/usr/local/tessera/pages";

const _: () = {
    let (a, b) = (CONTAINER_PAGES_DIR.as_bytes(), MOUNT_POINT.to_bytes());
    assert!(a.len() == b.len());
    let mut at = 0;
    while at < a.len() {
        assert!(a[at] == b[at]);
        at += 1;
    }
};

/// Whether there is anything at `path`. What cannot be looked at (EACCES, ELOOP, EIO) exists: only
/// a clear "no such file" opens the way past it.
fn exists(path: &CStr) -> bool {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a NUL-terminated path and a valid place for the answer, which is not read.
    let failed = unsafe { libc::lstat(path.as_ptr(), stat.as_mut_ptr()) } != 0;
    !(failed && matches!(crate::log::errno(), libc::ENOENT | libc::ENOTDIR))
}

fn named_by_environment() -> Option<CString> {
    // SAFETY: a NUL-terminated name. As for every getenv, the host must not change its environment
    // at the same time; the value is copied at once.
    let value = unsafe { libc::getenv(c"TESSERA_DIR".as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: non-null, so it is a NUL-terminated string of the environment.
    let value = unsafe { CStr::from_ptr(value) };
    (!value.is_empty()).then(|| value.into())
}

/// Says so where it fails.
fn attach(dir: &CStr, place: Place) -> Result<Pages, ()> {
    let unusable = |at: &CStr, fault: &dyn fmt::Display| {
        broken(place, format_args!("{}: {fault}", at.to_string_lossy()));
    };
    let none = |fault: &str| unusable(dir, &fault);
    let given = |at: &CStr| match place {
        Place::MountPoint => is_mounted_read_only(at, dir),
        Place::Named => true,
    };
    let mut names = match list(dir) {
        Ok(names) => names,
        // A file in the directory's place, or none: as an empty one.
        Err(libc::ENOENT | libc::ENOTDIR) => Vec::new(),
        Err(errno) => {
            unusable(dir, &format_args!("not to be listed (os error {errno})"));
            return Err(());
        }
    };
    let mut found: Vec<(CString, Share)> = Vec::new();
    let is_file = |name: &CString| {
        [QUOTA_FILE, USAGE_FILE, SESSION_SOCKET, GATE_SOCKET]
            .iter()
            .any(|file| file.as_bytes() == name.to_bytes())
    };
    if place == Place::Named && (names.is_empty() || names.iter().any(is_file)) {
        found.push((dir.into(), open(dir, place)?));
    } else if names.len() > MAX_SHARES {
        none(TOO_MANY_SHARES);
        return Err(());
    } else {
        // Every process of every container has them in this order.
        names.sort_unstable();
        let mut not_given = None;
        for name in &names {
            let name = name.to_str().unwrap_or_default();
            let at = in_dir(dir, name);
            // What a volume of the pod's brings, or somebody in the container makes, adds nothing to what was
            // given, and takes nothing away.
            if !given(&at) {
                not_given.get_or_insert(at);
                continue;
            }
            let share = open(&at, place)?;
            if share.quota.allocation() != Some(name) {
                unusable(&at, &"holds the pages of another allocation than its name says");
                return Err(());
            }
            found.push((at, share));
        }
        if let (true, Some(at)) = (found.is_empty(), not_given) {
            unusable(
                &at,
                &"not a read-only mount of the plugin's, so somebody in this container has made it, \
                  and it counts for nothing",
            );
            return Err(());
        }
    }
    let sockets = found.iter().map(|(at, _)| Sockets {
        session: in_dir(at, SESSION_SOCKET),
        gate: in_dir(at, GATE_SOCKET),
    });
    let sockets = sockets.collect();
    let shares = found.into_iter().map(|(_, share)| share).collect();
    let shares = ShareSet::new(shares).map_err(none)?;
    Ok(Pages { shares, sockets })
}

fn open(dir: &CStr, place: Place) -> Result<Share, ()> {
    let fault = |fault: AttachError| broken(place, format_args!("{fault}"));
    let quota = QuotaReader::attach_in(dir).map_err(fault)?;
    let usage = UsageMap::attach_in(dir).map_err(fault)?;
    Ok(Share { quota, usage })
}

/// The entries of `dir` but for `.` and `..`: all, or one more than there may be shares.
fn list(dir: &CStr) -> Result<Vec<CString>, i32> {
    let before = errno();
    let listed = entries(dir);
    set_errno(before);
    listed
}

fn entries(dir: &CStr) -> Result<Vec<CString>, i32> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: a NUL-terminated path.
    let fd = unsafe { libc::open(dir.as_ptr(), flags) };
    if fd < 0 {
        return Err(errno());
    }
    // SAFETY: opened above, and closed by the stream's end.
    let stream = unsafe { libc::fdopendir(fd) };
    if stream.is_null() {
        let error = errno();
        // SAFETY: nobody else's.
        unsafe { libc::close(fd) };
        return Err(error);
    }
    let mut names: Vec<CString> = Vec::new();
    let error = loop {
        set_errno(0);
        // SAFETY: the stream is open.
        let entry = unsafe { libc::readdir(stream) };
        if entry.is_null() {
            break errno();
        }
        // SAFETY: an entry, valid until the next is read, whose name ends with a NUL.
        let name = unsafe { CStr::from_ptr((&raw const (*entry).d_name).cast()) };
        if name != c"." && name != c".." {
            names.push(name.into());
        }
        if names.len() > MAX_SHARES {
            break 0;
        }
    };
    // SAFETY: open until now.
    unsafe { libc::closedir(stream) };
    if error == 0 { Ok(names) } else { Err(error) }
}

/// Whether `dir` is a directory that somebody outside has mounted here, read-only: it lies on another file
/// system than the directory it is in, `above`. A container without privileges can make neither.
fn is_mounted_read_only(dir: &CStr, above: &CStr) -> bool {
    let before = errno();
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    let mut look = |path: &CStr| {
        // SAFETY: a NUL-terminated path and a valid place, which is read only once it was written.
        let found = unsafe { libc::lstat(path.as_ptr(), stat.as_mut_ptr()) } == 0;
        // SAFETY: filled in, as it succeeded.
        found.then(|| unsafe { stat.assume_init() })
    };
    let (here, over) = (look(dir), look(above));
    let mut mount = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: as above.
    let flags = (unsafe { libc::statvfs(dir.as_ptr(), mount.as_mut_ptr()) } == 0)
        // SAFETY: filled in, as it succeeded.
        .then(|| unsafe { mount.assume_init() }.f_flag);
    set_errno(before);
    // Of the mount (statvfs(3)), whatever the file system is elsewhere.
    let is_read_only = flags.is_some_and(|flags| flags & libc::ST_RDONLY != 0);
    let (Some(here), Some(over)) = (here, over) else { return false };
    here.st_mode & libc::S_IFMT == libc::S_IFDIR && here.st_dev != over.st_dev && is_read_only
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    #[test]
    fn only_a_missing_path_does_not_exist() {
        assert!(exists(c"/proc/self"));
        assert!(exists(c"/dev/null"));
        assert!(!exists(c"/no/such/path"));
        assert!(!exists(c"/dev/null/below"), "ENOTDIR");
        let long = CString::new(vec![b'a'; 5000]).expect("no NUL");
        assert!(exists(&long), "ENAMETOOLONG tells nothing");
    }

    fn c(path: &Path) -> CString {
        CString::new(path.as_os_str().as_bytes()).expect("no NUL")
    }

    #[test]
    fn entries_are_listed_until_there_are_too_many() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(list(&c(dir.path())), Ok(Vec::new()));
        std::fs::create_dir(dir.path().join("share")).expect("made");
        assert_eq!(list(&c(dir.path())), Ok(vec![c"share".into()]));
        (0..150).for_each(|at| std::fs::write(dir.path().join(at.to_string()), "").expect("made"));
        assert_eq!(list(&c(dir.path())).map(|names| names.len()), Ok(MAX_SHARES + 1));
        assert_eq!(list(c"/no/such/path"), Err(libc::ENOENT));
        assert_eq!(list(c"/dev/null"), Err(libc::ENOTDIR));
    }

    #[test]
    fn a_directory_of_ones_own_is_no_mount() {
        let dir = tempfile::tempdir().expect("a directory");
        let inner = dir.path().join("inner");
        std::fs::create_dir(&inner).expect("made");
        assert!(!is_mounted_read_only(&c(&inner), &c(dir.path())));
        assert!(!is_mounted_read_only(c"/proc", c"/"), "a mount, and writable");
        std::os::unix::fs::symlink("/sys", dir.path().join("link")).expect("made");
        assert!(!is_mounted_read_only(&c(&dir.path().join("link")), &c(dir.path())));
    }
}
