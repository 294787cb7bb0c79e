//! The admin service: what `tessera status` shows, and what changes limits and cordons.

pub mod client;
mod compute;
mod config;
mod explain;
mod server;
mod status;
mod steer;
mod steer_client;
mod table;
pub mod words;

pub use client::{EXIT_UNAVAILABLE, ask, offline};
pub use client::{Format, live, main};
pub(crate) use explain::{Failure, explain};
pub use server::{AdminError, Server};
pub use status::StatusView;
pub(crate) use status::Survey;
pub use steer_client::{CordonArgs, QuotaCommand, cordon, quota};
pub use table::offers;
pub use table::{allocation_json, gpu_json, json};
pub use table::{configuration_json, table};
