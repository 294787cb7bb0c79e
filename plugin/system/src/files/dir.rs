//! A directory by its descriptor: whatever is renamed or linked on the way to it meanwhile, what is made and
//! removed is made and removed there. Links in it are never followed.
//! And what is this user's own: directories that no other user made or can replace, and peers at a Unix socket that act
//! for nobody else.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, renameat};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, fsync, geteuid, unlinkat};

use super::read::read;

/// Directories within directories that a removal follows; ours have none.
const DEEPEST: u32 = 16;

#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
}

impl Dir {
    /// The directory at `path`, whose last component must not be a link.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::at(AT_FDCWD, path.as_os_str())
    }

    /// The same, of an absolute path where links are followed that nobody else can have put there: those that
    /// root, or this process's user, owns.
    pub fn open_trusted(path: &Path) -> io::Result<Self> {
        match Self::open(path) {
            Err(error) if is_link(path) => {
                let link = path.symlink_metadata()?;
                if link.uid() != 0 && link.uid() != geteuid().as_raw() {
                    return Err(error);
                }
                Self::open(&path.canonicalize()?)
            }
            opened => opened,
        }
    }

    /// As [`Dir::open_trusted`], made if it is not there, with its parents.
    pub fn make(path: &Path) -> io::Result<Self> {
        match Self::open_trusted(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(path)?;
                Self::open_trusted(path)
            }
            opened => opened,
        }
    }

    /// The directory that holds `path`, which is made if it is not there, and the name of `path` in it.
    pub fn of(path: &Path) -> io::Result<(Self, &OsStr)> {
        let (parent, name) = split(path)?;
        Ok((Self::make(parent)?, name))
    }

    pub fn holding(path: &Path) -> io::Result<(Self, &OsStr)> {
        let (parent, name) = split(path)?;
        Ok((Self::open_trusted(parent)?, name))
    }

    pub fn sub(&self, name: &OsStr) -> io::Result<Self> {
        Self::at(self.fd.as_fd(), name)
    }

    fn at(dir: impl AsFd, name: &OsStr) -> io::Result<Self> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
        match openat(dir, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Dir { fd }),
            Err(Errno::ELOOP | Errno::ENOTDIR) => Err(io::Error::new(
                io::ErrorKind::NotADirectory,
                "it must be a directory, and no link to one",
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// What has this name; a link is not followed.
    pub fn stat(&self, name: impl AsRef<OsStr>) -> io::Result<FileStat> {
        Ok(fstatat(&self.fd, name.as_ref(), AtFlags::AT_SYMLINK_NOFOLLOW)?)
    }

    pub fn own_stat(&self) -> io::Result<FileStat> {
        Ok(fstat(&self.fd)?)
    }

    pub fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A path that leads here whatever happens to the directory's name, for calls that take no descriptor.
    pub fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.fd.as_raw_fd().to_string())
    }

    pub fn rename(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        Ok(renameat(&self.fd, from, &self.fd, to)?)
    }

    pub fn make_dir(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<()> {
        Ok(mkdirat(&self.fd, name.as_ref(), Mode::from_bits_truncate(mode))?)
    }

    /// Opens a regular file for reading and writing, which is made if there is none.
    pub fn open_or_make(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let mode = Mode::from_bits_truncate(mode);
        let fd = openat(&self.fd, name.as_ref(), flags | OFlag::O_CLOEXEC, mode)?;
        match kind(&fstat(&fd)?) {
            SFlag::S_IFREG => Ok(File::from(fd)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it must be a regular file")),
        }
    }

    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(unlinkat(&self.fd, name.as_ref(), UnlinkatFlags::NoRemoveDir)?)
    }

    pub fn remove_dir(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(unlinkat(&self.fd, name.as_ref(), UnlinkatFlags::RemoveDir)?)
    }

    /// Removes what has this name, and if it is a directory all in it.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        self.remove_within(name.as_ref(), DEEPEST)
    }

    fn remove_within(&self, name: &OsStr, depth: u32) -> io::Result<()> {
        if !is_directory(&self.stat(name)?) {
            return self.remove(name);
        }
        if depth == 0 {
            return Err(io::Error::other("it holds directories too deep to be ours"));
        }
        let inner = self.sub(name)?;
        for entry in inner.names()? {
            inner.remove_within(&entry, depth - 1)?;
        }
        self.remove_dir(name)
    }

    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        // Opened again: reading moves a descriptor's position.
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
        for entry in nix::dir::Dir::openat(&self.fd, ".", flags, Mode::empty())? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Makes way for a file: removes an empty directory of this name, as container runtimes leave where a
    /// mount's source was missing.
    pub fn clear(&self, name: &OsStr) -> io::Result<()> {
        match self.stat(name) {
            Ok(stat) if is_directory(&stat) => self.remove_dir(name),
            _ => Ok(()),
        }
    }

    /// Gives `content` to the file of this name, whole or not at all: by a new file that takes its place,
    /// whatever is there but a directory. With `mode`, whatever the umask. `durable`: a power cut leaves one or the
    /// other. Where it fails, what was there before is still there, and nothing else.
    pub fn replace(
        &self,
        name: &OsStr,
        content: &[u8],
        mode: u32,
        durable: bool,
    ) -> io::Result<()> {
        let (temporary, mut file) = self.create(name, mode)?;
        let written = file.write_all(content).and_then(|()| {
            file.set_permissions(Permissions::from_mode(mode))?;
            if durable {
                file.sync_all()?;
            }
            renameat(&self.fd, temporary.as_os_str(), &self.fd, name)?;
            if durable {
                fsync(&self.fd)?;
            }
            Ok(())
        });
        if written.is_err() {
            // The error that matters is the first.
            let _ = self.remove(&temporary);
        }
        written
    }

    /// A new file with a name that nobody else has. Not by process id alone: in containers all are 1. It begins
    /// with a dot, because some read every file of their directory but those.
    fn create(&self, name: &OsStr, mode: u32) -> io::Result<(OsString, File)> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
        let (flags, mode) = (flags | OFlag::O_CLOEXEC, Mode::from_bits_truncate(mode));
        loop {
            let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let mut temporary = OsString::from(".");
            temporary.push(name);
            temporary.push(format!(".{pid}-{next}.new"));
            match openat(&self.fd, temporary.as_os_str(), flags, mode) {
                Ok(fd) => return Ok((temporary, File::from(fd))),
                // Left by one of this number that was killed.
                Err(Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Makes `path` a regular file with this content, which all whom `mode` names may use, whole or not at all (see
/// [`Dir::replace`]). False if it was one.
pub fn put(path: &Path, content: &[u8], mode: u32, durable: bool) -> io::Result<bool> {
    // A link may lead elsewhere tomorrow.
    let is_plain = path
        .symlink_metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & mode == mode);
    let most = u64::try_from(content.len()).unwrap_or(u64::MAX);
    if is_plain && read(path, most).is_ok_and(|found| found == content) {
        return Ok(false);
    }
    let (dir, name) = Dir::of(path)?;
    dir.clear(name)?;
    dir.replace(name, content, mode, durable)?;
    Ok(true)
}

fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    Ok((parent.unwrap_or(Path::new(".")), name))
}

/// Opens a directory, to lock it or to have its names on disk. Links are followed.
pub fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    Ok(File::from(openat(AT_FDCWD, path, flags, Mode::empty())?))
}

pub fn is_directory(stat: &FileStat) -> bool {
    kind(stat) == SFlag::S_IFDIR
}

pub(super) fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_symlink())
}

