//! Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`.
//!
//! - [`families`]: the one table of metrics: names, units, labels, meanings; `docs/metrics.md` is it, too
//! - [`meters`]: what is counted where it happens
//! - [`scene`]: one look at everything, and its series
//! - [`account`]: counters that never go backwards, out of what tenants say
//! - [`text`]: the two text formats and which of them a client wants
//! - [`page`]: the text, made at most once a second, and never on the thread that serves kubelet
//! - [`server`]: the listener and its thread, bounded against slow and many clients
//! - `room`: how many of them, and which make room; `pulse`: whether the thread that serves kubelet turns
//! - `answers`: what is answered

mod account;
mod answers;
pub mod families;
mod page;
mod process;
mod pulse;
mod room;
mod scene;
mod server;
mod text;

pub use server::Server;
