//! Regular files: read, and no more of one than was expected; and opened to be written, for the owner alone.

use std::fs::{File, Metadata, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::libc::{O_NOCTTY, O_NONBLOCK};

use super::patience::{Unresponsive, in_time};

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Something else is there.
    #[error("it is {0} and must be a regular file")]
    Kind(&'static str),
    /// It has more bytes than make sense.
    #[error("it is larger than {} KiB, which is the most that is read", .0 >> 10)]
    TooLarge(u64),
    /// Its bytes are no text.
    #[error("it is not text in UTF-8")]
    NotText,
    /// What the system says.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FileError {
    /// The system's word for it.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            FileError::Io(error) => error.kind(),
            FileError::Kind(_) | FileError::TooLarge(_) | FileError::NotText => {
                io::ErrorKind::InvalidData
            }
        }
    }
}

impl From<Unresponsive> for FileError {
    fn from(silent: Unresponsive) -> Self {
        FileError::Io(silent.into())
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

/// All bytes of the regular file at `path`, which links may lead to, if they are `most` at most.
///
/// # Errors
/// See [`FileError`]; nothing that lies there makes it wait for longer than [`in_time`] does.
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

/// The same as text.
///
/// # Errors
/// As [`read`]; bytes that are no text.
pub fn text(path: &Path, most: u64) -> Result<String, FileError> {
    utf8(read(path, most)?)
}

/// Bytes as text.
///
/// # Errors
/// They are none.
pub fn utf8(bytes: Vec<u8>) -> Result<String, FileError> {
    String::from_utf8(bytes).map_err(|_| FileError::NotText)
}

/// Opens a regular file for reading, without waiting for anybody.
///
/// # Errors
/// It is something else; what the system says.
pub fn open(path: &Path) -> Result<File, FileError> {
    // To open a device may do something to it, so it is not opened to see what it is.
    regular(&std::fs::metadata(path)?)?;
    let file = File::options().read(true).custom_flags(O_NONBLOCK | O_NOCTTY).open(path)?;
    // What is there may be another by now.
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file to read and write, or makes it; nobody but its owner can read it from then on. An older version, or
/// another's umask, may have left it open to all.
///
/// # Errors
/// It cannot be opened or made, or is no regular file. A mode that cannot be changed is none: the owner of the file is
/// another, and its mode is the other's choice.
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

/// Whether a regular file is at `path`, or nothing.
///
/// # Errors
/// Something else is.
pub fn file_or_nothing(path: &Path) -> Result<(), FileError> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        found => regular(&found?),
    }
}

/// The bytes of an open file or stream, if they are `most` at most.
///
/// # Errors
/// There are more; what the system says.
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

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
}
