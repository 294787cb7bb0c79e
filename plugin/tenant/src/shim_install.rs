//! Installing the shim on the host: under a directory named by its content, by atomic rename, never
//! over another. Running containers keep the file they mounted; overwriting a mapped library in
//! place would crash them, and removing it would break their restart.
//!
//! A container mounts the one that its Allocate named, and mounts it again at every restart, until kubelet forgets the
//! container. So the ledger says which may go.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::statvfs::{FsFlags, statvfs};
use sha2::{Digest, Sha256};
use tessera_model::record::Record;
use tessera_region::layout;
use tessera_system::files::{self, Dir};

use crate::delivery::Delivery;

pub const SHIM: &str = "libtessera.so";
pub const PRELOAD: &str = "ld.so.preload";

/// In the name of what is being written; see [`files::Dir::replace`].
const TEMPORARY: &str = ".new";

/// Why the shim is not installed, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ShimError(String);

impl ShimError {
    fn io(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        ShimError(match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => format!(
                "paths.shim {path} is read-only and does not hold this version of the shim; mount it writable, \
                 or choose another directory"
            ),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!(
                "no room for the shim at {path}: free some space on its disk; nothing was changed"
            ),
            _ => format!("cannot install the shim at {path}: {error}"),
        })
    }
}

/// The shim to install where the configuration names none: beside the executable.
pub fn default_source() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    executable.with_file_name(SHIM)
}

/// Installs `source` under `dir`. Cheap when it is there already, and then nothing is written: the
/// file system may be read-only.
pub fn install(source: &Path, dir: &Path) -> Result<Delivery, ShimError> {
    let library = read(source)?;
    let name = name(&library);
    place_at(dir, &name, &library)?;
    Ok(at(dir, &name))
}

/// Makes the shim that containers were given under `name` whole again if it is missing or damaged: a
/// dynamic linker leaves out what it can't load, and the quota with it. Where the very same one can't
/// be had, it is `source`. True if there was something to do.
pub fn restore(source: &Path, dir: &Path, known: &str) -> Result<bool, ShimError> {
    let found = files::read(&at(dir, known).shim, files::LIBRARY).ok();
    let same = found.filter(|found| name(found) == known);
    place_at(dir, known, &same.map_or_else(|| read(source), Ok)?)
}

/// The name of the directory for a library, which is all that containers' mounts say of it.
fn name(library: &[u8]) -> String {
    Sha256::digest(library)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn at(dir: &Path, name: &str) -> Delivery {
    let home = dir.join(name);
    Delivery { shim: home.join(SHIM), preload: home.join(PRELOAD) }
}

pub fn name_of(delivery: &Delivery) -> Option<String> {
    let home = delivery.shim.parent()?;
    home.file_name().and_then(OsStr::to_str).map(str::to_owned)
}

fn read(source: &Path) -> Result<Vec<u8>, ShimError> {
    let path = source.display();
    Err(ShimError(match files::read(source, files::LIBRARY) {
        Ok(library) if library.starts_with(b"\x7fELF") => return Ok(library),
        Ok(_) => format!(
            "{path} is not an ELF shared library; paths.shim_source must name libtessera.so"
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => format!(
            "no libtessera.so at {path}; paths.shim_source names it where it is not beside `tessera`"
        ),
        Err(error) => format!("cannot install the shim at {path}: {error}"),
    }))
}

/// Makes both files of a shim whole under this name. True if one was not.
fn place_at(dir: &Path, name: &str, library: &[u8]) -> Result<bool, ShimError> {
    let home = dir.join(name);
    // Before anything is made there. Tests of any kind may run where this cannot be asked; the loader
    // then has the last word.
    let existing = home.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if statvfs(existing).is_ok_and(|stat| stat.flags().contains(FsFlags::ST_NOEXEC)) {
        return Err(ShimError(format!(
            "paths.shim {} is mounted noexec, so no program could load the shim from it; choose a directory on \
             another file system",
            dir.display()
        )));
    }
    let failed = |error| ShimError::io(&home, &error);
    std::fs::create_dir_all(&home).map_err(failed)?;
    let delivery = at(dir, name);
    // What `/etc/ld.so.preload` says in a container.
    let line = format!("{}\n", layout::CONTAINER_SHIM);
    // Any user of any container loads them.
    let placed = files::put(&delivery.shim, library, 0o755, true)
        .and_then(|shim| Ok(shim | files::put(&delivery.preload, line.as_bytes(), 0o644, true)?))
        .and_then(|written| {
            // The names, too, are to survive a power cut: kubelet remembers them.
            if written {
                files::open_directory(&home)?.sync_all()?;
            }
            Ok(written)
        });
    if placed.is_err() {
        // Only if it holds nothing.
        let _ = std::fs::remove_dir(&home);
    }
    placed.map_err(failed)
}

/// Since when each installed shim has been of no use to anybody.
pub type Unused = BTreeMap<String, Instant>;

/// Which of `installed` nobody has needed for `grace`. Pure.
///
/// An allocation whose record does not say which shim it has (the record was lost) may have any.
pub fn unneeded<'a>(
    installed: &[String],
    current: &str,
    records: impl IntoIterator<Item = &'a Record>,
    unused: &mut Unused,
    grace: Duration,
    now: Instant,
) -> Vec<String> {
    let needed: Option<BTreeSet<&str>> =
        records.into_iter().map(|record| record.shim.as_deref()).collect();
    let Some(needed) = needed else {
        unused.clear();
        return Vec::new();
    };
    let idle = |name: &&String| *name != current && !needed.contains(name.as_str());
    let idle: Vec<&String> = installed.iter().filter(idle).collect();
    unused.retain(|name, _| idle.contains(&name));
    idle.into_iter()
        .filter(|name| {
            let since = *unused.entry((*name).clone()).or_insert(now);
            now.saturating_duration_since(since) >= grace
        })
        .cloned()
        .collect()
}

/// Names of the shims installed under `dir`; whatever else is there is nobody's business.
pub fn installed(dir: &Path) -> Vec<String> {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.len() == 16 && name.bytes().all(hex))
        .collect()
}

