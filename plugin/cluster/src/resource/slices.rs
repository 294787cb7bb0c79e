//! What a watch of slices says.

use crate::error::ApiError;

/// What happened to the driver's own slices. Small: the object itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceEvent {
    /// The watch began, or began once more after a gap: list them to know what there is.
    Restarted,
    /// The watch broke or cannot begin, for this reason; it tries again by itself. Once for each row of failures.
    Failed(ApiError),
    /// A slice was made or changed. The writer knows its own change by the resource version of the answer.
    Changed {
        name: String,
        /// `metadata.resourceVersion`.
        resource_version: String,
    },
    Removed {
        name: String,
    },
}
