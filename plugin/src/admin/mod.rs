//! The admin service: what `tessera status` shows.

pub(crate) mod client;
mod compute;
mod config;
mod server;
mod status;
mod table;

pub use client::{Format, live, main};
pub use server::{AdminError, Server};
pub use status::Sources;
pub use table::offers;
pub(crate) use table::{configuration_json, table};
