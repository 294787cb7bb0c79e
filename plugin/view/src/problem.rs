//! An answer that is no success.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is wrong, and what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Problem {
    /// [`crate::API_VERSION`].
    pub api_version: String,
    /// A sentence.
    pub error: String,
    /// HTTP's status.
    pub code: u16,
}
