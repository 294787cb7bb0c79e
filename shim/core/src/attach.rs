//! Finds the pages. *Absence closes*: where the mount point exists, only it counts, and a page that
//! is missing, unreadable or invalid means no GPU, not an unlimited one.
//!
//! The mount point is a directory with one directory for each share, named by its allocation, or (made by
//! plugins before there were several) the one share's pages themselves. The parent is the container's, so
//! anything may have been put there: what counts is mounted read-only, from another file system.

use crate::directory;
use crate::log::Reason;
use alloc::boxed::Box;
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;
use core::fmt;
use tessera_region::layout::{
    CONTAINER_PAGES_DIR, GATE_SOCKET, QUOTA_FILE, SESSION_SOCKET, USAGE_FILE,
};
use tessera_region::quota::QuotaReader;
use tessera_region::share::{MAX_SHARES, Share, ShareFault, ShareSet};
use tessera_region::usage::UsageMap;
use tessera_region::{AttachError, in_dir};

/// The pages of all shares, attached.
#[derive(Debug)]
pub struct Pages {
    /// The pages, in the order of their ids.
    pub shares: ShareSet,
    /// Where the plugin listens, for each of them.
    pub sockets: Vec<Sockets>,
}

/// The sockets of one share.
#[derive(Debug)]
pub struct Sockets {
    /// Where the plugin listens.
    pub session: CString,
    /// Where the arbiter listens.
    pub gate: CString,
}

/// What there is to attach to.
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

/// Says why there are no pages.
fn broken(place: Place, why: fmt::Arguments<'_>) {
    BROKEN.say(format_args!("no GPU for this process: {why}; {}", place.advice()));
}

/// Looks for the pages and attaches.
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

/// `TESSERA_DIR`.
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
        Place::MountPoint => directory::is_mounted_read_only(dir, above),
        Place::Named => true,
    };
    let mut names = [[0u8; directory::NAME]; MAX_SHARES + 1];
    let count = match directory::list(dir, &mut names) {
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
    let is_file = |name: &[u8; directory::NAME]| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_path_does_not_exist() {
        assert!(exists(c"/proc/self"));
        assert!(exists(c"/dev/null"));
        assert!(!exists(c"/no/such/path"));
        assert!(!exists(c"/dev/null/below"), "ENOTDIR");
        let long = CString::new(vec![b'a'; 5000]).expect("no NUL");
        assert!(exists(&long), "ENAMETOOLONG tells nothing");
    }
}