/// What the kernel shows for an owner that this user namespace has no name for (`overflowuid`, proc(5)). Nobody
/// here is one.
const UNMAPPED: u32 = 65534;

impl Dir {
    /// As [`Dir::open`], of a directory that this user owns.
    pub fn own(path: &Path) -> io::Result<Self> {
        let dir = Self::open(path)?;
        let (owner, caller) = (dir.own_stat()?.st_uid, geteuid().as_raw());
        match owner == caller {
            true => Ok(dir),
            false => Err(not_ours(format!("it is uid {owner}'s, and this is uid {caller}"))),
        }
    }
}

/// Whether the other end of a connection over a Unix socket acts for this user, or for root, who may be anybody.
pub fn check_peer(stream: &impl AsFd) -> io::Result<()> {
    let (peer, caller) = (getsockopt(stream, PeerCredentials)?.uid(), geteuid().as_raw());
    match peer == 0 || peer == caller {
        true => Ok(()),
        false => Err(not_ours(format!("the other end is uid {peer}'s, and this is uid {caller}"))),
    }
}

fn not_ours(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Where this user may keep what no other user can replace: `$XDG_RUNTIME_DIR`, if it is this user's own; else the
/// temporary directory.
pub fn base() -> io::Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // With sudo it may be the caller's.
    if let Some(runtime) = runtime.filter(|dir| is_own(dir)) {
        return Ok(runtime);
    }
    let temporary = std::env::temp_dir();
    match is_shared_safely(&temporary) {
        true => Ok(temporary),
        false => Err(not_ours(format!(
            "others may replace what is in {}: set XDG_RUNTIME_DIR to a directory of your own with mode 0700, in \
             which and above which nobody else may write",
            temporary.display()
        ))),
    }
}

