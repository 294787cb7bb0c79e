//! The admin service: what `tessera status` shows.

mod client;
mod compute;
mod server;
mod status;
mod table;

pub use client::{Format, live, main};
pub use server::{AdminError, Server};
pub use status::Sources;
pub use table::offers;
