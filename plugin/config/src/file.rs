//! The configuration's file, and the last good configuration, which applies where the file is bad.
//!
//! Kubelet restarts a plugin that exits. A plugin that refused a bad file at its start would leave the node
//! without GPUs, although it ran well until then. So the configuration in force is kept beside the ledger.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tessera_model::printable;
use tessera_system::files;
use tessera_system::files::{CONFIGURATION, FileError};

use super::parse::{FORBIDDEN, parse};
use super::{Config, ConfigError, DEFAULT_FILE, Problem, Source};

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
        let Some((config, text)) = last_good_of(&judged.config) else { return Err(refused) };
        Ok(LoadedConfig { config, text, refused: Some(refused) })
    }

    /// What a program that only asks the plugin needs to find it. Says so on standard error where the file is
    /// bad.
    /// Errors: The file that the user named cannot be read: another plugin than the one meant would be asked.
    pub fn for_asking(&self) -> Result<Config, ConfigError> {
        let judged = self.judge();
        let Some(error) = judged.error() else { return Ok(judged.config) };
        if self.asked.is_some() && judged.is_unread() {
            return Err(error);
        }
        let known = last_good_of(&judged.config);
        let which = match known {
            Some(_) => "the last good configuration says where the plugin is",
            None => "looking for the plugin as far as the file can be read",
        };
        eprintln!("{}\nthe configuration is bad; {which}", printable::lines(&error.to_string()));
        Ok(known.map_or(judged.config, |(config, _)| config))
    }
}

impl Judged {
    pub fn of(text: String, file: &Path) -> Self {
        let (config, problems) = parse(&text, Some(file));
        Judged { config, text, problems }
    }

    pub fn unread(file: &Path, error: &FileError) -> Self {
        let problems = vec![Problem::new("", None, &unread(error))];
        let source = Source { file: Some(file.to_owned()), ..Source::default() };
        Judged { config: Config { source, ..Config::default() }, text: String::new(), problems }
    }

    pub fn error(&self) -> Option<ConfigError> {
        let file = self.config.source.file.clone();
        let problems = self.problems.clone();
        (!problems.is_empty()).then_some(ConfigError { file, problems })
    }

    pub fn sound(self) -> Result<Config, ConfigError> {
        self.error().map_or(Ok(self.config), Err)
    }

    pub fn is_unread(&self) -> bool {
        self.text.is_empty() && !self.problems.is_empty()
    }
}

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

pub fn last_good(ledger: &Path) -> Option<(Config, String)> {
    let path = last_good_path(ledger);
    let text = files::text(&path, CONFIGURATION).ok()?;
    // Good for the version that kept it; this one may think otherwise.
    let judged = Judged::of(text, &path);
    judged.problems.is_empty().then_some((judged.config, judged.text))
}

/// That of a file which says `read` as far as it can be read: beside the ledger that it names, else beside the one of the
/// state directory.
fn last_good_of(read: &Config) -> Option<(Config, String)> {
    let default = Config::default().paths.ledger;
    let in_state = state_dir().join(default.file_name().unwrap_or_default());
    last_good(&read.paths.ledger).or_else(|| last_good(&in_state))
}

pub fn keep_last_good(ledger: &Path, text: &str) -> io::Result<()> {
    let path = last_good_path(ledger);
    let (text, own) = (text.to_owned(), path.clone());
    files::in_time(&path, move || files::put(&own, text.as_bytes(), 0o644, true))?.map(drop)
}

/// The state directory of a plugin that has another than the default one.
const STATE_DIR_ENV: &str = "TESSERA_STATE_DIR";

/// Where the plugin keeps what outlives it, if the configuration does not say so: beside the default ledger.
pub fn state_dir() -> PathBuf {
    let default = || Config::default().paths.ledger.with_file_name("");
    std::env::var_os(STATE_DIR_ENV).map_or_else(default, PathBuf::from)
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
    fn a_named_file_that_is_none_is_no_reason_to_ask_another_plugin() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
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
    }

    #[test]
    fn a_text_that_is_not_toml_says_where_the_last_good_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let (path, ledger) = (dir.path().join("config.toml"), dir.path().join("ledger.redb"));
        keep_last_good(&ledger, "[share]\nreplicas = 3\n").unwrap();
        std::fs::write(&path, format!("[paths]\nledger = {ledger:?}\n[share\n")).unwrap();
        let loaded = ConfigFile { asked: Some(path) }.start().unwrap();
        assert!(loaded.refused.is_some() && loaded.config.share.replicas == 3);
    }
}
