//! Finds the pages. *Absence closes*: where the mount point exists, only it counts, and a page that
//! is missing, unreadable or invalid means no GPU, not an unlimited one.
//!
//! The mount point is a directory with one directory for each share, named by its allocation, or (made by
//! plugins before there were several) the one share's pages themselves. The parent is the container's, so
//! anything may have been put there: what counts is mounted read-only, from another file system.

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
use tessera_region::share::{MAX_SHARES, Share, ShareFault, ShareSet};
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
/// The directory that it is in.
const ABOVE: &CStr = c"/usr/local/tessera";

const _: () = {
    let (a, b) = (CONTAINER_PAGES_DIR.as_bytes(), MOUNT_POINT.to_bytes());
    assert!(a.len() == b.len() && ABOVE.to_bytes().len() < a.len());
    let mut at = 0;
    while at < a.len() {
        assert!(a[at] == b[at]);
        assert!(at >= ABOVE.to_bytes().len() || ABOVE.to_bytes()[at] == a[at]);
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
    let none = |fault: ShareFault| unusable(dir, &fault);
    let given = |dir: &CStr, above: &CStr| match place {
        Place::MountPoint => is_mounted_read_only(dir, above),
        Place::Named => true,
    };
    let mut names = [[0u8; NAME]; MAX_SHARES + 1];
    let count = match list(dir, &mut names) {
        Ok(count) => count,
        // A file in the directory's place, or none: what the page says of it.
        Err(libc::ENOENT | libc::ENOTDIR) => 0,
        Err(errno) => {
            unusable(dir, &format_args!("not to be listed (os error {errno})"));
            return Err(());
        }
    };
    let names = &mut names[..count.min(MAX_SHARES + 1)];
    let mut found: Vec<(CString, Share)> = Vec::new();
    if count == 0 && !given(dir, ABOVE) {
        none(ShareFault::None);
        return Err(());
    }
    // Without any share's directory this is one share's own, as it was before there could be several; an
    // empty one is what a runtime makes of a mount source that is missing.
    let is_file = |name: &[u8; NAME]| {
        let name = CStr::from_bytes_until_nul(name).unwrap_or_default().to_bytes();
        [QUOTA_FILE, USAGE_FILE, SESSION_SOCKET, GATE_SOCKET]
            .iter()
            .any(|file| file.as_bytes() == name)
    };
    if count == 0 || names.iter().any(is_file) && given(dir, ABOVE) {
        found.push((dir.into(), open(dir, place)?));
    } else if count > MAX_SHARES {
        none(ShareFault::TooMany);
        return Err(());
    } else {
        // Every process of every container has them in this order.
        names.sort_unstable();
        let mut not_given = None;
        for name in names {
            let name = CStr::from_bytes_until_nul(name).unwrap_or_default();
            let name = name.to_str().unwrap_or_default();
            let at = in_dir(dir, name);
            // What a volume of the pod's brings, or somebody in the container makes, adds nothing to what was
            // given, and takes nothing away.
            if !given(&at, dir) {
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

// What is in a directory, and whether it is a mount: by system calls alone, as libc's own listing takes
// memory of the host's allocator.

/// Longest name of an entry, with the NUL: longer ones are cut, and are no allocation's.
pub(crate) const NAME: usize = tessera_region::layout::ALLOCATION_LEN;

const BUFFER: usize = 2048;
/// `struct linux_dirent64` (getdents64(2)): inode, offset, length of the record, type, name.
const LENGTH_AT: usize = 16;
const NAME_AT: usize = 19;

/// Lists `dir` into `names`, each NUL-terminated, and returns how many entries there are, at most one more
/// than there is room for. `.` and `..` are none.
pub(crate) fn list(dir: &CStr, names: &mut [[u8; NAME]]) -> Result<usize, i32> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let before = errno();
    // SAFETY: a NUL-terminated path.
    let fd = unsafe { libc::open(dir.as_ptr(), flags) };
    if fd < 0 {
        let error = errno();
        set_errno(before);
        return Err(error);
    }
    let listed = list_open(fd, names);
    // SAFETY: opened above, and nobody else's.
    unsafe { libc::close(fd) };
    set_errno(before);
    listed
}

fn list_open(fd: i32, names: &mut [[u8; NAME]]) -> Result<usize, i32> {
    #[repr(align(8))]
    struct Buffer([u8; BUFFER]);
    let mut buffer = Buffer([0; BUFFER]);
    let mut count = 0;
    loop {
        // SAFETY: the buffer is valid for its length.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer.0.as_mut_ptr(), BUFFER) };
        let got = match usize::try_from(got) {
            Ok(0) => return Ok(count),
            Ok(got) => got.min(BUFFER),
            Err(_) => return Err(errno()),
        };
        let mut at = 0;
        while let Some(record) = buffer.0[..got].get(at..).filter(|rest| rest.len() > NAME_AT) {
            let length =
                usize::from(u16::from_ne_bytes([record[LENGTH_AT], record[LENGTH_AT + 1]]));
            let name = &record[NAME_AT..length.clamp(NAME_AT, record.len())];
            let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(name.len())];
            if name != b"." && name != b".." {
                let Some(place) = names.get_mut(count) else { return Ok(count + 1) };
                let kept = name.len().min(NAME - 1);
                place.fill(0);
                place[..kept].copy_from_slice(&name[..kept]);
                count += 1;
            }
            at += length.max(NAME_AT);
        }
    }
}

/// Whether `dir` is a directory that somebody outside has mounted here, read-only: it lies on another file
/// system than the directory it is in, `above`. A container without privileges can make neither.
pub(crate) fn is_mounted_read_only(dir: &CStr, above: &CStr) -> bool {
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
    fn entries_are_listed_with_their_names_and_counted_beyond_the_room() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut names = [[0; NAME]; 200];
        assert_eq!(list(&c(dir.path()), &mut names), Ok(0));
        let long = "x".repeat(NAME + 20);
        for at in 0..150 {
            std::fs::create_dir(dir.path().join(format!("{at:040}"))).expect("made");
        }
        std::fs::write(dir.path().join(&long), "").expect("made");
        assert_eq!(list(&c(dir.path()), &mut names), Ok(151));
        let mut found: Vec<_> = names[..151]
            .iter()
            .map(|name| CStr::from_bytes_until_nul(name).expect("one").to_str().expect("text"))
            .collect();
        found.sort_unstable();
        assert_eq!((found[7], found[150]), (&*format!("{:040}", 7), &long[..NAME - 1]));
        assert_eq!(list(&c(dir.path()), &mut names[..3]), Ok(4));
    }

    #[test]
    fn what_is_no_directory_has_a_reason() {
        let mut names = [[0; NAME]; 1];
        assert_eq!(list(c"/no/such/path", &mut names), Err(libc::ENOENT));
        assert_eq!(list(c"/dev/null", &mut names), Err(libc::ENOTDIR));
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
