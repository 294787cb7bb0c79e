//! Finds the pages. *Absence closes*: where the mount point exists, only it counts, and a page that
//! is missing, unreadable or invalid means no GPU, not an unlimited one.

use crate::log::Reason;
use alloc::boxed::Box;
use alloc::ffi::CString;
use core::ffi::CStr;
use tessera_region::in_dir;
use tessera_region::layout::{CONTAINER_PAGES_DIR, GATE_SOCKET, SESSION_SOCKET};
use tessera_region::quota::QuotaReader;
use tessera_region::usage::UsageMap;

/// Both pages, attached.
#[derive(Debug)]
pub struct Pages {
    /// The limits, read-only.
    pub quota: QuotaReader,
    /// Who uses what.
    pub usage: UsageMap,
    /// Where the plugin listens.
    pub session_path: CString,
    /// Where the arbiter listens.
    pub gate_path: CString,
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

/// Looks for the pages and attaches.
pub fn find() -> Found {
    if exists(MOUNT_POINT) {
        return attach(
            MOUNT_POINT,
            "the Tessera plugin writes this when a container starts: delete the pod so that it is \
             made anew; if that does not help, see `tessera status` on its node",
        );
    }
    match named_by_environment() {
        Some(dir) => attach(
            &dir,
            "TESSERA_DIR names this directory: start the program with `tessera run`, or unset \
             TESSERA_DIR to run without a quota",
        ),
        None => Found::Nothing,
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

fn attach(dir: &CStr, advice: &str) -> Found {
    let attached = QuotaReader::attach_in(dir)
        .and_then(|quota| UsageMap::attach_in(dir).map(|usage| (quota, usage)));
    match attached {
        Ok((quota, usage)) => {
            let session_path = in_dir(dir, SESSION_SOCKET);
            let gate_path = in_dir(dir, GATE_SOCKET);
            Found::Pages(Box::new(Pages { quota, usage, session_path, gate_path }))
        }
        Err(error) => {
            BROKEN.say(format_args!("no GPU for this process: {error}; {advice}"));
            Found::Broken
        }
    }
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
