//! What was: the recorder, which hands looks at everything to `tessera-history`, and answers from it.
//!
//! - [`look`]: pure, a survey as a look
//! - [`events`]: pure, lines of the audit trail as events of an answer
//! - [`Recorder`]: when it is looked, stored and asked

pub mod events;
mod look;
mod recorder;

pub use recorder::{Recorder, options};
