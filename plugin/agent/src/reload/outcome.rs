//! The cause and the result of reading the file, and the state since then.

use std::fmt;

use tessera_config::Problem;
use tessera_config::keys::Difference;
use tessera_model::audit::Actor;

/// Why the file is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReloadCause {
    /// It may have changed. The same text again is no news.
    Change,
    /// SIGHUP.
    Signal,
    /// Somebody asked, over the admin socket.
    Asked(Option<Actor>),
}

impl ReloadCause {
    pub(super) fn by(&self) -> Option<Actor> {
        match self {
            ReloadCause::Asked(by) => by.clone(),
            ReloadCause::Change | ReloadCause::Signal => None,
        }
    }
}

impl fmt::Display for ReloadCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReloadCause::Change => "the file changed",
            ReloadCause::Signal => "SIGHUP",
            ReloadCause::Asked(_) => "tessera config reload",
        })
    }
}

/// How it stands with the file; for metrics and `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadState {
    /// Of the text in force: see [`tessera_config::file::hash`].
    pub hash: String,
    /// When the file was last read because of news, Unix milliseconds.
    pub attempted_unix_ms: i64,
    /// When a file last took effect, Unix milliseconds; the start counts.
    pub succeeded_unix_ms: i64,
    /// What is wrong with the file as it is, a line each; empty if it is in force.
    pub errors: Vec<String>,
    /// Keys whose values in the file wait for a restart.
    pub waiting: Vec<String>,
    /// How often a file took effect, and was refused, since the start.
    pub applied: u64,
    /// See `applied`.
    pub refused: u64,
}

impl ReloadState {
    /// Whether the file as it is is in force.
    pub fn is_successful(&self) -> bool {
        self.errors.is_empty()
    }
}

/// What came of reading the file.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Why it was refused; empty if it was not.
    pub problems: Vec<Problem>,
    /// What is different now.
    pub changes: Vec<Difference>,
    /// What will be different after a restart.
    pub waiting: Vec<Difference>,
    /// [`ReloadState::hash`].
    pub hash: String,
}
