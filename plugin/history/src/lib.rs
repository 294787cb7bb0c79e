//! What was: figures of tenants and GPUs in buckets of time, bounded, crash-safe, off the hot path.
//!
//! **For**: folding looks into buckets of 10 s, 5 min and 1 h, and their storage in a redb database of their own.
//!
//! **May use**: the view. **Must not**: know the agent; it is handed what the node looks like.
#![forbid(unsafe_code)]

mod cell;
mod fold;
mod history;
mod level;
mod open;
mod query;
mod row;
mod store;
mod subject;

pub use history::{History, beside};
pub use open::{FlushError, Found, Options};
pub use query::QueryError;
pub use subject::{Key, Series};
