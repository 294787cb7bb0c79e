//! The configuration's file, and the last good configuration, which applies where the file is bad.
//!
//! Kubelet restarts a plugin that exits. A plugin that refused a bad file at its start would leave the node
//! without GPUs, although it ran well until then. So the configuration in force is kept beside the ledger, and where the
//! ledger of a file is, for a start that cannot read the file: in a file beside it, or, where that is not writable (a
//! ConfigMap), in the state directory.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tessera_model::printable;
use tessera_system::files;
use tessera_system::files::{CONFIGURATION, FileError};

use super::parse::{FORBIDDEN, parse};
use super::{Config, ConfigError, DEFAULT_FILE, Problem, Source};

/// Where the configuration comes from.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// `--config`; `None` for [`DEFAULT_FILE`], which may be absent.
    pub asked: Option<PathBuf>,
}

/// A configuration, and where it is not what the file says, why.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    pub config: Config,
    pub text: String,
    /// What is wrong with the file; `config` is the last good one then.
    pub refused: Option<ConfigError>,
}

/// What a text is worth.
#[derive(Clone, Debug)]
pub struct Judged {
    /// As far as it could be read.
    pub config: Config,
    /// The text; empty where the file could not be read.
    pub text: String,
    /// Empty if all is well.
    pub problems: Vec<Problem>,
}

impl ConfigFile {
    /// Where it is, or would be.
    pub fn path(&self) -> &Path {
        self.asked.as_deref().unwrap_or(Path::new(DEFAULT_FILE))
    }

    pub fn judge(&self) -> Judged {
        let path = self.path();
        match files::text(path, CONFIGURATION) {
            Ok(text) => Judged::of(text, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.asked.is_none() => {
                Judged { config: Config::default(), text: String::new(), problems: Vec::new() }
            }
            Err(error) => Judged::unread(path, &error),
        }
    }

    /// What `serve` and its like begin with: the file; where that is bad, the last good one.
    /// Errors: The file is bad, and there is no last good one: all problems at once.
    pub fn start(&self) -> Result<LoadedConfig, ConfigError> {
        let judged = self.judge();
        let Some(refused) = judged.error() else {
            return Ok(LoadedConfig { config: judged.config, text: judged.text, refused: None });
        };
        let Some((config, text)) = self.last_good(&judged.config) else { return Err(refused) };
        Ok(LoadedConfig { config, text, refused: Some(refused) })
    }

    /// What a program that only asks the plugin needs to find it. Says so on standard error where the file is
    /// bad.
    /// Errors: The file that the user named cannot be read, and the user may not, or no plugin ever ran with it:
    /// another than the one meant would be asked.
    pub fn for_asking(&self) -> Result<Config, ConfigError> {
        let judged = self.judge();
        let Some(error) = judged.error() else { return Ok(judged.config) };
        let is_known = || !error.is_forbidden() && traced(self.path()).is_some();
        if self.asked.is_some() && judged.is_unread() && !is_known() {
            return Err(error);
        }
        let known = self.last_good(&judged.config);
        let which = match known {
            Some(_) => "the last good configuration says where the plugin is",
            None => "looking for the plugin as far as the file can be read",
        };
        eprintln!("{}\nthe configuration is bad; {which}", printable::lines(&error.to_string()));
        Ok(known.map_or(judged.config, |(config, _)| config))
    }

    /// The last good configuration, of a file that says `read` as far as it can be read: beside the ledger
    /// that it names, if it does; else where the trace says that it was kept last; else beside the default
    /// ledger.
    fn last_good(&self, read: &Config) -> Option<(Config, String)> {
        let (named, default) = (&read.paths.ledger, Config::default().paths.ledger);
        let traced = traced(self.path());
        let ledgers = match *named == default {
            true => [traced, Some(default)],
            false => [Some(named.clone()), traced],
        };
        ledgers.into_iter().flatten().find_map(|ledger| last_good(&ledger))
    }

    /// Keeps `text` as the last good configuration, and a trace of where that is, which a file that cannot
    /// be read does not tell.
    pub fn keep_last_good(&self, ledger: &Path, text: &str) -> io::Result<()> {
        keep_last_good(ledger, text)?;
        leave_trace(self.path(), ledger)
    }
}

impl Judged {
    /// A text that came from `file`.
    pub fn of(text: String, file: &Path) -> Self {
        let (config, problems) = parse(&text, Some(file));
        Judged { config, text, problems }
    }

    /// A file that is not read at all.
    pub fn unread(file: &Path, error: &FileError) -> Self {
        let problems = vec![Problem::new("", None, &unread(error))];
        let source = Source { file: Some(file.to_owned()), ..Source::default() };
        Judged { config: Config { source, ..Config::default() }, text: String::new(), problems }
    }

    /// What is wrong, if anything is.
    pub fn error(&self) -> Option<ConfigError> {
        let file = self.config.source.file.clone();
        let problems = self.problems.clone();
        (!problems.is_empty()).then_some(ConfigError { file, problems })
    }

    /// The configuration, if nothing is wrong with it.
    pub fn sound(self) -> Result<Config, ConfigError> {
        self.error().map_or(Ok(self.config), Err)
    }

