//! Installing the shim on the host: under a directory named by its content, by atomic rename, never
//! over another. Running containers keep the file they mounted; overwriting a mapped library in
//! place would crash them, and removing it would break their restart.

use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::statvfs::{FsFlags, statvfs};
use sha2::{Digest, Sha256};
use tessera_region::layout;

use crate::allocate::Delivery;

/// File name of the shim.
pub const SHIM: &str = "libtessera.so";
/// File name of what is mounted as `/etc/ld.so.preload`.
pub const PRELOAD: &str = "ld.so.preload";

/// Why the shim is not installed. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// Nothing to install.
    #[error("no libtessera.so at {0}; paths.shim_source names it where it is not beside `tessera`")]
    Missing(PathBuf),
    /// Not a shared library.
    #[error("{0} is not an ELF shared library; paths.shim_source must name libtessera.so")]
    NotElf(PathBuf),
    /// The loader refuses libraries there.
    #[error(
        "paths.shim {0} is mounted noexec, so no program could load the shim from it; choose a \
         directory on another file system"
    )]
    NoExec(PathBuf),
    /// The disk refuses.
    #[error("cannot install the shim at {path}: {error}")]
    Io {
        /// Where.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// The shim to install where the configuration names none: beside the executable.
#[must_use]
pub fn default_source() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    executable.with_file_name(SHIM)
}

/// Installs `source` under `dir`. Cheap when it is there already.
///
/// # Errors
/// See [`ShimError`].
pub fn install(source: &Path, dir: &Path) -> Result<Delivery, ShimError> {
    let library = match std::fs::read(source) {
        Ok(library) if library.starts_with(b"\x7fELF") => library,
        Ok(_) => return Err(ShimError::NotElf(source.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ShimError::Missing(source.to_owned()));
        }
        Err(error) => return Err(ShimError::Io { path: source.to_owned(), error }),
    };
    let hash = Sha256::digest(&library);
    let name: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let home = dir.join(name);
    let io_error = |error| ShimError::Io { path: home.clone(), error };
    std::fs::create_dir_all(&home).map_err(io_error)?;
    // Tests of any kind may run where this cannot be asked; the loader then has the last word.
    if statvfs(&home).is_ok_and(|stat| stat.flags().contains(FsFlags::ST_NOEXEC)) {
        return Err(ShimError::NoExec(home));
    }
    let delivery = Delivery { shim: home.join(SHIM), preload: home.join(PRELOAD) };
    place(&delivery.shim, &library, 0o755).map_err(io_error)?;
    let line = format!("{}\n", layout::CONTAINER_SHIM);
    place(&delivery.preload, line.as_bytes(), 0o644).map_err(io_error)?;
    Ok(delivery)
}

/// Makes `path` a file with this content, whole or not at all.
fn place(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|found| found == content) {
        return Ok(());
    }
    // containerd makes missing mount sources as empty directories.
    if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
        std::fs::remove_dir(path)?;
    }
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temporary)?;
    let written = file
        .write_all(content)
        // Whatever the umask made of it: any user of any container loads this.
        .and_then(|()| file.set_permissions(std::fs::Permissions::from_mode(mode)))
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        // It may hold half a library; the error that matters is the first.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(dir: &Path, content: &str) -> PathBuf {
        let path = dir.join("built.so");
        std::fs::write(&path, [b"\x7fELF", content.as_bytes()].concat()).unwrap();
        path
    }

    #[test]
    fn an_update_leaves_the_old_shim_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let old = install(&library(dir.path(), "one"), &shims).unwrap();
        let new = install(&library(dir.path(), "two"), &shims).unwrap();
        assert_ne!(old.shim, new.shim);
        assert_eq!(std::fs::read(&old.shim).unwrap(), b"\x7fELFone");
        assert_eq!(std::fs::read(&new.shim).unwrap(), b"\x7fELFtwo");
        let preload = std::fs::read_to_string(&new.preload).unwrap();
        assert_eq!(preload, "/usr/local/tessera/libtessera.so\n");
        let mode = std::fs::metadata(&new.shim).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn installing_again_touches_nothing() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let source = library(dir.path(), "one");
        let inode = |d: &Delivery| std::fs::metadata(&d.shim).unwrap().ino();
        let first = install(&source, dir.path()).unwrap();
        let before = inode(&first);
        assert_eq!(inode(&install(&source, dir.path()).unwrap()), before);
    }

    #[test]
    fn a_directory_made_by_the_runtime_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let source = library(dir.path(), "one");
        let delivery = install(&source, dir.path()).unwrap();
        for path in [&delivery.shim, &delivery.preload] {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        }
        install(&source, dir.path()).unwrap();
        assert!(delivery.shim.is_file() && delivery.preload.is_file());
    }

    #[test]
    fn what_is_no_library_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, "hello").unwrap();
        assert!(matches!(install(&text, dir.path()), Err(ShimError::NotElf(_))));
        let absent = dir.path().join("absent");
        assert!(matches!(install(&absent, dir.path()), Err(ShimError::Missing(_))));
    }

    #[test]
    fn a_noexec_mount_is_refused() {
        // /proc is noexec everywhere, /dev/shm and /sys on most hosts; only a writable one shows
        // that nothing is left behind.
        let Some(noexec) = ["/dev/shm", "/run"].map(Path::new).into_iter().find(|path| {
            statvfs(*path).is_ok_and(|stat| stat.flags().contains(FsFlags::ST_NOEXEC))
                && tempfile::tempdir_in(path).is_ok()
        }) else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let source = library(dir.path(), "one");
        let target = tempfile::tempdir_in(noexec).unwrap();
        let error = install(&source, target.path()).unwrap_err();
        assert!(matches!(error, ShimError::NoExec(_)), "{error}");
    }
}