fn is_own(dir: &Path) -> bool {
    dir.is_absolute()
        && Dir::own(dir).and_then(|dir| dir.own_stat()).is_ok_and(|stat| stat.st_mode & 0o022 == 0)
        && dir.canonicalize().is_ok_and(|real| real.ancestors().all(is_kept))
}

/// Whether others can change only what is theirs in `dir`.
fn is_shared_safely(dir: &Path) -> bool {
    dir.canonicalize().is_ok_and(|real| real.is_dir() && real.ancestors().all(is_kept))
}

/// Whether what others own in this directory is all that they can rename or remove: it is root's or the
/// user's, and either nobody else may write or it is sticky.
fn is_kept(dir: &Path) -> bool {
    let owners = [0, geteuid().as_raw(), UNMAPPED];
    let kept = |stat: FileStat| {
        owners.contains(&stat.st_uid) && (stat.st_mode & 0o022 == 0 || stat.st_mode & 0o1000 != 0)
    };
    Dir::open(dir).and_then(|dir| dir.own_stat()).is_ok_and(kept)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_replacement_follows_no_link_and_leaves_nothing_else() {
        let base = tempfile::tempdir().unwrap();
        let dir = Dir::open(base.path()).unwrap();
        let at = |name: &str| base.path().join(name);
        std::fs::write(at("victim"), "precious").unwrap();
        symlink("victim", at("link")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["new", "link", "fifo"] {
            dir.replace(OsStr::new(name), b"text", 0o640, true).unwrap();
            let meta = at(name).symlink_metadata().unwrap();
            assert!(meta.is_file() && meta.permissions().mode() & 0o777 == 0o640, "{name}");
            assert_eq!(std::fs::read(at(name)).unwrap(), b"text");
        }
        assert_eq!(std::fs::read(at("victim")).unwrap(), b"precious");
        std::fs::create_dir(at("directory")).unwrap();
        assert!(dir.replace(OsStr::new("directory"), b"text", 0o640, false).is_err());
        assert_eq!(dir.names().unwrap().len(), 5, "{:?}", dir.names());
    }

    #[test]
    fn a_tree_goes_and_what_its_links_lead_to_stays() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        std::fs::create_dir_all(at("tree/a/b")).unwrap();
        std::fs::create_dir(at("victim")).unwrap();
        std::fs::write(at("victim/file"), "precious").unwrap();
        symlink(at("victim"), at("tree/a/link")).unwrap();
        std::fs::write(at("tree/file"), "").unwrap();
        let dir = Dir::open(base.path()).unwrap();
        assert!(dir.remove("tree").is_err() && dir.remove_dir("tree").is_err());
        dir.remove_tree("tree").unwrap();
        assert!(!at("tree").exists() && at("victim/file").exists());
        // A link goes itself.
        symlink(at("victim"), at("link")).unwrap();
        dir.remove_tree("link").unwrap();
        assert!(at("victim/file").exists() && !is_link(&at("link")));
    }

    #[test]
    fn a_link_to_a_directory_is_none_and_followed_only_if_it_is_trusted() {
        let base = tempfile::tempdir().unwrap();
        let link = base.path().join("link");
        std::fs::create_dir(base.path().join("real")).unwrap();
        symlink("real", &link).unwrap();
        let error = Dir::open(&link).unwrap_err();
        assert!(error.to_string().contains("no link"), "{error}");
        assert!(Dir::open_trusted(&link).is_ok());
        if std::os::unix::fs::lchown(&link, Some(12345), None).is_ok() {
            assert!(Dir::open_trusted(&link).is_err(), "somebody else's");
        }
        let made = base.path().join("made/on/the/way");
        let (dir, name) = Dir::of(&made).unwrap();
        dir.replace(name, b"", 0o600, false).unwrap();
        assert!(made.is_file());
    }

    #[test]
    fn what_is_opened_stays_what_it_was() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        std::fs::create_dir(at("dir")).unwrap();
        std::fs::create_dir(at("victim")).unwrap();
        std::fs::write(at("victim/file"), "precious").unwrap();
        let dir = Dir::open(&at("dir")).unwrap();
        std::fs::rename(at("dir"), at("aside")).unwrap();
        symlink("victim", at("dir")).unwrap();
        dir.replace(OsStr::new("file"), b"", 0o600, false).unwrap();
        dir.remove("file").unwrap();
        assert_eq!(std::fs::read(at("victim/file")).unwrap(), b"precious");
    }
}