pub fn remove(dir: &Path, name: &str) -> io::Result<()> {
    let dir = Dir::open_trusted(dir)?;
    let home = dir.sub(OsStr::new(name))?;
    for file in home.names()? {
        let text = file.to_string_lossy();
        if text == SHIM || text == PRELOAD || text.contains(TEMPORARY) {
            home.remove(&file)?;
        }
    }
    dir.remove_dir(name)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::record::State;

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
    fn installing_again_makes_whole_what_is_not_and_touches_nothing_else() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let source = library(dir.path(), "one");
        let Delivery { shim, preload } = install(&source, dir.path()).unwrap();
        let inode = || std::fs::metadata(&shim).unwrap().ino();
        let (before, mapped) = (inode(), std::fs::File::open(&shim).unwrap());
        install(&source, dir.path()).unwrap();
        assert_eq!(inode(), before);
        let as_a_directory = |path: &Path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        };
        let aside = dir.path().join("aside");
        let damages: [&dyn Fn(); 4] = [
            // Half of it, as after a power cut.
            &|| std::fs::write(&shim, b"\x7fEL").unwrap(),
            // A dynamic linker that may not read it goes on without.
            &|| std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o600)).unwrap(),
            // As a container runtime leaves what was missing.
            &|| [&shim, &preload].into_iter().for_each(|path| as_a_directory(path)),
            // A link to the very same may lead elsewhere tomorrow.
            &|| {
                std::fs::rename(&shim, &aside).unwrap();
                std::os::unix::fs::symlink(&aside, &shim).unwrap();
            },
        ];
        for damage in damages {
            damage();
            install(&source, dir.path()).unwrap();
            assert_eq!(std::fs::read(&shim).unwrap(), b"\x7fELFone");
            assert_eq!(std::fs::metadata(&shim).unwrap().permissions().mode() & 0o777, 0o755);
            assert!(preload.is_file() && shim.symlink_metadata().unwrap().is_file());
        }
        assert_eq!(mapped.metadata().unwrap().len(), 3, "what was there was not written to");
    }

    #[test]
    fn what_is_no_library_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, "hello").unwrap();
        let refused = |source: &Path| install(source, dir.path()).unwrap_err().to_string();
        assert!(refused(&text).contains("is not an ELF shared library"));
        assert!(refused(&dir.path().join("absent")).contains("no libtessera.so"));
    }

    #[test]
    fn an_old_shim_that_is_gone_is_restored_as_what_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let old = install(&library(dir.path(), "old"), &shims).unwrap();
        let name = name_of(&old).unwrap();
        let source = library(dir.path(), "new");
        assert!(!restore(&source, &shims, &name).unwrap(), "nothing to do");
        std::fs::remove_dir_all(old.shim.parent().unwrap()).unwrap();
        assert!(restore(&source, &shims, &name).unwrap());
        assert_eq!(std::fs::read(&old.shim).unwrap(), b"\x7fELFnew");
        assert!(old.preload.is_file());
        assert!(!restore(&source, &shims, &name).unwrap(), "once");
    }

    #[test]
    fn two_that_install_at_once_do_not_disturb_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let source = library(dir.path(), &"x".repeat(1 << 20));
        let shims = dir.path().join("shims");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| install(&source, &shims).unwrap());
            }
        });
        let delivery = install(&source, &shims).unwrap();
        assert_eq!(std::fs::read(&delivery.shim).unwrap(), std::fs::read(&source).unwrap());
        assert_eq!(std::fs::read_dir(delivery.shim.parent().unwrap()).unwrap().count(), 2);
    }

    /// A file system of its own for a directory; none where mounting is not allowed.
    pub(crate) struct Mounted(PathBuf);
    impl Mounted {
        pub(crate) fn tmpfs(dir: &Path, options: &str) -> Option<Self> {
            use nix::mount::{MsFlags, mount};
            std::fs::create_dir_all(dir).unwrap();
            mount(Some("test"), dir, Some("tmpfs"), MsFlags::empty(), Some(options)).ok()?;
            Some(Mounted(dir.to_owned()))
        }

        pub(crate) fn make_read_only(&self) {
            use nix::mount::{MsFlags, mount};
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(None::<&str>, &self.0, None::<&str>, flags, None::<&str>).unwrap();
        }
    }
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
        }
    }

    #[test]
    fn a_full_disk_is_reported_and_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let Some(_mounted) = Mounted::tmpfs(&shims, "size=128k") else {
            return eprintln!("not run: no file system can be mounted here");
        };
        let old = install(&library(dir.path(), "old"), &shims).unwrap();
        let source = library(dir.path(), &"x".repeat(1 << 20));
        let error = install(&source, &shims).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
        assert_eq!(std::fs::read_dir(&shims).unwrap().count(), 1, "half an installation");
        assert_eq!(std::fs::read(&old.shim).unwrap(), b"\x7fELFold");
    }

    #[test]
    fn a_read_only_disk_serves_if_the_shim_is_on_it_and_is_reported_if_not() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let Some(mounted) = Mounted::tmpfs(&shims, "size=1m") else {
            return eprintln!("not run: no file system can be mounted here");
        };
        install(&library(dir.path(), "one"), &shims).unwrap();
        mounted.make_read_only();
        install(&library(dir.path(), "one"), &shims).unwrap();
        let error = install(&library(dir.path(), "two"), &shims).unwrap_err();
        assert!(error.to_string().contains("is read-only"), "{error}");
    }

    fn record(shim: Option<&str>) -> Record {
        Record {
            resource: "r".into(),
            state: State::Started,
            shim: shim.map(str::to_owned),
            ..Record::new(AllocationId::of("r", [shim.unwrap_or("?")]), 1, Vec::new())
        }
    }

    const GRACE: Duration = Duration::from_secs(3600);

    fn look(names: &[Option<&str>], unused: &mut Unused, now: Instant) -> Vec<String> {
        let records: Vec<Record> = names.iter().map(|name| record(*name)).collect();
        unneeded(&["new", "old", "older"].map(String::from), "new", &records, unused, GRACE, now)
    }

    /// Looks one after the other, each half a grace after the one before, at what records name; what goes at the last.
    fn goes(looks: &[&[Option<&str>]]) -> Vec<String> {
        let (mut unused, mut now) = (Unused::default(), Instant::now());
        let look = |names: &&[Option<&str>]| {
            now += GRACE / 2;
            look(names, &mut unused, now)
        };
        looks.iter().map(look).last().unwrap_or_default()
    }

    #[test]
    fn what_no_allocation_names_goes_after_the_grace() {
        let named: &[_] = &[Some("old"), Some("new")];
        assert_eq!(goes(&[named]), [""; 0]);
        assert_eq!(goes(&[named; 2]), [""; 0]);
        assert_eq!(goes(&[named; 3]), ["older"]);
        assert_eq!(goes(&[named; 20]), ["older"], "never one in use");
        let none: &[_] = &[];
        assert_eq!(goes(&[none; 3]), ["old", "older"], "the current one stays");
        let again: &[_] = &[Some("old")];
        assert_eq!(goes(&[none, again, none]), ["older"], "a new grace");
        assert_eq!(goes(&[none, again, none, none, none]), ["old", "older"]);
        // While an allocation does not say which it has, none goes, and the grace starts again.
        assert_eq!(goes(&[none, none, &[None], none, none]), [""; 0]);
        // Nor does one that could not be removed a moment ago.
        let start = Instant::now();
        let mut unused = Unused::from(["old", "older"].map(|name| (name.to_owned(), start)));
        unused.remove("older");
        assert_eq!(look(none, &mut unused, start + GRACE), ["old"]);
    }

    #[test]
    fn only_what_was_installed_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let delivery = install(&library(dir.path(), "one"), &shims).unwrap();
        let name = name_of(&delivery).unwrap();
        std::fs::create_dir(shims.join("somebody's")).unwrap();
        std::fs::write(shims.join("0123456789abcdef"), "a file").unwrap();
        assert_eq!(installed(&shims), [name.as_str()]);
        std::fs::write(delivery.shim.with_file_name("notes"), "by hand").unwrap();
        assert!(remove(&shims, &name).is_err());
        assert!(shims.join(&name).join("notes").exists());
        std::fs::remove_file(delivery.shim.with_file_name("notes")).unwrap();
        remove(&shims, &name).unwrap();
        assert!(installed(&shims).is_empty() && shims.join("somebody's").is_dir());
    }
}
