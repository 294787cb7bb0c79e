//! What root asks: the status, and what changes limits and cordons.

mod config;
pub mod reach;
mod server;
mod status;
mod steer;
mod text;

pub use reach::{EXIT_FORBIDDEN, EXIT_UNAVAILABLE, EXIT_USAGE, ask, call, sentence};
pub(crate) use server::Turns;
pub use server::routes;
pub use status::StatusView;
pub(crate) use status::Survey;
pub(crate) use text::left;
pub use text::{Names, text as status_text};
