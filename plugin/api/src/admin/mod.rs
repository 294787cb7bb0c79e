//! What root asks: `tessera status`, and what changes limits and cordons.

pub mod client;
mod commands;
mod config;
mod explain;
mod offers;
pub mod reach;
mod server;
mod status;
mod steer;
mod text;
mod warnings;
pub mod words;

pub use client::{Format, StatusFormat, live, main, unreachable};
pub use commands::{CordonArgs, QuotaCommand, UncordonArgs, cordon, quota, uncordon};
pub(crate) use explain::explanation;
pub use offers::offers;
pub use reach::{Cause, EXIT_FORBIDDEN, EXIT_UNAVAILABLE, EXIT_USAGE, Unreachable, ask, call, now};
pub(crate) use server::Turns;
pub use server::routes;
pub use status::StatusView;
pub(crate) use status::Survey;
pub(crate) use text::left;
