//! Failures and the exit statuses that they are.

use std::process::ExitCode;

use tessera_api::admin::EXIT_UNAVAILABLE;
use tessera_fleet::{AskError, Fleet, FleetError};
use tessera_model::printable;

use crate::EXIT_USAGE;

/// `EX_NOPERM` of `sysexits.h`, as the other commands of `tessera` have it.
const EXIT_FORBIDDEN: u8 = 77;

/// A failure, in words that say what to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub text: String,
    pub status: u8,
}

impl Failure {
    /// The request failed, or nothing is called so.
    pub fn failed(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: 1 }
    }

    /// The command line or the kubeconfig is wrong.
    pub fn usage(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: EXIT_USAGE }
    }

    /// The API server or a node forbids it.
    pub fn forbidden(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: EXIT_FORBIDDEN }
    }

    /// Nobody answers.
    pub fn unavailable(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: EXIT_UNAVAILABLE }
    }
}

impl From<FleetError> for Failure {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::Kubeconfig(text) => Failure::usage(text),
            FleetError::Forbidden(text) => Failure::forbidden(text),
            FleetError::Cluster(text) | FleetError::NoPlugin(text) => Failure::unavailable(text),
        }
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        match error {
            AskError::Silent(text) | AskError::Unauthenticated(text) => Failure::unavailable(text),
            AskError::Forbidden(text) | AskError::NoRights(text) => Failure::forbidden(text),
            error => Failure::failed(error.to_string()),
        }
    }
}

/// The status of a command that no node gave its view: that of the reason.
pub(crate) fn unanswered(fleet: &Fleet) -> ExitCode {
    let status = |error: FleetError| Failure::from(error).status;
    fleet.refusal().map_or(EXIT_UNAVAILABLE, status).into()
}

/// The process's status; a failure is said on standard error.
pub(crate) fn exit(name: &str, done: Result<ExitCode, Failure>) -> ExitCode {
    done.unwrap_or_else(|failure| {
        eprintln!("{name}: {}", printable::line(&failure.text));
        ExitCode::from(failure.status)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_no_silence() {
        let status = |failure: Failure| failure.status;
        assert_eq!(status(FleetError::Forbidden("no".into()).into()), 77);
        assert_eq!(status(AskError::Forbidden("no".into()).into()), 77);
        assert_eq!(status(AskError::NoRights("no".into()).into()), 77);
        assert_eq!(status(FleetError::Kubeconfig("tokenFile".into()).into()), 64);
        assert_eq!(status(FleetError::Cluster("slow".into()).into()), 69);
        assert_eq!(status(AskError::Silent("slow".into()).into()), 69);
        // As where the API server says so of the list of pods.
        assert_eq!(status(AskError::Unauthenticated("expired".into()).into()), 69);
        assert_eq!(status(AskError::Unknown("what".into()).into()), 1);
    }
}
