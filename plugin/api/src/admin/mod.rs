//! The admin service: what `tessera status` shows, and what changes limits and cordons.

pub mod client;
mod commands;
mod compute;
mod config;
mod explain;
mod json;
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
pub(crate) use explain::{explain, explanation};
pub(crate) use json::holder_json;
pub use json::{allocation_json, configuration_json, gpu_json, json, refusal_json};
pub use offers::offers;
pub use reach::{
    CallError, Cause, EXIT_FORBIDDEN, EXIT_UNAVAILABLE, EXIT_USAGE, Unreachable, ask, call_now,
};
pub use server::{AdminError, Server};
pub use status::StatusView;
pub(crate) use status::Survey;
pub(crate) use text::left;
