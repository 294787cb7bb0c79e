//! What is in a directory, and whether it is a mount: by system calls alone, as libc's own listing takes
//! memory of the host's allocator.

use crate::log::{errno, set_errno};
use core::ffi::CStr;
use core::mem::MaybeUninit;

/// Longest name of an entry, with the NUL: longer ones are cut, and are no allocation's.
pub(crate) const NAME: usize = tessera_region::layout::ALLOCATION_LEN;

/// Bytes that the kernel may fill at a time.
const BUFFER: usize = 2048;
/// `struct linux_dirent64` (getdents64(2)): inode, offset, length of the record, type, name.
const LENGTH_AT: usize = 16;
const NAME_AT: usize = 19;

/// Lists `dir` into `names`, each NUL-terminated, and returns how many entries there are, at most one more
/// than there is room for. `.` and `..` are none.
///
/// # Errors
/// `errno`.
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
