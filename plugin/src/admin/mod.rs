//! The admin service: what `tessera status` shows, and what changes limits and cordons.

pub(crate) mod client;
mod compute;
mod config;
mod convert;
mod explain;
mod server;
mod status;
mod steer;
mod steer_client;
mod table;
pub(crate) mod words;

pub(crate) use client::{EXIT_UNAVAILABLE, ask, offline};
pub use client::{Format, live, main};
pub(crate) use explain::{Failure, explain};
pub use server::{AdminError, Server};
pub use status::Sources;
pub(crate) use status::Survey;
pub use steer_client::{CordonArgs, QuotaCommand, cordon, quota};
pub use table::offers;
pub(crate) use table::{allocation_json, gpu_json, json};
pub(crate) use table::{configuration_json, table};