#[cfg(test)]
mod own_tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt;

    use super::*;

    fn set_mode(dir: &Path, mode: u32) {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_change_is_not_taken() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("dir");
        fs::create_dir(&dir).unwrap();
        for (mode, own, shared) in
            [(0o700, true, true), (0o755, true, true), (0o777, false, false), (0o1777, false, true)]
        {
            set_mode(&dir, mode);
            assert_eq!((is_own(&dir), is_shared_safely(&dir)), (own, shared), "{mode:o}");
        }
        set_mode(&dir, 0o700);
        // A user that may write above may put another in its place.
        set_mode(base.path(), 0o777);
        assert!(!is_own(&dir) && !is_shared_safely(&dir));
        set_mode(base.path(), 0o700);
        let link = base.path().join("link");
        symlink("dir", &link).unwrap();
        assert!(!is_own(&link), "a link is nobody's");
        assert!(!is_own(Path::new("relative")) && !is_own(&base.path().join("absent")));
        if chown(&dir, Some(12345), None).is_ok() {
            assert!(!is_own(&dir) && !is_shared_safely(&dir), "somebody else's");
        }
    }

    #[test]
    fn only_the_own_user_and_root_are_talked_to() {
        let base = tempfile::tempdir().unwrap();
        let connect = |name: &str| UnixStream::connect(base.path().join(name)).unwrap();
        let listener = UnixListener::bind(base.path().join("socket")).unwrap();
        let talk = connect("socket");
        check_peer(&talk).unwrap();
        check_peer(&listener.accept().unwrap().0).unwrap();

        let Some(mut other) = of_another_user(base.path()) else { return };
        let error = check_peer(&connect("another")).unwrap_err();
        assert!(error.to_string().contains("uid 65534's"), "{error}");
        let error = Dir::own(&base.path().join("theirs")).unwrap_err();
        assert!(error.to_string().contains("uid 65534's"), "{error}");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    /// A listener and a directory of another user's in `dir`; `None` where this is not root.
    fn of_another_user(dir: &Path) -> Option<std::process::Child> {
        set_mode(dir, 0o1777);
        let mut command = std::process::Command::new("python3");
        command.arg("-c").arg(
            "import os, socket, time; os.mkdir('theirs'); s = socket.socket(socket.AF_UNIX); s.bind('another'); \
             s.listen(); open('ready', 'w'); time.sleep(100)",
        );
        if !geteuid().is_root() {
            eprintln!("not checked, for only root can be another user");
            return None;
        }
        let mut child = command.current_dir(dir).uid(65534).gid(65534).spawn().unwrap();
        while !dir.join("ready").exists() {
            assert_eq!(child.try_wait().unwrap(), None);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Some(child)
    }
}
