//! What people and programs are shown: one model for the command line, the JSON API, metrics and the page.
//!
//! **For**: the types of `/api/v1` and rules on them: what a reader with rights in some namespaces may see
//! ([`narrow`]), what fits next, which workload a pod belongs to ([`workload`]). JSON has the field names of these
//! types.
//!
//! **May use**: the model. **Must not**: do I/O, or know where a view comes from.
//!
//! Sizes are bytes, shares are thousandths of a GPU, instants are Unix milliseconds; durations carry their unit in
//! their names. A reader ignores fields that it does not know; a writer never changes what a field means.
#![forbid(unsafe_code)]

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Declares what a node's view and root's status both say of a thing, once, and then what each says besides: a new figure
/// has its place and its words here, and is in both.
macro_rules! both {
    (
        {$($(#[$doc:meta])* $field:ident: $type:ty,)*}
        $(#[$of_view:meta])* $view:ident {$($view_alone:tt)*}
        $(#[$of_status:meta])* $status:ident {$($status_alone:tt)*}
    ) => {
        $(#[$of_view])*
        pub struct $view {
            $($(#[$doc])* pub $field: $type,)*
            $($view_alone)*
        }

        $(#[$of_status])*
        pub struct $status {
            $($(#[$doc])* pub $field: $type,)*
            $($status_alone)*
        }

        impl $status {
            /// What a view says, too. What it says besides is left at its default.
            pub fn seen(&self) -> $view {
                $view { $($field: self.$field.clone(),)* ..$view::default() }
            }
        }
    };
}

pub mod advice;
pub mod change;
pub mod explain;
pub mod fixtures;
pub mod fleet;
pub mod gpu;
pub mod history;
pub mod narrow;
pub mod node;
pub mod status;
pub mod tenant;
pub mod trace;
pub mod warning;
pub mod workload;

/// The version that every answer carries in `api_version`.
pub const API_VERSION: &str = "tessera.dev/v1";

/// An answer other than success: it says what is wrong and what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Problem {
    pub api_version: String,
    pub error: String,
    /// HTTP's status.
    pub code: u16,
}

/// Why something cannot be shown, or done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Nothing is called so. The text names it and says what there is to choose from.
    #[error("{0}")]
    NotFound(String),
    /// The question makes no sense. The text says what to ask instead.
    #[error("{0}")]
    Invalid(String),
    /// It cannot be done as things stand. The text says what stands against it.
    #[error("{0}")]
    Conflict(String),
    /// There is no room for it. The text says how much there is.
    #[error("{0}")]
    NoRoom(String),
    /// It is not known now: the node, the ledger or the history does not answer.
    #[error("{0}")]
    Unavailable(String),
}
