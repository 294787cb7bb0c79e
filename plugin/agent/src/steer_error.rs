//! Why a requested change is refused.

use tessera_store::CommitError;

/// Why something stays as it is. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    /// No such thing.
    #[error("{0}")]
    NotFound(String),
    /// The request makes no sense, or is not clear.
    #[error("{0}")]
    Invalid(String),
    /// Not as things are.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NoRoom(String),
    #[error(transparent)]
    Ledger(#[from] CommitError),
}
