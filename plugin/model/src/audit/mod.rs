//! Lines of the audit trail: who did what, to which allocation or GPU.

mod by;
mod event;
mod what;

pub use by::By;
pub use event::{Event, TEXT_KEPT};
pub use what::{Limits, What};
