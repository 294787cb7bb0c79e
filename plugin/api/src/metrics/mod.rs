//! Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`.
//!
//! - [`families`]: the table of all metrics: name, unit, labels, help text, value. `docs/metrics.md` shows the same
//! - [`tessera_agent::meters`]: counters of the plugin's own work
//! - `snapshot`: the whole state at one moment, as series
//! - `running_totals`: counters that never decrease, computed from figures that may
//! - `text`: the text, built at most once a second and never on the thread that serves kubelet
//! - `answers`: the response to each request, and who may have how many long ones

mod answers;
pub mod families;
mod running_totals;
mod snapshot;
mod text;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::runtime::Handle;
use tracing::warn;

use crate::admin::StatusView;

/// Serves metrics and probes at the first of these addresses that can be had, now or later, until dropped; that none
/// can is no reason not to serve kubelet. Call it within a runtime: whether that one's threads turn is what
/// `/healthz` tells.
pub fn serve(listen: Vec<SocketAddr>, view: Arc<StatusView>) -> Option<tessera_web::Server> {
    if listen.is_empty() {
        return None;
    }
    let known = Arc::clone(&view);
    let report = Arc::new(move |_, problem: Option<String>| {
        known.board().set_condition("metrics", problem);
    });
    let router = answers::router(Arc::clone(&view), Handle::current());
    let server = tessera_web::Server::metrics(listen, router, report);
    let server = server
        .inspect_err(|error| warn!(%error, "metrics and probes are not served: no thread"))
        .ok()?;
    let bound = server.bound();
    tokio::spawn(async move {
        if let Some(address) = bound.await {
            view.set_metrics_address(address);
        }
    });
    Some(server)
}
