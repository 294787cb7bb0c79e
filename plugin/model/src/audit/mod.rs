//! Lines of the audit trail: origin, event, and its allocation or GPU.

mod actor;
mod event;
mod what;
mod words;

pub use actor::Actor;
pub use event::{Event, TEXT_KEPT};
pub use what::{Behind, Limits, What};