    /// Whether the file could not be read at all.
    pub fn is_unread(&self) -> bool {
        self.text.is_empty() && !self.problems.is_empty()
    }
}

/// Why a file was not read, and what to do.
fn unread(error: &FileError) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "there is no such file; `tessera config default` prints one to begin with".to_owned()
        }
        io::ErrorKind::PermissionDenied => FORBIDDEN.to_owned(),
        _ => format!("cannot read the file: {error}"),
    }
}

/// A short name of a text: the first 16 hexadecimal digits of its SHA-256.
pub fn hash(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where the last good configuration is kept: on the disk of the ledger, which outlives the pod.
pub fn last_good_path(ledger: &Path) -> PathBuf {
    let name = ledger.file_name().unwrap_or_default().to_string_lossy();
    ledger.with_file_name(format!("{name}.config.toml"))
}

/// The last good configuration and its text, if there is one.
pub fn last_good(ledger: &Path) -> Option<(Config, String)> {
    let path = last_good_path(ledger);
    let text = files::text(&path, CONFIGURATION).ok()?;
    // Good for the version that kept it; this one may think otherwise.
    let judged = Judged::of(text, &path);
    judged.problems.is_empty().then_some((judged.config, judged.text))
}

fn keep_last_good(ledger: &Path, text: &str) -> io::Result<()> {
    let path = last_good_path(ledger);
    let (text, own) = (text.to_owned(), path.clone());
    files::in_time(&path, move || files::put(&own, text.as_bytes(), 0o644, true))?.map(drop)
}

/// The state directory of a plugin that has another than the default one.
const STATE_DIR_ENV: &str = "TESSERA_STATE_DIR";
/// No path is longer (`PATH_MAX`).
const LONGEST_PATH: u64 = 4096;

/// Where the plugin keeps what outlives it, if the configuration does not say so: beside the default ledger.
pub fn state_dir() -> PathBuf {
    let default = || Config::default().paths.ledger.with_file_name("");
    std::env::var_os(STATE_DIR_ENV).map_or_else(default, PathBuf::from)
}

/// The files that say where the ledger is, in the order in which they are written and looked for.
fn traces(config: &Path) -> Vec<PathBuf> {
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
/// Errors: It can be written nowhere; only where the ledger is not the default one.
fn leave_trace(config: &Path, ledger: &Path) -> io::Result<()> {
    let mut failed = None;
    for file in traces(config) {
        match write_trace(&file, ledger) {
            Ok(()) => return Ok(()),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) if ledger != Config::default().paths.ledger => Err(error),
        _ => Ok(()),
    }
}

fn write_trace(file: &Path, ledger: &Path) -> io::Result<()> {
    let line = [ledger.as_os_str().as_bytes(), b"\n"].concat();
    let own = file.to_owned();
    files::in_time(file, move || files::put(&own, &line, 0o644, true))?.map(drop)
}

/// The ledger that was written down last.
fn traced(config: &Path) -> Option<PathBuf> {
    traces(config).iter().find_map(|file| read_trace(file))
}

fn read_trace(file: &Path) -> Option<PathBuf> {
    let bytes = files::read(file, LONGEST_PATH).ok()?;
    let path = PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(b"\n")?));
    path.is_absolute().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a thread that has no right to anything of root's.
    fn as_nobody<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(|| {
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            run()
        });
        thread.join().unwrap()
    }

    #[test]
    fn a_named_file_that_the_user_may_not_read_is_no_reason_to_ask_another_plugin() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
        let file = ConfigFile { asked: Some(path.clone()) };
        let error = as_nobody(move || file.for_asking()).unwrap_err();
        assert!(error.is_forbidden() && error.file.as_ref() == Some(&path), "{error}");
        assert!(error.to_string().contains("sudo"), "{error}");
    }

    #[test]
    fn a_named_file_that_is_none_is_looked_past_only_where_a_plugin_ran_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, ledger) = (dir.path().join("config.toml"), dir.path().join("ledger.redb"));
        let file = ConfigFile { asked: Some(path.clone()) };
        let ask = |what: &str| match file.for_asking() {
            Err(error) if !error.is_forbidden() => error.to_string(),
            other => panic!("{what}: {other:?}"),
        };
        assert!(ask("it is not there").contains("there is no such file"));
        std::fs::create_dir(&path).unwrap();
        ask("it is a directory");
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, b"\xff").unwrap();
        ask("it is no text");
        file.keep_last_good(&ledger, &format!("[paths]\nledger = {ledger:?}\n")).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.for_asking().unwrap().paths.ledger, ledger);
    }

    #[test]
    fn what_is_left_is_found_and_nothing_else_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        assert_eq!(traced(&config), None);
        for ledger in ["/srv/a/ledger.redb", "/srv/b/ledger.redb"] {
            leave_trace(&config, Path::new(ledger)).unwrap();
            assert_eq!(traced(&config).as_deref(), Some(Path::new(ledger)));
        }
        let beside = dir.path().join("config.toml.ledger");
        for text in ["", "relative\n", "/cut/off"] {
            std::fs::write(&beside, text).unwrap();
            assert_eq!(traced(&config), None, "{text:?}");
        }
        std::fs::remove_file(&beside).unwrap();
        nix::unistd::mkfifo(&beside, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(traced(&config), None, "and does not wait");
    }
}
