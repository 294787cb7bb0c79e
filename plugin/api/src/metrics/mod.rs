//! Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`.
//!
//! - [`families`]: the table of all metrics: name, unit, labels, help text. `docs/metrics.md` shows the same
//! - [`tessera_agent::meters`]: counters of the plugin's own work
//! - `snapshot`: reads the whole state once and writes its series
//! - `running_totals`: counters that never decrease, computed from figures that may
//! - `text`: the two text formats, and which of them a client accepts
//! - `text_cache`: the text, built at most once a second and never on the thread that serves kubelet
//! - `server`: the listener and its thread, bounded against slow clients and floods
//! - `connection_limits`: how many connections there may be, and which one is closed for a new one
//! - `liveness`: whether the thread that serves kubelet makes progress
//! - `answers`: the response to each request

mod answers;
mod connection_limits;
pub mod families;
mod liveness;
mod process;
mod running_totals;
mod server;
mod snapshot;
mod text;
mod text_cache;

pub use server::Server;
