//! The admin service: what `tessera status` shows.

mod client;
mod compute;
mod server;
mod status;
mod table;
pub(crate) mod words;

pub(crate) use client::{EXIT_UNAVAILABLE, ask, offline};
pub use client::{Format, live, main};
pub use server::{AdminError, Server};
pub use status::Sources;
pub(crate) use table::json;
pub use table::offers;
