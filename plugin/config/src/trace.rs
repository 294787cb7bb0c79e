//! Records where the ledger of a configuration file is, for a start that cannot read the file: in a file
//! beside it, or, where that is not writable (a ConfigMap), in the state directory.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::file::hash;
use super::{Config, DEFAULT_FILE};
use tessera_system::files;

/// The state directory of a plugin that has another than the default one.
const STATE_DIR_ENV: &str = "TESSERA_STATE_DIR";
/// No path is longer (`PATH_MAX`).
const LONGEST: u64 = 4096;

/// Where the plugin keeps what outlives it, if the configuration does not say so: beside the default ledger.
pub fn state_dir() -> PathBuf {
    let default = || Config::default().paths.ledger.with_file_name("");
    std::env::var_os(STATE_DIR_ENV).map_or_else(default, PathBuf::from)
}

/// The files, in the order in which they are written and looked for.
fn files(config: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(config).unwrap_or_else(|_| config.to_owned());
    let name = absolute.file_name().unwrap_or(OsStr::new("config.toml"));
    let beside = absolute.with_file_name([name, OsStr::new(".ledger")].join(OsStr::new("")));
    let in_state = match absolute == Path::new(DEFAULT_FILE) {
        true => "config.ledger".to_owned(),
        // Several plugins may keep their state there.
        false => format!("config-{}.ledger", hash(&absolute.to_string_lossy())),
    };
    vec![beside, state_dir().join(in_state)]
}

/// Writes down that the file's ledger is `ledger`.
///
/// # Errors
/// It can be written nowhere; only where the ledger is not the default one.
pub(super) fn leave(config: &Path, ledger: &Path) -> io::Result<()> {
    let mut failed = None;
    for file in files(config) {
        match write(&file, ledger) {
            Ok(()) => return Ok(()),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) if ledger != Config::default().paths.ledger => Err(error),
        _ => Ok(()),
    }
}

fn write(file: &Path, ledger: &Path) -> io::Result<()> {
    let line = [ledger.as_os_str().as_bytes(), b"\n"].concat();
    let own = file.to_owned();
    files::in_time(file, move || files::put(&own, &line, 0o644, true))?.map(drop)
}

/// The ledger that was written down last.
pub(super) fn find(config: &Path) -> Option<PathBuf> {
    files(config).iter().find_map(|file| read(file))
}

fn read(file: &Path) -> Option<PathBuf> {
    let bytes = files::read(file, LONGEST).ok()?;
    let path = PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(b"\n")?));
    path.is_absolute().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_found_and_nothing_else_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        assert_eq!(find(&config), None);
        for ledger in ["/srv/a/ledger.redb", "/srv/b/ledger.redb"] {
            leave(&config, Path::new(ledger)).unwrap();
            assert_eq!(find(&config).as_deref(), Some(Path::new(ledger)));
        }
        let beside = dir.path().join("config.toml.ledger");
        for text in ["", "relative\n", "/cut/off"] {
            std::fs::write(&beside, text).unwrap();
            assert_eq!(find(&config), None, "{text:?}");
        }
        std::fs::remove_file(&beside).unwrap();
        nix::unistd::mkfifo(&beside, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(find(&config), None, "and does not wait");
    }
}
