//! Lines of the audit trail: origin, event, and its allocation or GPU.

mod by;
mod event;
mod what;

pub use by::By;
pub use event::{Event, TEXT_KEPT};
pub use what::{Limits, What};
