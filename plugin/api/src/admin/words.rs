//! Counts and gates, as the words that people read.

pub use tessera_model::counted::{plural, times};
