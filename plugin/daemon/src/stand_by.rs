//! Standing by: with a DRA driver, a DaemonSet's rolling update starts the new pod beside the old one (`maxSurge`).
//! Two plugins cannot share a ledger, so the new one waits, and counts as ready, until the old one has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::status_board::StatusBoard;
use tessera_api::admin::StatusView;
use tessera_api::metrics;
use tessera_config::{Config, Current};
use tessera_gpu::Discovery;
use tessera_tenant::regions::directory_lock::DirectoryLock;
use tracing::{debug, info};

use crate::api;

/// How often it is tried to take over.
const STEP: Duration = Duration::from_millis(50);

/// Waits until no other plugin has the pages directory, where the configuration allows two side by side. Answers
/// probes meanwhile.
pub async fn stand_by(config: &Config, discovery: &Arc<dyn Discovery>) {
    let pages = &config.paths.pages;
    if !config.dra.enabled || is_free(pages) {
        return;
    }
    info!(pages = %pages.display(), "another plugin serves this node; standing by until it ends");
    let view = StatusView::new(
        Current::from(config.clone()),
        Arc::clone(discovery),
        Arc::new(StatusBoard::default()),
    );
    view.stand_by();
    let view = Arc::new(view);
    let _probes = metrics::Server::start(config.metrics.listen.clone(), Arc::clone(&view));
    // For the startup probe, without which no other probe counts. Where the other plugin has the same path, it
    // answers there.
    let socket = api::bind(&config.paths.admin).inspect_err(|error| debug!("{error}")).ok();
    let _api = socket.and_then(|socket| api::serve_root(socket, view));
    while !is_free(pages) {
        tokio::time::sleep(STEP).await;
    }
    info!("the other plugin has ended; taking over");
}

fn is_free(pages: &Path) -> bool {
    // What is not there yet is nobody's; what cannot be looked at is judged when it is taken.
    !pages.exists() || !DirectoryLock::is_taken(pages)
}
