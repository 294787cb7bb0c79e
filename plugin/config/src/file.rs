//! The configuration's file, and the last good configuration, which applies where the file is bad.
//!
//! Kubelet restarts a plugin that exits. A plugin that refused a bad file at its start would leave the node
//! without GPUs, although it ran well until then. So the configuration in force is kept beside the ledger.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Config, ConfigError, DEFAULT_FILE, Problem, Source, parse, trace};
use tessera_model::printable;
use tessera_system::files;
use tessera_system::files::{CONFIGURATION, FileError};

/// Where the configuration comes from.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// `--config`; `None` for [`DEFAULT_FILE`], which may be absent.
    pub asked: Option<PathBuf>,
}

/// The user named a file and may not read it. Commands that meet it exit 77 (`EX_NOPERM`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: permission denied: this user may not read the file; try again with sudo, or name with --config a copy that \
     this user may read",
    .0.display()
)]
pub struct Forbidden(PathBuf);

/// Why no plugin is asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CannotAsk {
    /// See [`Forbidden`].
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    /// The file cannot be read.
    #[error(transparent)]
    Unread(ConfigError),
}

/// A configuration, and where it is not what the file says, why.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// What holds.
    pub config: Config,
    /// Its text.
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

    /// Reads it.
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

    /// Whether the user may read the file that the user named.
    ///
    /// # Errors
    /// No.
    pub fn may_be_read(&self) -> Result<(), Forbidden> {
        match &self.asked {
            Some(path) => match files::text(path, CONFIGURATION) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    Err(Forbidden(path.clone()))
                }
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// What `serve` and its like begin with: the file; where that is bad, the last good one.
    ///
    /// # Errors
    /// The file is bad, and there is no last good one: all problems at once.
    pub fn start(&self) -> Result<LoadedConfig, ConfigError> {
        let Judged { config, text, problems } = self.judge();
        if problems.is_empty() {
            return Ok(LoadedConfig { config, text, refused: None });
        }
        let refused = ConfigError { file: Some(self.path().to_owned()), problems };
        let Some((config, text)) = self.last_good(&config) else { return Err(refused) };
        Ok(LoadedConfig { config, text, refused: Some(refused) })
    }

    /// What a program that only asks the plugin needs to find it. Says so on standard error where the file is
    /// bad.
    ///
    /// # Errors
    /// The file that the user named cannot be read, and no plugin ever ran with it: another than the one meant would be
    /// asked.
    pub fn for_asking(&self) -> Result<Config, CannotAsk> {
        self.may_be_read()?;
        let judged = self.judge();
        if let Some(path) = &self.asked
            && files::text(path, CONFIGURATION).is_err()
            && trace::find(path).is_none()
        {
            let file = Some(path.clone());
            return Err(CannotAsk::Unread(ConfigError { file, problems: judged.problems }));
        }
        if judged.problems.is_empty() {
            return Ok(judged.config);
        }
        let file = Some(self.path().to_owned());
        let known = self.last_good(&judged.config);
        let which = match known {
            Some(_) => "the last good configuration says where the plugin is",
            None => "looking for the plugin as far as the file can be read",
        };
        let error = ConfigError { file, ..judged.error() }.to_string();
        eprintln!("{}\nthe configuration is bad; {which}", printable::lines(&error));
        Ok(known.map_or(judged.config, |(config, _)| config))
    }
}

impl ConfigFile {
    /// The last good configuration, of a file that says `read` as far as it can be read: beside the ledger
    /// that it names, if it does; else where the trace says that it was kept last; else beside the default
    /// ledger.
    fn last_good(&self, read: &Config) -> Option<(Config, String)> {
        let (named, default) = (&read.paths.ledger, Config::default().paths.ledger);
        let traced = trace::find(self.path());
        let ledgers = match *named == default {
            true => [traced, Some(default)],
            false => [Some(named.clone()), traced],
        };
        ledgers.into_iter().flatten().find_map(|ledger| last_good(&ledger))
    }

    /// Keeps `text` as the last good configuration, and a trace of where that is, which a file that cannot
    /// be read does not tell.
    ///
    /// # Errors
    /// What the file system says.
    pub fn keep_last_good(&self, ledger: &Path, text: &str) -> io::Result<()> {
        keep_last_good(ledger, text)?;
        trace::leave(self.path(), ledger)
    }
}

impl Judged {
    /// A text that came from `file`.
    pub fn of(text: String, file: &Path) -> Self {
        let (config, problems) = parse::parse(&text, Some(file));
        Judged { config, text, problems }
    }

    /// A file that is not read at all.
    pub fn unread(file: &Path, error: &FileError) -> Self {
        let problems = vec![Problem::new("", None, &unread(error))];
        let source = Source { file: Some(file.to_owned()), ..Source::default() };
        Judged { config: Config { source, ..Config::default() }, text: String::new(), problems }
    }

    /// Whether it could be read which GPUs it is about.
    pub fn names_gpus(&self) -> bool {
        let others = ["", "gpus", "gpus.include", "gpus.exclude"];
        !self.problems.iter().any(|problem| others.contains(&problem.key.as_str()))
    }

    fn error(&self) -> ConfigError {
        ConfigError { file: None, problems: self.problems.clone() }
    }
}

/// Why a file was not read, and what to do.
fn unread(error: &FileError) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "there is no such file; `tessera config default` prints one to begin with".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied: the file cannot be read by this user".to_owned()
        }
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
        assert!(matches!(&error, CannotAsk::Forbidden(Forbidden(of)) if *of == path), "{error}");
        assert!(error.to_string().contains("sudo"), "{error}");
    }

    #[test]
    fn a_named_file_that_is_none_is_looked_past_only_where_a_plugin_ran_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, ledger) = (dir.path().join("config.toml"), dir.path().join("ledger.redb"));
        let file = ConfigFile { asked: Some(path.clone()) };
        let ask = |what: &str| match file.for_asking() {
            Err(CannotAsk::Unread(error)) => error.to_string(),
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
}
