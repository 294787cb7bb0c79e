//! A features file for node feature discovery: whole at any time, by rename. Its worker reads every file of
//! the directory but those whose names begin with a dot.

use std::io::{self, ErrorKind};
use std::path::Path;

use super::PREFIX;
use tessera_system::files;
use tessera_system::files::Dir;

/// Makes `text` the content of `path`, unless it is already; whether it was not.
///
/// Errors: The file system's; a file that holds something else than labels of ours. What was there before is still
/// there then.
pub(super) fn put(path: &Path, text: &str) -> io::Result<bool> {
    let plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if plain {
        let found = files::read(path, files::SMALL)?;
        if found == text.as_bytes() {
            return Ok(false);
        }
        if !is_ours(&found) {
            return Err(not_ours());
        }
    }
    let (dir, name) = Dir::of(path)?;
    // Not durable: after a power cut it is written again.
    dir.replace(name, text.as_bytes(), 0o644, false)?;
    Ok(true)
}

/// Removes the file, if it is there.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let removed = match files::read(path, files::SMALL) {
        Ok(found) if !is_ours(&found) => return Err(not_ours()),
        Ok(_) => Dir::holding(path).and_then(|(dir, name)| dir.remove(name)),
        Err(error) => Err(error.into()),
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether all of it is labels as this plugin writes them.
fn is_ours(found: &[u8]) -> bool {
    let prefix = PREFIX.as_bytes();
    found.split(|byte| *byte == b'\n').all(|line| line.is_empty() || line.starts_with(prefix))
}

fn not_ours() -> io::Error {
    io::Error::new(
        ErrorKind::AlreadyExists,
        "it holds something else than Tessera's labels and is left alone: name another file",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_replaced_as_a_whole_and_only_when_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("features.d/tessera");
        assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        let before = std::fs::File::open(&path).unwrap();
        assert!(!put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        assert!(put(&path, "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n").unwrap());
        // A reader of the old one reads all of it.
        assert_eq!(io::read_to_string(before).unwrap(), "tessera.dev/gpu.a=1\n");
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n"
        );
        let names: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn links_are_overwritten_and_not_followed_and_what_is_anothers_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("tessera"), dir.path().join("other"));
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
        for at in [put(&other, "tessera.dev/gpu.a=1\n").map(drop), remove(&other)] {
            assert_eq!(at.unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    }
}
